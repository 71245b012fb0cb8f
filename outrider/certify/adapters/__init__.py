"""Engines as `certify model` wants them: a callable of prompts, parameters and a seed."""
