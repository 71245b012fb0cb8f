"""Forwards told of before their tokens are known, or read: never more than a hint."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from outrider import SamplingParams, SpeculativeDecoder, SpeculativeDecoderConfig, host
from outrider.cache import CacheManager
from outrider.control import Controller, guard
from outrider.drafters import ModelDrafter, NgramDrafter
from outrider.drafters.combined import CombinedDrafter
from outrider.engine import Emitter, Engine, Requests
from outrider.models import graphs
from outrider.models.ahead import Ahead, Begun
from outrider.models.base import Rows
from outrider.models.graphs import GraphedForward
from outrider.models.hf import HuggingFaceTarget
from outrider.types import Request, StageTimes
from tests.models.families import SHAPE, random_tokens, relative_error, with_weights
from tests.models.test_graphs import BOUND, DEVICE, graphed, open_at, target_of

pytestmark = pytest.mark.compiled
PROMPTS = [random_tokens(5).tolist(), random_tokens(66, 2).tolist()]


@pytest.fixture(autouse=True)
def _way_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if DEVICE.type == "cpu":
        monkeypatch.setattr(graphs, "_why_no_triton", lambda device, dtype: None)
    with host.as_on_gpu():
        yield


class Counted:
    """What was run ahead, and how often that was what was asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.scored: list[bool] = []
        self.chains: list[int] = []
        self.begun: list[bool] = []
        scored, chain, is_row = Ahead.scored, HuggingFaceTarget.chain, Begun.is_row

        def noted(ahead: Ahead, rows: Rows, cache: CacheManager) -> bool:
            self.scored.append(scored(ahead, rows, cache))
            return self.scored[-1]

        def chained(target: HuggingFaceTarget, seq: int, most: int) -> Any:
            self.chains.append(most)
            return chain(target, seq, most)

        def looked_at(begun: Begun, seq: int, place: int, token: int) -> bool:
            self.begun.append(is_row(begun, seq, place, token))
            return self.begun[-1]

        monkeypatch.setattr(Ahead, "scored", noted)
        monkeypatch.setattr(HuggingFaceTarget, "chain", chained)
        monkeypatch.setattr(Begun, "is_row", looked_at)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


def scored(target: HuggingFaceTarget, seq: int, *tokens: int) -> Tensor:
    return target.score(Rows((seq,), (len(tokens),), torch.tensor(tokens)))


def there(*tokens: int) -> Tensor:
    return torch.tensor(tokens, device=DEVICE)


def test_what_was_run_ahead_is_what_is_scored(counted: Counted):
    target = target_of()
    made, (seq,) = graphed(target), open_at(target, 63)
    scored(target, seq, 3)
    for length, token in ((63, 3), (64, 4), (65, 5)):
        # The next token's row, behind this one that is still staged.
        target.expect((seq,), (1,), there(token + 1))
        assert target.num_staged(seq) == 1 and target.length(seq) == length
        target.commit(seq, 1)
        found = scored(target, seq, token + 1)
        assert relative_error(found, own_at(target, seq, token + 1)) < BOUND
        target.discard(seq)
        scored(target, seq, token + 1)
    # The first found no room in the pool: it grew, and the graph was made anew.
    assert counted.scored == [True, True] and made.captures == 2


def test_other_tokens_and_other_rows_are_scored_as_ever(counted: Counted):
    target = target_of()
    _, (seq, other) = graphed(target), open_at(target, 9, 4)
    for rows in ((7,), (7, 8)):
        scored(target, seq, *rows)
        target.discard(seq)
    for one, asked in ((seq, (7,)), (seq, (5, 8)), (other, (5,))):
        target.expect((seq,), (1,), there(5))
        found = scored(target, one, *asked)
        assert relative_error(found, own_at(target, one, *asked)) < BOUND
        target.discard(one)
    assert counted.scored == [False] * 3
    # The row of the text itself is written over, and the one ahead forgotten.
    target.expect((seq,), (1,), there(5))
    scored(target, seq, 8)
    target.discard(seq)
    scored(target, seq, 5)
    target.commit(seq, 1)
    assert relative_error(scored(target, seq, 6), own_at(target, seq, 6)) < BOUND
    target.discard(seq)
    target.expect((seq,), (1,), there(6))
    chain = target.chain(seq, 1)
    assert chain is not None
    chain(8)
    scored(target, seq, 6)
    target.commit(seq, 1)
    assert relative_error(scored(target, seq, 7), own_at(target, seq, 7)) < BOUND
    assert counted.scored == [False] * 4


