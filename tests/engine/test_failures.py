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
    SpeculativeMetrics,
    TargetScores,
)
from outrider.drafters import Drafter, ModelDrafter, NgramDrafter, NoDrafter
from outrider.engine import Emitter, Engine, Requests
from outrider.errors import (
    DegenerateDistribution,
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
        {"temperature": 1e-38},
        {"temperature": 1e39},
        {"top_k": 2**40},
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
        (DraftProposal([1], [0.0], [ROW + 1.0]), DegenerateDistribution),
        (DraftProposal([1], [0.0], [ROW * np.nan]), DegenerateDistribution),
        (DraftProposal([1], [0.0], [np.log([1.0, 1e-300, 1e-300, 1e-300, 1e-300])]), None),
        (DraftProposal([1], [0.0], [np.array([0.0, *[-np.inf] * 4])]), DegenerateDistribution),
        (RuntimeError("boom"), ModelError),
    ],
)
def test_broken_proposals_are_named(answer, error) -> None:
    spec = decoder(Proposes(answer), TARGET)
    if error is None:
        assert len(spec.generate([1], 2)) == 2
        return
    with pytest.raises(error):
        spec.generate([1], 9)


def test_broken_scores_are_named() -> None:
    class Short:
        vocab_size = 5

        def verify(self, prefix, draft_tokens):
            return TargetScores([ROW] * len(draft_tokens))

    with pytest.raises(TargetShapeMismatch, match="one row more"):
        decoder(DRAFT, Short()).generate([1], 4)


@pytest.mark.parametrize("row", [[0.2] * 5, [-9.0] * 5])
def test_rows_that_are_no_log_probabilities_are_refused(row: list[float]) -> None:
    class Verifies:
        vocab_size = 5

        def __init__(self, row) -> None:
            self.row = row

        def verify(self, prefix, draft_tokens):
            return TargetScores([self.row] * (len(draft_tokens) + 1))

    with pytest.raises(DegenerateDistribution, match=r"Verifies\.verify returned a law of mass"):
        decoder(DRAFT, Verifies(row)).generate([1], 4)
    rounded = torch.tensor([0.2] * 5).log().bfloat16()
    assert len(decoder(DRAFT, Verifies(rounded)).generate([1], 4)) == 4


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


def test_a_model_that_fails_on_one_text_fails_that_text_alone(caplog) -> None:
    class Picky:
        vocab_size = 5

        def verify(self, prefix, draft_tokens):
            if prefix[0] == 3:
                raise ValueError("not this one")
            return TARGET.verify(prefix, draft_tokens)

    served = requests(ProtocolTarget(Picky()), decoder_drafter())
    params = SamplingParams(max_tokens=9, seed=3)
    with pytest.raises(ModelError, match="not this one") as caught:
        served.complete([Request((i,), params) for i in (1, 3, 2)])
    # Who reads the log learns that a batch did not go through as one, and why.
    assert "a round of 3 texts failed" in caplog.text and "not this one" in caplog.text
    first, failed, last = caught.value.completions
    assert failed is None
    assert list(first.token_ids) == decoder(None, TARGET).generate([1], 9, seed=3)
    assert list(last.token_ids) == decoder(None, TARGET).generate([2], 9, seed=3)


@pytest.mark.parametrize("rule", ["greedy", "coupled", "block", "match"])
def test_a_row_left_empty_by_min_tokens_is_no_law(rule: str) -> None:
    target = FixedDistTargetModel([0.0, 0.0, 1.0])
    sampling = SamplingParams(min_tokens=3, temperature=0.0 if rule == "greedy" else 1.0)
    config = SpeculativeDecoderConfig(k=2, rule=rule, sampling=sampling).with_eos(2)
    for draft in (None, target):
        with pytest.raises(NonFinite, match="min_tokens"):
            SpeculativeDecoder(draft, target, config).generate([1], 4, seed=1)


def test_a_bad_depth_is_refused_before_it_can_hurt_others() -> None:
    served = requests(ProtocolTarget(TARGET), decoder_drafter())
    for depth in ("4", 2.5, -1):
        with pytest.raises(InvalidConfig, match="depth"):
            served.complete([Request((1,), SamplingParams(max_tokens=3), depth=depth)])


def test_one_drafter_can_serve_two_engines() -> None:
    shared = NgramDrafter(1, 2)
    one, two = (requests(ProtocolTarget(TARGET), shared) for _ in range(2))
    params = SamplingParams(max_tokens=30, seed=6)
    streams = [one.stream(Request((1, 2), params)), two.stream(Request((3,), params))]
    texts: list[list[int]] = [[], []]
    for _ in range(40):
        for stream, text in zip(streams, texts, strict=True):
            for delta in [next(stream, None)]:
                text += delta.token_ids if delta else ()
    plain = decoder(None, TARGET)
    assert texts == [plain.generate([1, 2], 30, seed=6), plain.generate([3], 30, seed=6)]


def test_what_was_settled_before_a_break_is_handed_out() -> None:
    class Breaks(ProtocolTarget):
        commits = 0

        def commit(self, seq, path):
            super().commit(seq, path)
            self.commits += 1
            if self.commits == 3:
                raise KeyboardInterrupt

    served = requests(Breaks(TARGET), decoder_drafter())
    params = SamplingParams(max_tokens=15, seed=2)
    prompts = [Request((i,), params) for i in (1, 2)]
    with served.running(prompts) as texts:
        served.engine.step()
        with pytest.raises(KeyboardInterrupt):
            served.engine.step()
        while not served.engine.settled(texts):
            served.engine.step()
        made = [[t for delta in text.outbox for t in delta.token_ids] for text in texts]
    assert made == decoder(None, TARGET).generate_batch([[1], [2]], 15, seed=2)


class Stutters:
    """A tokenizer of letters that fails once, at the `at`-th call."""

    def __init__(self, at: int) -> None:
        self._left = at

    def decode(self, ids: list[int]) -> str:
        self._left -= 1
        if self._left == 0:
            raise RuntimeError("once")
        return "".join(chr(97 + token) for token in ids)


def test_a_tokenizer_that_fails_in_the_middle_of_a_round_doubles_no_character() -> None:
    target = markov(8, 1, seed=3)

    def texts(fails_at: int) -> list[str]:
        drafter = ModelDrafter(ProtocolTarget(blurred(target, 4, 0.2)))
        engine = Engine(ProtocolTarget(target), drafter, Emitter(Stutters(fails_at)))
        requests = Requests(engine, depth=3, end_tokens=frozenset())
        asked = [Request((1,), SamplingParams(max_tokens=15, seed=n)) for n in range(2)]
        return [one.text for one in requests.complete(asked)]

    # The first two calls read the prompts.
    assert all(texts(at) == texts(0) for at in range(3, 14))


def test_conditional_rates_count_only_what_was_drafted() -> None:
    metrics = SpeculativeMetrics()
    for _ in range(9):
        metrics.record_round(drafted=1, accepted=1, committed=2)
    metrics.record_round(drafted=2, accepted=2, committed=3)
    metrics.record_round(drafted=2, accepted=0, committed=1)
    assert metrics.conditional_acceptance_per_pos == [10 / 11, 1.0]
    assert metrics.acceptance_per_pos == [10 / 11, 0.5]
