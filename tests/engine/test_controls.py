"""Texts under every control: speculation gives the tokens, and the law, of plain decoding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
)

from outrider import SamplingParams, SpeculativeDecoder, SpeculativeDecoderConfig
from outrider.drafters import ModelDrafter, NgramDrafter, NoDrafter
from outrider.engine import Emitter, Engine, Requests
from outrider.errors import InvalidConfig, ModelError, NonFinite, TokenOutOfRange
from outrider.models.protocol import ProtocolTarget
from outrider.models.tabular import MarkovModel
from outrider.types import Request
from tests.engine import control_laws
from tests.engine.control_rows import AHEAD, COMBINATIONS, EACH, END, VOCAB, law_after
from tests.engine.toys import blurred, markov


def repetitive(model: MarkovModel) -> MarkovModel:
    """A law that likes to say a token again, and to end: what penalties are about."""
    rows = model.rows + 0.6 * np.eye(VOCAB)
    rows[:, END] += 0.08
    return MarkovModel(model.init, rows)


TARGET = repetitive(markov(VOCAB, 1, seed=2))
DRAFT = blurred(TARGET, 3, 0.3)
PREFIXES = [[1, 2], [8, 4, 4, 0, 1, 2], [5, 9, 6], [2, 2, 2, 7]]
CASES = list(EACH.values()) + COMBINATIONS
IDS = list(EACH) + [f"combination{i}" for i in range(len(COMBINATIONS))]


def decoder(draft: Any, given: dict[str, Any], **config: Any) -> SpeculativeDecoder:
    """A decoder that stops at END; the draft model is drawn from under the controls too."""
    made = SpeculativeDecoderConfig(k=3, sampling=SamplingParams(**given), **config).with_eos(END)
    return SpeculativeDecoder(ProtocolTarget(DRAFT) if draft == "model" else draft, TARGET, made)


def logits_after(prefix: list[int]) -> torch.Tensor:
    return torch.from_numpy(np.log(TARGET.law(prefix)))


def length_of(given: dict[str, Any]) -> int:
    return 6 if given.get("no_repeat_ngram") == 1 else 14


@pytest.mark.parametrize("given", CASES, ids=IDS)
@pytest.mark.parametrize("kind", ["greedy", "coupled"])
def test_the_tokens_are_those_of_plain_decoding(given: dict[str, Any], kind: str) -> None:
    length = length_of(given)
    given = given | ({"temperature": 0} if kind == "greedy" else {"seed": 7})
    plain = decoder(None, given).generate_batch(PREFIXES, length)
    accepted = 0
    for draft, width in (("model", 1), ("model", 3), (NgramDrafter(1, 2), 1)):
        drafted = decoder(draft, given, width=width)
        assert drafted.generate_batch(PREFIXES, length) == plain
        accepted += drafted.metrics.accepted
    assert accepted > 0


@pytest.mark.parametrize("given", CASES, ids=IDS)
def test_plain_greedy_is_the_slow_reference(given: dict[str, Any]) -> None:
    given = given | {"temperature": 0}
    made = decoder(None, given).generate_batch(PREFIXES, length_of(given))
    for prompt, text in zip(PREFIXES, made, strict=True):
        for i, token in enumerate(text):
            law = law_after(logits_after(prompt + text[:i]), prompt, text[:i], given)
            assert int(law.argmax()) == token


def texts(
    draft: Any, given: dict[str, Any], rule: str, count: int, length: int
) -> list[tuple[int, ...]]:
    """The first tokens of `count` texts, each with its own seed."""
    engine = Engine(ProtocolTarget(TARGET), draft, Emitter(None), max_texts=500)
    requests = Requests(engine, depth=3, end_tokens=frozenset({END}))
    asked = [
        Request((1, 2), SamplingParams(seed=s, max_tokens=length, **given), rule=rule)
        for s in range(count)
    ]
    made = [one.token_ids for one in requests.complete(asked)]
    assert isinstance(draft, NoDrafter) or engine.metrics.accepted > count / 4
    return made


def drafter() -> ModelDrafter:
    return ModelDrafter(ProtocolTarget(DRAFT))


@pytest.mark.parametrize("name", AHEAD)
def test_rows_blind_to_their_path_give_other_tokens(name: str) -> None:
    """The negative control of the equality above."""
    plain = texts(NoDrafter(), EACH[name], "coupled", 60, 8)
    assert texts(drafter(), EACH[name], "coupled", 60, 8) == plain
    with control_laws.blind():
        assert texts(NoDrafter(), EACH[name], "coupled", 60, 8) == plain
        assert texts(drafter(), EACH[name], "coupled", 60, 8) != plain


def test_a_processor_of_transformers_is_used_as_it_is() -> None:
    for kind in ({"temperature": 0}, {"seed": 3}):
        own = decoder("model", {"repetition_penalty": 1.7, **kind})
        processor = RepetitionPenaltyLogitsProcessor(1.7)
        for given in (processor, [processor], LogitsProcessorList([processor])):
            theirs = decoder("model", {"logits_processors": given, **kind})
            assert theirs.generate_batch(PREFIXES, 15) == own.generate_batch(PREFIXES, 15)
    warped = decoder("model", {"logits_processors": (MinPLogitsWarper(0.2),), "seed": 3})
    assert warped.generate([1], 20) == decoder("model", {"min_p": 0.2, "seed": 3}).generate([1], 20)


def test_a_processor_sees_every_prefix_once_per_row() -> None:
    seen: list[tuple[int, ...]] = []

    def watch(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert scores.shape == (1, VOCAB) and input_ids.dtype == torch.int64
        seen.append(tuple(input_ids[0].tolist()))
        return scores

    text = decoder("model", {"logits_processors": (watch,), "seed": 4}).generate([1, 2], 9)
    assert {(1, 2, *text[:i]) for i in range(9)} <= set(seen)


def broken(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    if input_ids.shape[1] == 5:
        raise RuntimeError("not at five")
    return scores


@pytest.mark.parametrize("draft", [NoDrafter(), ModelDrafter(ProtocolTarget(DRAFT))])
@pytest.mark.parametrize(
    ("processor", "message"),
    [
        (broken, "processor broken failed: .*not at five"),
        (lambda ids, scores: scores[0], r"returned \(13,\)"),
        (lambda ids, scores: None, "returned NoneType"),
    ],
)
def test_a_processor_that_fails_ends_its_own_request(draft, processor, message: str) -> None:
    engine = Engine(ProtocolTarget(TARGET), draft, Emitter(None))
    requests = Requests(engine, depth=3, end_tokens=frozenset())
    fine = SamplingParams(max_tokens=8, seed=3, repetition_penalty=1.3)
    failing = SamplingParams(max_tokens=8, seed=3, logits_processors=(processor,))
    with pytest.raises(ModelError, match=message) as caught:
        requests.complete([Request((i,), p) for i, p in ((1, fine), (4, failing), (2, fine))])
    first, failed, last = caught.value.completions
    assert failed is None
    given = {"seed": 3, "repetition_penalty": 1.3}
    plain = SpeculativeDecoder(
        None, TARGET, SpeculativeDecoderConfig(sampling=SamplingParams(**given))
    )
    assert [list(first.token_ids), list(last.token_ids)] == plain.generate_batch([[1], [2]], 8)


@pytest.mark.parametrize("kind", [{"temperature": 0}, {"seed": 1}, {}])
@pytest.mark.parametrize("draft", [None, "model"])
def test_controls_that_leave_nothing_say_so(kind: dict[str, Any], draft: str | None) -> None:
    given = {"allowed_token_ids": [1, 2], "no_repeat_ngram": 1, **kind}
    with pytest.raises(NonFinite, match="no_repeat_ngram"):
        decoder(draft, given).generate([0], 5)
    assert sorted(decoder(draft, given).generate([0], 2)) == [1, 2]


@pytest.mark.parametrize(
    "given",
    [{"allowed_token_ids": [VOCAB]}, {"bad_words": [[1, VOCAB]]}, {"logit_bias": {VOCAB: 1.0}}],
)
def test_tokens_outside_the_vocabulary_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(TokenOutOfRange, match=f"token {VOCAB} "):
        decoder(None, given).generate([1], 3)


def test_words_of_text_need_a_tokenizer() -> None:
    with pytest.raises(InvalidConfig, match="bad_words='ab' needs a tokenizer"):
        decoder(None, {"bad_words": ["ab"]}).generate([1], 3)


@pytest.mark.parametrize(
    "options",
    [
        {"typical_p": 0.0},
        {"typical_p": 1.1},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": -1.0},
        {"repetition_penalty": float("nan")},
        {"presence_penalty": 2.5},
        {"frequency_penalty": -2.5},
        {"frequency_penalty": "1"},
        {"no_repeat_ngram": -1},
        {"no_repeat_ngram": 2.0},
        {"logit_bias": {-1: 1.0}},
        {"logit_bias": {1: float("inf")}},
        {"logit_bias": {"a": 1.0}},
        {"logit_bias": {1: "x"}},
        {"logit_bias": 5},
        {"logit_bias": [1, 2]},
        {"bad_words": [1, 2]},
        {"bad_words": [[]]},
        {"bad_words": [""]},
        {"bad_words": [[-1]]},
        {"bad_words": 7},
        {"allowed_token_ids": []},
        {"allowed_token_ids": [-1]},
        {"allowed_token_ids": [1.5]},
        {"allowed_token_ids": 3},
        {"logits_processors": [1]},
        {"logits_processors": "abc"},
        {"logprobs": -1},
        {"logprobs": True},
        {"logprobs_mode": "processd"},
    ],
)
def test_controls_that_cannot_be_meant_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig, match=next(iter(options))):
        SamplingParams(**options)


def test_controls_are_kept_hashable_and_as_meant() -> None:
    params = SamplingParams(
        logit_bias={4: 1, 2: -0.5},
        bad_words=["ab", [1, 2], np.array([3])],
        allowed_token_ids=torch.tensor([5, 1, 5]),
        logits_processors=[broken],
    )
    assert params.logit_bias == ((2, -0.5), (4, 1.0))
    assert params.bad_words == ("ab", (1, 2), (3,))
    assert params.allowed_token_ids == (1, 5)
    assert params.logits_processors == (broken,)
    assert hash(params) == hash(SamplingParams(**{n: getattr(params, n) for n in params.__slots__}))
    absent = SamplingParams(logit_bias=None, bad_words=None, logits_processors=None)
    assert absent == SamplingParams()
    assert SamplingParams(bad_words="ab").bad_words == ("ab",)