def own_at(target: HuggingFaceTarget, seq: int, *tokens: int) -> Tensor:
    """The model's own logits of rows that are staged now, which stay so."""
    target.discard(seq)
    with target.uncompiled():
        return scored(target, seq, *tokens)


def test_a_run_that_is_not_what_was_asked_for_would_be_seen(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Ahead, "scored", lambda *_: True)
    target = target_of()
    _, (seq,) = graphed(target), open_at(target, 9)
    scored(target, seq, 7)
    target.discard(seq)
    target.expect((seq,), (1,), there(5))
    assert relative_error(scored(target, seq, 7), own_at(target, seq, 7)) > 100 * BOUND


def test_several_rows_of_several_texts_are_run_ahead(counted: Counted):
    target = target_of()
    made, seqs = graphed(target), open_at(target, 63, 9)
    rows = Rows(seqs, (3, 2), random_tokens(5, 8))
    with target.uncompiled():
        wanted = target.score(rows)
    for _ in range(2):
        for seq in seqs:
            target.discard(seq)
        assert relative_error(target.score(rows), wanted) < BOUND
        for seq in seqs:
            target.discard(seq)
        target.expect(seqs, (3, 2), rows.tokens_R.to(DEVICE))
    some = Rows(seqs, (3, 2), rows.tokens_R, None, torch.tensor([0, 4]))
    assert relative_error(target.score(some), wanted[[0, 4]]) < BOUND
    assert counted.scored == [True, False] and made.captures == 1


def test_a_hint_changes_nothing_where_no_graph_would_run_it():
    target = target_of()
    (seq,) = open_at(target, 9)
    target.expect((seq,), (1,), there(5))
    assert target._ahead is None
    made = graphed(target)
    many = GraphedForward.most_rows + 1
    target.expect((seq,), (many,), there(*range(many)))
    assert target._ahead is None
    target.max_length = 10
    target.expect((seq,), (2,), there(5, 6))
    assert target._ahead is None
    # Of a shape that was not captured yet.
    target.expect((seq,), (1,), there(5))
    assert made.captures == 0
    assert relative_error(scored(target, seq, 5), own_at(target, seq, 5)) < BOUND


def drafted(target: HuggingFaceTarget, seq: int, *tokens: int) -> Tensor:
    """Rows of a chain, which stay staged."""
    chain = target.chain(seq, len(tokens))
    assert chain is not None
    rows = torch.cat([chain(token) for token in tokens])
    chain.stage(tokens)
    return rows


def test_a_chains_first_row_is_run_where_the_verdict_says(counted: Counted):
    """After each number of kept tokens, what was staged of the others being written over."""
    target = target_of()
    _, (seq,) = graphed(target), open_at(target, 9)
    for kept in (0, 2, 1, 3):
        first = target.length(seq) + 1
        # A text's last token and three drafted ones.
        drafted(target, seq, 3, 4, 5, 6)
        target.foresee(seq, range(first, first + 4), there(kept), there(7))
        assert target.num_staged(seq) == 4 and target.length(seq) == first - 1
        target.commit(seq, 1 + kept)
        found = drafted(target, seq, 7, 8)
        assert relative_error(found, own_at(target, seq, 7, 8)) < BOUND
        target.discard(seq)
    assert counted.begun == [True] * 4


