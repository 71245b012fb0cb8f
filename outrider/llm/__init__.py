"""The front door: LLM, text in and text out."""

from outrider.llm.llm import LLM

__all__ = ["LLM"]
