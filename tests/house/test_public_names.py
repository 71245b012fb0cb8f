"""The public namespace: sorted, flat, and what design section 6 promises."""

from __future__ import annotations

import importlib

import pytest

import outrider
from outrider import errors

PUBLIC = [
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
DECODING = [
    "accept",
    "adjusted_distribution",
    "compute_acceptance_probs",
    "compute_expected_tokens",
    "resample_from_adjusted_target",
    "sample_from_logprobs",
    "sample_index",
    "verify_speculative_tokens",
]
ERRORS = [
    "DegenerateDistribution",
    "DistributionWidthMismatch",
    "DraftShapeMismatch",
    "EmptyPrompt",
    "EndpointError",
    "EndpointRefused",
    "InvalidConfig",
    "MissingExtra",
    "ModelError",
    "NonFinite",
    "OutOfMemory",
    "OutriderError",
    "PromptTooLong",
    "TargetShapeMismatch",
    "TokenOutOfRange",
    "UnsupportedModel",
    "VocabularyMismatch",
]


def sorted_as_ruff_does(names: list[str]) -> list[str]:
    """Constants, then classes, then functions, each by alphabet."""
    return sorted(names, key=lambda n: (0 if n.isupper() else 1 if n[0].isupper() else 2, n))


def test_the_public_names() -> None:
    assert list(outrider.__all__) == sorted_as_ruff_does(PUBLIC)


def test_every_public_name_is_there() -> None:
    assert [name for name in outrider.__all__ if getattr(outrider, name, None) is None] == []


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Lm'"):
        _ = outrider.Lm  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", DECODING)
def test_decoding_carries_the_functions(name: str) -> None:
    assert callable(getattr(importlib.import_module("outrider.decoding"), name))


def test_the_error_tree() -> None:
    found = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.OutriderError)
    }
    assert sorted(found) == ERRORS


def test_every_error_stands_in_the_drawing() -> None:
    assert [name for name in ERRORS if name not in (errors.__doc__ or "")] == []