def test_a_chain_that_begins_otherwise_is_scored_as_ever(counted: Counted):
    target = target_of()
    _, (seq, other) = graphed(target), open_at(target, 9, 5)
    for one, kept, token, said in (
        (seq, 1, 8, (1, 7)),
        (seq, 2, 7, (1, 7)),
        (other, 0, 7, (0, 7)),
    ):
        first = target.length(seq) + 1
        drafted(target, seq, 3, 4, 5)
        target.foresee(seq, range(first, first + 2), there(said[0]), there(said[1]))
        target.commit(seq, 1 + kept)
        found = drafted(target, one, token)
        assert relative_error(found, own_at(target, one, token)) < BOUND
        target.discard(one)
    assert counted.begun == [False] * 3
    # A forward in between makes it void, and so does another hint.
    first = target.length(seq) + 1
    drafted(target, seq, 3, 4)
    target.foresee(seq, range(first, first + 2), there(0), there(7))
    target.commit(seq, 1)
    scored(target, other, 5)
    target.discard(other)
    assert target._begun is None
    drafted(target, seq, 7)
    assert len(counted.begun) == 3


def test_a_row_that_is_not_the_chains_first_would_be_seen(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Begun, "is_row", lambda *_: True)
    target = target_of()
    _, (seq,) = graphed(target), open_at(target, 9)
    drafted(target, seq, 3, 4, 5)
    target.foresee(seq, range(10, 13), there(1), there(7))
    target.commit(seq, 2)
    assert relative_error(drafted(target, seq, 8), own_at(target, seq, 8)) > 100 * BOUND


def test_no_row_is_run_ahead_where_no_graph_knows_the_places():
    target = target_of()
    (seq,) = open_at(target, 9)
    target.foresee(seq, range(9, 11), there(0), there(5))
    assert target._begun is None
    graphed(target)
    target.foresee(seq, range(9, 11), there(0), there(5))
    assert target._begun is None
    drafted(target, seq, 3)
    for places, limit in ((range(62, 65), None), (range(10, 12), 11)):
        target.max_length = limit
        target.foresee(seq, places, there(0), there(5))
        assert target._begun is None
    target.max_length = 12
    target.foresee(seq, range(10, 12), there(0), there(5))
    assert target._begun is not None


def test_a_row_begun_is_run_again_where_a_graph_is_captured_over_its_place(counted: Counted):
    """The cache grows with the chain, and a graph's first forward is of another token."""
    target = target_of()
    made, (seq,) = graphed(target), open_at(target, 57)
    drafted(target, seq, 3, 4, 5, 6)
    while target._cache.num_free_blocks:
        target._cache.reserve(target.open(1), 1)
    target.foresee(seq, range(58, 62), there(2), there(7))
    assert target._begun is not None
    target.commit(seq, 3)
    captures, tokens = made.captures, (7, 8, 9, 10, 11, 12)
    found = drafted(target, seq, *tokens)
    assert made.captures > captures and counted.begun == []
    assert relative_error(found, own_at(target, seq, *tokens)) < BOUND


def later(*values: Any) -> Any:
    """A case that `scripts/prove slow` runs: kernels take their time in an interpreter."""
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("rule", "wrong"),
    [
        (None, 0.0),
        ("coupled", 0.3),
        *(later(*case) for case in ((None, 0.3), ("coupled", 0.0), ("block", 0.0), ("block", 0.3))),
    ],
)
def test_texts_are_the_same_where_chains_begin_ahead(
    rule: str | None, wrong: float, counted: Counted
):
    """By a draft model that is wrong at times, and by one of which all is kept."""
    target, draft = target_of(), target_of()
    with torch.no_grad():
        weight = draft.model.get_output_embeddings().weight
        draw = torch.Generator().manual_seed(3)
        noise = torch.randn(weight.shape, generator=draw).to(weight)
        weight += wrong * weight.std() * noise
    graphed(target)
    graphed(draft)
    temperature = 0.0 if rule is None else 1.0
    sampling = SamplingParams(temperature=temperature, ignore_eos=True)
    config = SpeculativeDecoderConfig(k=3, sampling=sampling, rule=rule)
    made = SpeculativeDecoder(draft, target, config)
    found = made.generate(PROMPTS[1], 32, seed=5)
    rate, rounds = made.metrics.acceptance_rate, made.metrics.rounds
    assert 0.2 < rate < 0.95 if wrong else rate == 1.0
    # The first round has none before it, and one meets the end of what is kept of a block.
    assert counted.begun.count(True) >= rounds - 3 and False not in counted.begun
    with target.uncompiled(), draft.uncompiled():
        assert made.generate(PROMPTS[1], 32, seed=5) == found


