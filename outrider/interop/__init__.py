"""Outrider where users already are: inside transformers' `generate`."""

from outrider.interop.generate import custom_generate

__all__ = ["custom_generate"]
