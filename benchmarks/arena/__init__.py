"""Engines side by side, interleaved: the same checkpoints, prompts, tokens and threads."""