def test_who_asks_to_be_told_of_a_round_waits_for_nothing_else(counted: Counted):
    """Without a hint what a chain that was kept whole leaves unread costs no forward of its own."""
    target, draft = target_of(), target_of()
    graphed(target)
    graphed(draft)
    forwards: list[int] = []
    draft.model.register_forward_hook(lambda *_: forwards.append(1))
    for logprobs in (None, 1):
        sampling = SamplingParams(temperature=0.0, ignore_eos=True, logprobs=logprobs)
        config = SpeculativeDecoderConfig(k=3, sampling=sampling)
        made = SpeculativeDecoder(draft, target, config)
        made.generate(PROMPTS[1], 12, seed=5)
        made.reset_metrics()
        counted.begun.clear()
        forwards.clear()
        made.generate(PROMPTS[1], 12, seed=5)
        assert made.metrics.acceptance_rate == 1.0
        assert bool(counted.begun) == (logprobs is None)
    if DEVICE.type == "cpu":
        assert len(forwards) == 3 * made.metrics.rounds


@pytest.mark.parametrize(
    ("chosen", "temperature"), [(True, 0.0), later(True, 1.0), later(False, 0.0), (False, 1.0)]
)
def test_who_chooses_or_combines_hands_the_hint_on(
    chosen: bool, temperature: float, counted: Counted, monkeypatch: pytest.MonkeyPatch
):
    """Where it is known that asking pays: a draft takes a hundredth of a forward, it is told."""
    target, draft = target_of(), target_of()
    graphed(target)
    graphed(draft)
    parts = [ModelDrafter(draft), NgramDrafter()]
    asked = Controller(parts) if chosen else CombinedDrafter(parts)
    if isinstance(asked, Controller):
        took = StageTimes(draft_s=0.01, score_s=1.0, verify_s=0.0, commit_s=0.0)
        timed = asked.timed
        monkeypatch.setattr(asked, "timed", lambda texts, _: timed(texts, took))
        monkeypatch.setattr(asked, "_clock", itertools.count(step=0.01).__next__)
        monkeypatch.setattr(guard, "KNOWN", 2)
    sampling = SamplingParams(temperature=temperature, ignore_eos=True)
    made = SpeculativeDecoder(asked, target, SpeculativeDecoderConfig(k=3, sampling=sampling))
    found = made.generate(PROMPTS[1], 48, seed=5)
    assert counted.begun.count(True) >= made.metrics.rounds / 3
    with target.uncompiled(), draft.uncompiled():
        assert made.generate(PROMPTS[1], 48, seed=5) == found


