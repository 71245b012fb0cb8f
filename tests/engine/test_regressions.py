"""Faults that were found once: each shows here when its remedy goes."""

from __future__ import annotations

import itertools
import sys
import traceback
from types import SimpleNamespace

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
from outrider.drafters import ModelDrafter, NoDrafter, ProtocolDrafter
from outrider.engine import Emitter, Engine, Requests
from outrider.engine.text import TextAssembler
from outrider.errors import EmptyPrompt, InvalidConfig, ModelError, OutOfMemory, OutriderError
from outrider.models.protocol import ProtocolTarget
from outrider.models.tabular import FixedDistTargetModel
from outrider.types import Request
from tests.engine.toys import blurred, decoder, markov

TARGET = markov(5, 1, seed=8)
DRAFT = blurred(TARGET, 9, 0.3)


class Letters:
    """A tokenizer of five letters."""

    def decode(self, ids) -> str:
        return "".join("abcde"[i] for i in ids)


class Bytes:
    """A tokenizer whose tokens are bytes."""

    def decode(self, ids) -> str:
        return bytes(ids).decode("utf-8", "replace")


def served(target, drafter=None, tokenizer=None, ends=frozenset(), **options) -> Requests:
    engine = Engine(target, drafter or NoDrafter(), Emitter(tokenizer), **options)
    return Requests(engine, depth=3, end_tokens=ends)


class Limited(ProtocolTarget):
    """A target with a context, whose `open` remembers what it was asked for."""

    def __init__(self, model, max_length: int) -> None:
        super().__init__(model)
        self.max_length = max_length
        self.asked: list[int] = []

    def open(self, reserve):
        self.asked.append(reserve)
        return super().open(reserve)


@pytest.mark.parametrize("rule", ["greedy", "coupled", "block"])
def test_a_draft_narrower_than_the_target_goes_on(rule: str) -> None:
    class Narrow(ProtocolTarget):
        def score(self, rows):
            assert int(rows.tokens_R.max()) < self.vocab_size
            return super().score(rows)

    draft = Narrow(markov(3, 1, seed=4))
    temperature = 0.0 if rule == "greedy" else 1.0
    config = SpeculativeDecoderConfig(
        k=3, rule=rule, sampling=SamplingParams(temperature=temperature)
    )
    spec = SpeculativeDecoder(ModelDrafter(draft, chunk=4), ProtocolTarget(TARGET), config)
    out = spec.generate([4, 3, 1, 4, 3, 4, 4], 60, seed=2)
    assert spec.metrics.plain_rounds <= 1 and spec.metrics.accepted > 0
    if rule != "block":
        assert out == decoder(None, TARGET, temperature=temperature).generate(
            [4, 3, 1, 4, 3, 4, 4], 60, seed=2
        )
        assert max(out) >= 3 or rule == "greedy"


def lines_until(count: int):
    """A tracer that interrupts at line number `count` of what settles a round."""
    seen = SimpleNamespace(lines=0, fired=False)

    def trace(frame, event, _):
        file = frame.f_code.co_filename.rpartition("/outrider/engine/")[2]
        settles = file in ("emit.py", "text.py", "scheduler.py")
        if not settles and frame.f_code.co_name not in ("step", "_round", "_commit", "_emit"):
            return None
        if event == "line" and frame.f_code.co_name != "step":
            seen.lines += 1
            if seen.lines == count:
                seen.fired = True
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    return trace, seen


def test_an_interrupt_anywhere_in_a_step_changes_no_text() -> None:
    params = SamplingParams(max_tokens=6, seed=5, stop=("ee",))
    prompts = [Request((i,), params) for i in (1, 2)]
    wanted = served(ProtocolTarget(TARGET), tokenizer=Letters()).complete(prompts)
    before = sys.gettrace()
    count, fired = 0, True
    while fired:
        count += 5
        target = ProtocolTarget(TARGET)
        requests = served(target, ProtocolDrafter(DRAFT), Letters())
        with requests.running(prompts) as texts:
            trace, seen = lines_until(count)
            try:
                sys.settrace(trace)
                requests.engine.step()
            except KeyboardInterrupt:
                pass
            finally:
                sys.settrace(before)
            while not requests.engine.settled(texts):
                requests.engine.step()
            for text, done in zip(texts, wanted, strict=True):
                assert tuple(text.tokens[1:]) == done.token_ids, count
                assert "".join(delta.text for delta in text.outbox) == done.text, count
                assert sum((d.token_ids for d in text.outbox), ()) == done.token_ids, count
                assert len(text.sources) == len(done.sources), count
                assert text.finish_reason == done.finish_reason
        assert not target._texts, count
        fired = seen.fired
    assert count > 60


