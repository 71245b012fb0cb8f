"""What goes wrong fails alone, is named, and leaves nothing behind."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from outrider import (
    DraftProposal,
    SamplingParams,
    SpeculativeDecoder,
    SpeculativeDecoderConfig,
    TargetScores,
)
from outrider.drafters import Drafter, NoDrafter
from outrider.engine import Emitter, Engine, Requests
from outrider.errors import (
    DistributionWidthMismatch,
    DraftShapeMismatch,
    EmptyPrompt,
    InvalidConfig,
    ModelError,
    NonFinite,
    OutOfMemory,
    TargetShapeMismatch,
    TokenOutOfRange,
    VocabularyMismatch,
)
from outrider.models.protocol import ProtocolTarget
from outrider.models.tabular import FixedDistTargetModel, MarkovModel
from outrider.types import Request
from tests.engine.toys import blurred, decoder, markov

TARGET = markov(5, 1, seed=8)
DRAFT = blurred(TARGET, 9, 0.3)


class Poisoned:
    """A target that gives NaN after token 4."""

    vocab_size = 5

    def verify(self, prefix, draft_tokens):
        rows = [np.log([0.2, 0.2, 0.2, 0.2, 0.2])] * (len(draft_tokens) + 1)
        text = [*prefix, *draft_tokens]
        for i in range(len(rows)):
            if text[len(prefix) - 1 + i] == 4:
                rows[i] = np.full(5, np.nan)
        return TargetScores(rows)


def requests(target, drafter: Drafter, **options) -> Requests:
    engine = Engine(target, drafter, Emitter(None), **options)
    return Requests(engine, depth=3, end_tokens=frozenset())


def test_a_bad_row_fails_its_own_request_only() -> None:
    served = requests(ProtocolTarget(Poisoned()), NoDrafter())
    params = SamplingParams(max_tokens=3, seed=1)
    with pytest.raises(NonFinite, match="row 0 of the round") as caught:
        served.complete([Request((1,), params), Request((4,), params), Request((2,), params)])
    first, failed, last = caught.value.completions
    assert failed is None and len(first.token_ids) == len(last.token_ids) == 3


def test_nan_logits_are_named() -> None:
    with pytest.raises(NonFinite, match="check the model's weights and dtype"):
        decoder(None, Poisoned(), temperature=0.0).generate([4], 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 0}, "k=0"),
        ({"k": 2.5}, "k=2.5"),
        ({"rule": "blok"}, "did you mean 'block'"),
        ({"cost_ratio": -1.0}, "cost_ratio"),
        ({"stop_on_eos": True}, "with_eos"),
        ({"sampling": 3}, "SamplingParams"),
    ],
)
def test_bad_configurations_are_refused(options: dict, message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        SpeculativeDecoderConfig(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_k": -1},
        {"min_p": 2.0},
        {"max_tokens": 0},
        {"max_tokens": 2, "min_tokens": 3},
        {"n": 0},
        {"seed": -1},
        {"seed": 2**64},
        {"stop": ""},
        {"stop_token_ids": (-1,)},
    ],
)
def test_bad_sampling_params_are_refused(options: dict) -> None:
    with pytest.raises(InvalidConfig, match=next(iter(options))):
        SamplingParams(**options)


def test_bad_requests_are_refused_before_any_work() -> None:
    spec = decoder(DRAFT, TARGET)
    with pytest.raises(EmptyPrompt):
        spec.generate([], 5)
    with pytest.raises(EmptyPrompt):
        spec.generate([], 0)
    with pytest.raises(TokenOutOfRange, match=r"token 5 .*0\.\.4"):
        spec.generate([1, 5], 5)
    with pytest.raises(InvalidConfig, match="max_tokens"):
        spec.generate([1])
    with pytest.raises(InvalidConfig, match="exclude"):
        spec.generate([1], 3, seed=1, rng=object())  # type: ignore[arg-type]
    with pytest.raises(InvalidConfig, match="would change the law"):
        decoder(DRAFT, TARGET, rule="greedy").generate([1], 4)
    with pytest.raises(InvalidConfig, match="needs a tokenizer"):
        decoder(DRAFT, TARGET, stop="x").generate([1], 4)
    assert spec.metrics.committed == 0


def test_models_that_do_not_fit_are_refused() -> None:
    with pytest.raises(VocabularyMismatch, match="predicts 4 tokens, the target 5"):
        SpeculativeDecoder(markov(4, 1, 1), TARGET)
    with pytest.raises(InvalidConfig, match="verify"):
        SpeculativeDecoder(None, object())  # type: ignore[arg-type]
    with pytest.raises(InvalidConfig, match="propose"):
        SpeculativeDecoder(object(), TARGET)  # type: ignore[arg-type]


class Proposes:
    """A draft model that answers what it is told to."""

    vocab_size = 5

    def __init__(self, answer) -> None:
        self.answer = answer

    def propose(self, prefix, k, rng):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


ROW = np.log(np.full(5, 0.2))


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (DraftProposal([1, 2], [0.0], None), DraftShapeMismatch),
        (DraftProposal([1], [0.0], [ROW, ROW]), DraftShapeMismatch),
        (DraftProposal([1] * 9, [0.0] * 9, None), DraftShapeMismatch),
        (DraftProposal([7], [0.0], None), TokenOutOfRange),
        (DraftProposal([1], [0.0], [ROW[:3]]), DistributionWidthMismatch),
        (RuntimeError("boom"), ModelError),
    ],
)
def test_broken_proposals_are_named(answer, error) -> None:
    with pytest.raises(error):
        decoder(Proposes(answer), TARGET).generate([1], 9)


def test_broken_scores_are_named() -> None:
    class Short:
        vocab_size = 5

        def verify(self, prefix, draft_tokens):
            return TargetScores([ROW] * len(draft_tokens))

    with pytest.raises(TargetShapeMismatch, match="one row more"):
        decoder(DRAFT, Short()).generate([1], 4)


@pytest.mark.parametrize("weights", [[], [0.0, 0.0], [1.0, -1.0], [np.nan, 1.0]])
def test_laws_without_meaning_are_refused(weights) -> None:
    with pytest.raises(InvalidConfig):
        FixedDistTargetModel(weights)


def test_tables_of_unequal_sides_are_refused() -> None:
    with pytest.raises(InvalidConfig, match="every side"):
        MarkovModel([1, 1], np.ones((3, 3)))


class Tight(ProtocolTarget):
    """A target with room for few texts, or for few rows at a time."""

    def __init__(self, model, *, texts: int = 99, rows: int = 99) -> None:
        super().__init__(model)
        self.texts, self.rows = texts, rows
        self.refused = 0
        self.error: Exception = OutOfMemory("no block left")

    def open(self, reserve):
        if len(self._texts) >= self.texts:
            raise OutOfMemory("no block left")
        return super().open(reserve)

    def score(self, rows):
        if len(rows.tokens_R) > self.rows:
            self.refused += 1
            raise self.error
        return super().score(rows)


def test_out_of_memory_drops_drafts_then_admits_less() -> None:
    prompts = [Request((i % 5,), SamplingParams(max_tokens=12, seed=3)) for i in range(6)]
    roomy = requests(ProtocolTarget(TARGET), NoDrafter()).complete(prompts)
    for limits in ({"texts": 2}, {"rows": 2}, {"rows": 14}):
        target = Tight(TARGET, **limits)
        done = requests(target, decoder_drafter()).complete(prompts)
        assert [d.token_ids for d in done] == [d.token_ids for d in roomy]
        assert target.refused or "texts" in limits
    target = Tight(TARGET, rows=0)
    target.error = RuntimeError("DefaultCPUAllocator: can't allocate memory: 8 bytes")
    with pytest.raises(OutOfMemory, match="max_texts"):
        requests(target, decoder_drafter()).complete(prompts[:1])
    with pytest.raises(OutOfMemory):
        requests(Tight(TARGET, texts=0), decoder_drafter()).complete(prompts[:1])


def decoder_drafter() -> Drafter:
    from outrider.drafters import ProtocolDrafter

    return ProtocolDrafter(DRAFT)


def test_an_interrupted_round_leaves_nothing_and_can_go_on() -> None:
    class Interrupts(ProtocolTarget):
        calls = 0

        def score(self, rows):
            logits = super().score(rows)
            self.calls += 1
            if self.calls == 3:
                raise KeyboardInterrupt
            return logits

    target = Interrupts(TARGET)
    served = requests(target, decoder_drafter())
    params = SamplingParams(max_tokens=20, seed=5)
    with served.running([Request((1,), params)]) as (text,):
        served.engine.step()
        served.engine.step()
        with pytest.raises(KeyboardInterrupt):
            served.engine.step()
        assert target.num_staged(text.handle) == 0
        while not text.finished:
            served.engine.step()
        tokens = text.tokens[1:]
    assert not target._texts
    assert tokens == decoder(None, TARGET).generate([1], 20, seed=5)


def test_an_abandoned_stream_frees_its_text() -> None:
    target = ProtocolTarget(TARGET)
    served = requests(target, decoder_drafter())
    stream = served.stream(Request((1,), SamplingParams(max_tokens=50)))
    next(stream)
    assert target._texts
    stream.close()
    assert not target._texts


def test_one_decoder_serves_several_threads() -> None:
    spec = decoder(DRAFT, TARGET)
    alone = [decoder(None, TARGET).generate([i % 5], 30, seed=i) for i in range(8)]
    results: dict[int, list[int]] = {}

    def work(i: int) -> None:
        results[i] = spec.generate([i % 5], 30, seed=i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [results[i] for i in range(8)] == alone


def test_nothing_draws_from_the_global_generators() -> None:
    before = torch.get_rng_state().clone(), np.random.get_state()[1].copy()
    decoder(DRAFT, TARGET, rule="block").generate([1], 30, seed=2)
    decoder(DRAFT, TARGET).generate([1], 30)
    assert torch.equal(before[0], torch.get_rng_state())
    assert (before[1] == np.random.get_state()[1]).all()