def test_a_narrower_draft_model_begins_ahead_too(counted: Counted):
    """A token that it does not have is read as its last; and one drafted token a round."""
    target = target_of()
    few = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    shape = {**SHAPE, **few, "vocab_size": target.vocab_size // 2}
    draft = HuggingFaceTarget(with_weights(LlamaConfig(**shape)).to(DEVICE))
    graphed(target)
    graphed(draft)
    sampling = SamplingParams(temperature=1.0, ignore_eos=True)
    for k in (1, 3):
        made = SpeculativeDecoder(draft, target, SpeculativeDecoderConfig(k=k, sampling=sampling))
        found = made.generate(PROMPTS[0], 16, seed=5)
        assert max(found) >= draft.vocab_size and True in counted.begun
        assert False not in counted.begun
        with target.uncompiled(), draft.uncompiled():
            assert made.generate(PROMPTS[0], 16, seed=5) == found


def texts(
    target: HuggingFaceTarget, draft: HuggingFaceTarget | None, temperature: float, **more: Any
) -> list[list[int]]:
    """Two texts of different lengths, and one that takes the place of the shorter."""
    drafter = None if draft is None else ModelDrafter(draft)
    decoder = SpeculativeDecoder(
        drafter,
        target,
        SpeculativeDecoderConfig(
            k=4, sampling=SamplingParams(temperature=temperature, ignore_eos=True, **more)
        ),
    )
    return [*decoder.generate_batch(PROMPTS, 6, seed=7), decoder.generate(PROMPTS[0], 9, seed=3)]


def plainly(found: list[list[int]], *given: Any, **more: Any) -> bool:
    """Whether texts are those of targets without graphs, all by the plain way."""
    token = host._AS_ON_GPU.set(DEVICE.type == "cuda")
    try:
        return texts(*given, **more) == found
    finally:
        host._AS_ON_GPU.reset(token)


@pytest.mark.parametrize("temperature", [later(0.0), 1.0])
def test_plain_rounds_are_run_ahead(temperature: float, counted: Counted):
    target = target_of()
    graphed(target)
    found = texts(target, None, temperature, presence_penalty=0.5)
    assert plainly(found, target_of(), None, temperature, presence_penalty=0.5)
    # Of five rounds of the batch and eight of the other text two have no round behind them, and
    # the first of each meets a width that was not captured.
    assert counted.scored.count(True) >= 8 and False not in counted.scored


@pytest.mark.parametrize("temperature", [later(0.0), 1.0])
def test_chains_are_verified_while_they_are_read(
    temperature: float, counted: Counted, monkeypatch: pytest.MonkeyPatch
):
    target, draft = target_of(), target_of()
    graphed(target)
    graphed(draft)
    reads: list[int] = []
    wait = host.Reading.wait

    def noted(reading: host.Reading) -> list[Tensor]:
        reads.append(len(reading._tensors))
        return wait(reading)

    monkeypatch.setattr(host.Reading, "wait", noted)
    made = SpeculativeDecoder(
        draft,
        target,
        SpeculativeDecoderConfig(
            k=4, sampling=SamplingParams(temperature=temperature, ignore_eos=True)
        ),
    )
    found = made.generate(PROMPTS[1], 24, seed=5)
    chains, rounds = len(counted.chains), made.metrics.rounds
    # The first round reads the prompt, and meets shapes that were not captured.
    assert chains >= 4 and counted.scored.count(True) >= chains - 3
    # A verdict, a chain, what was begun of it and what was run ahead: no more is waited for.
    assert len(reads) <= 4 * (rounds + made.metrics.plain_rounds)
    assert made.generate(PROMPTS[1], 24, seed=5) == found
    with target.uncompiled(), draft.uncompiled():
        assert made.generate(PROMPTS[1], 24, seed=5) == found


def test_controls_that_look_at_drafted_tokens_have_them_read(counted: Counted):
    target, draft = target_of(), target_of()
    graphed(target)
    graphed(draft)
    found = texts(target, draft, 1.0, presence_penalty=2.0)
    assert plainly(found, target_of(), target_of(), 1.0, presence_penalty=2.0)
    assert found != texts(target, draft, 1.0)


@pytest.mark.parametrize("depth", [later(0), 3])
def test_an_interrupt_while_a_round_is_waited_for_loses_nothing(
    monkeypatch: pytest.MonkeyPatch, counted: Counted, depth: int
):
    target, draft = target_of(), target_of()
    graphed(target)
    graphed(draft)
    wanted = texts(target, None, 0.0)[2]
    engine = Engine(target, ModelDrafter(draft), Emitter(None))
    sampling = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    requests = Requests(engine, depth=depth, end_tokens=frozenset())
    wait, waits = host.Reading.wait, [0]

    def broken(reading: host.Reading) -> list[Tensor]:
        waits[0] += 1
        if waits[0] in (4, 5, 8):
            raise KeyboardInterrupt
        return wait(reading)

    monkeypatch.setattr(host.Reading, "wait", broken)
    interrupts = 0
    with requests.running([Request(tuple(PROMPTS[0]), sampling)]) as made:
        while not engine.settled(made):
            try:
                engine.step()
            except KeyboardInterrupt:
                interrupts += 1
        assert made[0].tokens[len(PROMPTS[0]) :] == wanted
    assert interrupts == 3 and True in (counted.begun if depth else counted.scored)
