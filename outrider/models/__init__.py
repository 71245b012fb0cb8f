"""Language models behind `score / commit / discard`, and the tokenizer beside them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider.models.hf import HuggingFaceTarget
    from outrider.models.libllama import GgufTokenizer, LibllamaTarget
    from outrider.models.recurrent import RecurrentTarget
    from outrider.models.text import TextTokenizer

# Loaded on first use: a decoder over the two-method protocols does not need transformers.
_HOMES = {
    "GgufTokenizer": "outrider.models.libllama",
    "HuggingFaceTarget": "outrider.models.hf",
    "LibllamaTarget": "outrider.models.libllama",
    "RecurrentTarget": "outrider.models.recurrent",
    "TextTokenizer": "outrider.models.text",
}

__all__ = [
    "GgufTokenizer",
    "HuggingFaceTarget",
    "LibllamaTarget",
    "RecurrentTarget",
    "TextTokenizer",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'outrider.models' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
