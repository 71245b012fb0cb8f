"""Lossless speculative decoding for any PyTorch language model: the same text, sooner."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider.config import SamplingParams
    from outrider.engine import SpeculativeDecoder, SpeculativeDecoderConfig
    from outrider.interop import custom_generate
    from outrider.llm import LLM
    from outrider.models.protocol import DraftModel, DraftProposal, TargetModel, TargetScores
    from outrider.types import Completion, Delta, SpeculativeMetrics

__version__ = "0.1.0"

# Loaded on first use, so that `import outrider.decoding` needs torch and numpy alone.
_HOMES = {
    "LLM": "outrider.llm",
    "Completion": "outrider.types",
    "Delta": "outrider.types",
    "DraftModel": "outrider.models.protocol",
    "DraftProposal": "outrider.models.protocol",
    "SamplingParams": "outrider.config",
    "SpeculativeDecoder": "outrider.engine",
    "SpeculativeDecoderConfig": "outrider.engine",
    "SpeculativeMetrics": "outrider.types",
    "TargetModel": "outrider.models.protocol",
    "TargetScores": "outrider.models.protocol",
    "custom_generate": "outrider.interop",
}

__all__ = [
    "LLM",
    "Completion",
    "Delta",
    "DraftModel",
    "DraftProposal",
    "SamplingParams",
    "SpeculativeDecoder",
    "SpeculativeDecoderConfig",
    "SpeculativeMetrics",
    "TargetModel",
    "TargetScores",
    "custom_generate",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'outrider' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