def test_an_error_keeps_its_cause_and_needs_no_particular_constructor() -> None:
    class Odd(OutriderError):
        def __init__(self, one, two) -> None:
            super().__init__(f"{one} {two}")

    class Fails:
        vocab_size = 5

        def __init__(self, error) -> None:
            self.error = error

        def verify(self, prefix, draft_tokens):
            raise self.error

    request = Request((1,), SamplingParams(max_tokens=3))
    with pytest.raises(ModelError, match="boom") as caught:
        served(ProtocolTarget(Fails(ValueError("boom")))).complete([request])
    assert "in verify" in "".join(traceback.format_exception(caught.value))
    assert "ValueError: boom" in "".join(traceback.format_exception(caught.value))
    with pytest.raises(ModelError, match="one two"):
        served(ProtocolTarget(Fails(Odd("one", "two")))).complete([request])
    with pytest.raises(ModelError, match="one two"):
        list(served(ProtocolTarget(Fails(Odd("one", "two")))).stream(request))


def test_an_untyped_failure_of_a_target_becomes_typed() -> None:
    class Breaks(ProtocolTarget):
        def score(self, rows):
            raise ZeroDivisionError("by nought")

    with pytest.raises(ModelError, match="by nought") as caught:
        served(Breaks(TARGET)).complete([Request((1,), SamplingParams(max_tokens=3))])
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_ends_the_target_cannot_predict_are_left_out() -> None:
    requests = served(ProtocolTarget(TARGET), ends=frozenset({2, 5, 99}))
    assert requests.end_tokens == {2}
    params = SamplingParams(max_tokens=6, min_tokens=3, seed=1)
    assert requests.complete([Request((1,), params)])[0].token_ids


@pytest.mark.parametrize("options", [{"stop": None}, {"stop_token_ids": None}, {"stop": ["a"]}])
def test_absent_stops_are_none(options: dict) -> None:
    params = SamplingParams(**options)
    assert params.stop in ((), ("a",)) and params.stop_token_ids == ()


@pytest.mark.parametrize(
    "options",
    [{"stop": 5}, {"stop": b"x"}, {"stop_token_ids": 5}, {"stop_token_ids": (True,)},
     {"stop_token_ids": [1.5]}, {"ignore_eos": "no"}],
)  # fmt: skip
def test_sampling_params_of_other_types_are_refused(options: dict) -> None:
    with pytest.raises(InvalidConfig, match=next(iter(options))):
        SamplingParams(**options)
    with pytest.raises(InvalidConfig, match="stop_on_eos"):
        SpeculativeDecoderConfig(stop_on_eos="no")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "prefix", [[1.7], [True], ["1"], "1", None, 3, np.array([1.0]), [[1]], {1: 2}, [np.bool_(1)]]
)
def test_prefixes_that_hold_no_token_ids_are_refused(prefix) -> None:
    with pytest.raises(InvalidConfig, match="token ids"):
        decoder(None, TARGET).generate(prefix, 3, seed=1)
    with pytest.raises(InvalidConfig, match="token ids"):
        decoder(None, TARGET).generate(prefix, 0)


def test_arrays_and_tensors_are_prefixes() -> None:
    spec = decoder(None, TARGET)
    wanted = spec.generate([1, 2], 5, seed=1)
    for prefix in (np.array([1, 2]), torch.tensor([1, 2]), (np.int64(1), 2)):
        out = spec.generate(prefix, 5, seed=1)
        assert out == wanted and all(type(token) is int for token in out)
    assert spec.generate_batch(np.array([[1, 2], [1, 2]]), 5, seed=1) == [wanted, wanted]
    with pytest.raises(InvalidConfig, match="prefixes"):
        spec.generate_batch(None, 5)  # type: ignore[arg-type]
    for most in (5, 0):
        with pytest.raises(EmptyPrompt, match=r"^prefixes\[1\]: "):
            spec.generate_batch([[1, 2], []], most)


ROW = np.log(np.full(5, 0.2))


@pytest.mark.parametrize(
    "answer",
    [None, DraftProposal(["a"], [0.0]), DraftProposal([1.9], [0.0]), DraftProposal([1], 0.0),
     DraftProposal([1], [0.0], ["abcde"]), DraftProposal([1], [0.0], [["a"] * 5]),
     DraftProposal([1], [0.0], 7)],
)  # fmt: skip
def test_proposals_of_other_types_are_typed_errors(answer) -> None:
    class Proposes:
        vocab_size = 5

        def propose(self, prefix, k, rng):
            return answer

    with pytest.raises(OutriderError):
        decoder(Proposes(), TARGET).generate([1], 9, seed=1)


@pytest.mark.parametrize(
    "scores", [None, TargetScores(None), TargetScores(["abcde"]), TargetScores([["x"] * 5])]
)
def test_scores_of_other_types_are_typed_errors(scores) -> None:
    class Verifies:
        vocab_size = 5

        def verify(self, prefix, draft_tokens):
            return scores

    with pytest.raises(ModelError):
        decoder(None, Verifies()).generate([1], 4, seed=1)


def test_a_text_without_max_tokens_does_not_reserve_the_whole_context() -> None:
    target = Limited(TARGET, 100_000)
    requests = served(target, ModelDrafter(draft := Limited(DRAFT, 100_000)))
    stream = requests.stream(Request((1, 2), SamplingParams(seed=1)))
    next(stream)
    stream.close()
    assert 0 < target.asked[0] < 1000 and 0 < draft.asked[0] < 1000


