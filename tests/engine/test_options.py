"""A misspelt option is an error that names it, its value and the nearest right name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from inspect import signature
from typing import Any

import pytest

from outrider import LLM, SamplingParams, SpeculativeDecoder, SpeculativeDecoderConfig
from outrider.errors import InvalidConfig
from tests.engine.toys import markov


def decoder() -> SpeculativeDecoder:
    return SpeculativeDecoder(None, markov(5, 1, seed=1))


MISSPELT: list[tuple[Callable[..., Any], str, Any, str]] = [
    (SamplingParams, "temprature", 0.5, "temperature"),
    (SamplingParams, "max_new_tokens", 9, "max_tokens"),
    (SamplingParams, "num_return_sequences", 2, "n"),
    (SamplingParams, "guided_regex", "a+", "regex"),
    (lambda **given: replace(SamplingParams(), **given), "top_pp", 0.5, "top_p"),
    (SpeculativeDecoderConfig, "depth", 3, "k"),
    (SpeculativeDecoderConfig, "num_speculative_tokens", 3, "k"),
    (SpeculativeDecoderConfig, "temprature", 0.5, "temperature"),
    (SpeculativeDecoderConfig, "samplng", None, "sampling"),
    (lambda **given: decoder().generate([1], **given), "max_token", 3, "max_tokens"),
    (lambda **given: decoder().generate([1], 2, **given), "temperatur", 1, "temperature"),
    (lambda **given: decoder().generate_batch([[1]], 2, **given), "sed", 1, "seed"),
]


@pytest.mark.parametrize(("call", "name", "value", "meant"), MISSPELT)
def test_a_misspelt_option_is_named(
    call: Callable[..., Any], name: str, value: Any, meant: str
) -> None:
    with pytest.raises(InvalidConfig) as caught:
        call(**{name: value})
    message = str(caught.value)
    assert message.startswith(f"{name}={value!r}: ")
    assert message.endswith(f"; did you mean {meant!r}?")


def test_what_is_near_to_nothing_gets_the_list_alone() -> None:
    with pytest.raises(InvalidConfig, match="SamplingParams has no such option; options are ") as e:
        SamplingParams(**{"xyzzy": 1})
    assert "did you mean" not in str(e.value)


@pytest.mark.parametrize("record", [SamplingParams, SpeculativeDecoderConfig])
def test_signatures_are_those_of_the_fields(record: type) -> None:
    names = list(signature(record).parameters)
    assert names == [field.name for field in fields(record)]


def test_methods_of_an_llm_say_so_before_any_work() -> None:
    llm = LLM.__new__(LLM)  # Nothing of it is looked at.
    for call, name in ((llm.generate, "temprature"), (llm.stream, "temprature")):
        with pytest.raises(InvalidConfig, match=r"temprature=0\.5: LLM\..*did you mean 'temper"):
            call("x", **{name: 0.5})
    with pytest.raises(InvalidConfig, match=r"num_speculative_tokens=3: .*did you mean 'depth'"):
        llm.generate("x", **{"num_speculative_tokens": 3})
    with pytest.raises(InvalidConfig, match=r"did you mean 'drafter'\?"):
        LLM.load("bundled", **{"drafterr": "none"})