class Tight(ProtocolTarget):
    """Room for few rows at a time, then another failure of some texts."""

    def __init__(self, model, *, rows: int, bad: int | None = None) -> None:
        super().__init__(model)
        self.rows, self.bad = rows, bad

    def score(self, rows):
        if len(rows.tokens_R) > self.rows:
            raise OutOfMemory("no block left")
        starts = itertools.accumulate((0, *rows.counts[:-1]))
        firsts = [
            (self._texts[seq].committed or rows.tokens_R[start:].tolist())[0]
            for seq, start in zip(rows.seqs, starts, strict=True)
        ]
        if self.bad in firsts:
            raise ValueError("not this one")
        return super().score(rows)


def test_a_failure_after_dropping_drafts_ends_its_own_text_only() -> None:
    target = Tight(TARGET, rows=3, bad=3)
    requests = served(target, ProtocolDrafter(DRAFT))
    params = SamplingParams(max_tokens=9, seed=3)
    with pytest.raises(ModelError, match="not this one") as caught:
        requests.complete([Request((i,), params) for i in (1, 3, 2)])
    first, failed, last = caught.value.completions
    assert failed is None
    assert list(first.token_ids) == decoder(None, TARGET).generate([1], 9, seed=3)
    assert list(last.token_ids) == decoder(None, TARGET).generate([2], 9, seed=3)


def test_a_failing_group_leaves_finished_texts_alone() -> None:
    requests = served(ProtocolTarget(TARGET))
    done, going = (requests.text(Request((1,), SamplingParams(max_tokens=3))) for _ in range(2))
    done.finish_reason = "length"
    requests.engine._fail(SimpleNamespace(texts=[done, going]), ValueError("x"))  # type: ignore[arg-type]
    assert done.error is None and going.error is not None


def test_a_suspended_text_gives_its_draft_cache_back() -> None:
    draft = ProtocolTarget(DRAFT)
    target = Tight(TARGET, rows=1)
    requests = served(target, ModelDrafter(draft))
    prompts = [Request((i,), SamplingParams(max_tokens=6, seed=3)) for i in (1, 2)]
    with requests.running(prompts) as texts:
        requests.engine.step()
        assert texts[1].handle is None and len(draft._texts) == 1
        while not requests.engine.settled(texts):
            requests.engine.step()
    assert not draft._texts and not target._texts
    assert texts[1].tokens[1:] == decoder(None, TARGET).generate([2], 6, seed=3)


def test_a_completion_names_its_seed_and_shares_the_stage_times() -> None:
    requests = served(ProtocolTarget(TARGET), ProtocolDrafter(DRAFT))
    (drawn,) = requests.complete([Request((1,), SamplingParams(max_tokens=8), rule="coupled")])
    again = SamplingParams(max_tokens=8, seed=drawn.seed)
    (same,) = requests.complete([Request((1,), again)])
    assert same.token_ids == drawn.token_ids and same.seed == drawn.seed
    assert min(drawn.stats.draft_s, drawn.stats.score_s, drawn.stats.commit_s) > 0


def test_a_character_begun_in_the_prompt_is_finished_in_the_output() -> None:
    for split in (1, 2, 3):
        face = "🎉".encode()
        assembler = TextAssembler(Bytes(), [*b"ab", *face[:split]], [])
        for byte in [*face[split:], *b" end"]:
            assembler.push(byte)
        assert assembler.finish(stopped=False) == "🎉 end"
    # A replacement character the prompt really holds is its own.
    assembler = TextAssembler(Bytes(), list("x\ufffd".encode()), [])
    assembler.push(ord("y"))
    assert assembler.finish(stopped=False) == "y"


def test_min_tokens_beyond_the_context_are_refused() -> None:
    requests = served(Limited(TARGET, 10))
    with pytest.raises(InvalidConfig, match=r"min_tokens=9 exceeds the 8 tokens .* lower it"):
        requests.complete([Request((1, 2), SamplingParams(min_tokens=9))])
    (done,) = requests.complete([Request((1, 2), SamplingParams(max_tokens=50, seed=1))])
    assert len(done.token_ids) == 8 and done.finish_reason == "length"
    with pytest.raises(InvalidConfig, match=r"min_tokens=5 exceeds max_tokens=3; lower"):
        SamplingParams(min_tokens=5, max_tokens=3)


def test_an_interrupt_between_opening_and_admitting_leaks_no_handle() -> None:
    class Interrupts(list):
        def append(self, item) -> None:
            if not self.fired:
                self.fired = True
                raise KeyboardInterrupt
            super().append(item)

        fired = False

    target = ProtocolTarget(FixedDistTargetModel([0.5, 0.5]))
    requests = served(target)
    requests.engine._scheduler.active = Interrupts()
    with requests.running([Request((1,), SamplingParams(max_tokens=4))]) as (text,):
        with pytest.raises(KeyboardInterrupt):
            requests.engine.step()
        while not text.finished:
            requests.engine.step()
    assert not target._texts
