"""What a completion tells of itself: who guessed each token, every round, and where time went."""

from __future__ import annotations

import json
import time

import pytest

from outrider import SamplingParams
from outrider.decoding import Draft
from outrider.drafters import (
    CombinedDrafter,
    Drafter,
    ModelDrafter,
    NoDrafter,
    ProtocolDrafter,
    SuffixDrafter,
)
from outrider.engine import Emitter, Engine, Requests, group
from outrider.models.protocol import ProtocolTarget
from outrider.tree import TokenTree, TreeBudget
from outrider.types import Completion, Delta, Request, SpeculativeMetrics
from tests.engine.toys import blurred, markov

VOCAB = 6
TARGET = markov(VOCAB, 1, 3)
DRAFT = blurred(TARGET, 5, 0.3)
LONG = SamplingParams(max_tokens=40, seed=5)


def served(drafter: Drafter, trees: TreeBudget | None = None, **options) -> Requests:
    engine = Engine(ProtocolTarget(TARGET), drafter, Emitter(None), trees=trees, **options)
    return Requests(engine, depth=3, end_tokens=frozenset())


def model() -> ModelDrafter:
    return ModelDrafter(ProtocolTarget(DRAFT))


class Says(Drafter):
    """Guesses one token again and again, so that a token tells who guessed it."""

    certain = True

    def __init__(self, token: int, length: int) -> None:
        self.name, self.token, self.length = f"says {token}", token, length

    def propose(self, texts, depths, draws) -> Draft:
        chains = [[self.token] * min(depth, self.length) for depth in depths]
        return Draft(TokenTree.of(chains, [list(range(len(chain))) for chain in chains]), None)


def walked(done: Completion) -> list[int]:
    """The text put together from its trace alone."""
    assert done.trace is not None
    tokens: list[int] = []
    for one in done.trace:
        assert one.position == 1 + len(tokens)
        tokens += [*(one.tokens[row - 1] for row in one.path), one.added][: one.kept]
    return tokens


@pytest.mark.parametrize("rule", ["block", "coupled", "recursive", "hybrid-traversal"])
def test_provenance_and_trace_tell_the_text(rule: str) -> None:
    trees = None if rule == "block" else TreeBudget(2, 6)
    requests = served(CombinedDrafter([Says(0, 1), model()]), trees)
    (done,) = requests.complete([Request((1,), LONG, rule=rule, trace=True)])
    assert done.trace is not None and walked(done) == list(done.token_ids)
    assert [one.round for one in done.trace] == list(range(len(done.trace)))
    where = iter(done.provenance)
    for number, one in enumerate(done.trace):
        for depth, row in enumerate(one.path[: one.kept], start=1):
            told = next(where)
            assert (told.source, told.depth, told.round) == ("draft", depth, number)
            assert told.drafter == one.drafters[row - 1]
        if one.kept > len(one.path):
            told = next(where)
            assert (told.source, told.round) == (one.source, number)
            assert told.drafter is None and told.depth is None
    assert next(where, None) is None
    assert tuple(told.source for told in done.provenance) == done.sources
    assert {told.drafter for told in done.provenance} > {None}


@pytest.mark.parametrize("trees", [None, TreeBudget(3, 12)])
def test_in_a_combination_the_part_is_named(trees: TreeBudget | None) -> None:
    """A chain is one part's as a whole; nodes of a tree are each their own's, nested parts too."""
    inner = CombinedDrafter([Says(1, 2), Says(2, 3)])
    made = CombinedDrafter([Says(0, 1), inner])
    assert made.names == ("says 0", "says 1", "says 2")
    params = SamplingParams(max_tokens=120, temperature=1.0, seed=1)
    done = served(made, trees).complete([Request((t,), params) for t in (1, 2, 3)])
    guessed = [
        (token, told.drafter)
        for one in done
        for token, told in zip(one.token_ids, one.provenance, strict=True)
        if told.source == "draft"
    ]
    assert all(name == f"says {token}" for token, name in guessed)
    # The longest chain is the last one's, but where the text is about to end.
    assert {token for token, _ in guessed} >= ({2} if trees is None else {0, 1, 2})


def test_deltas_tell_what_the_completion_tells() -> None:
    request = Request((1,), LONG, trace=True)
    deltas = list(served(model()).stream(request))
    (done,) = served(model()).complete([request])
    assert tuple(told for delta in deltas for told in delta.provenance) == done.provenance
    traces = [delta.trace for delta in deltas if delta.trace is not None]
    assert len(traces) == len(deltas) == len(done.trace or ())
    assert [one.kept for one in traces] == [len(delta.token_ids) for delta in deltas]
    whole = Completion.of(deltas, SpeculativeMetrics(), 5, "coupled")
    assert whole.trace == tuple(traces) and whole.drafters == done.drafters


def test_who_does_not_ask_is_told_no_trace() -> None:
    (done,) = served(model()).complete([Request((1,), LONG)])
    assert done.trace is None and len(done.provenance) == len(done.token_ids)
    (plain,) = served(NoDrafter()).complete([Request((1,), LONG, trace=True)])
    assert {told.drafter for told in plain.provenance} == {None}
    assert plain.trace is not None and all(one.tokens == () for one in plain.trace)
    assert Delta(0, "", (1, 2), ("draft", "bonus")).provenance[0].drafter is None


@pytest.mark.parametrize(
    ("rule", "kind"), [("block", "iid"), ("recursive", "without"), ("hybrid", "tail")]
)
def test_a_trace_has_the_laws_probabilities(rule: str, kind: str) -> None:
    trees = None if rule == "block" else TreeBudget(2, 6)
    (done,) = served(model(), trees).complete(
        [Request((1,), SamplingParams(max_tokens=30), rule=rule, trace=True)]
    )
    assert done.trace is not None
    text, seen = [1, *done.token_ids], set()
    for one in done.trace:
        for j, token in enumerate(one.tokens):
            parent = one.parents[j]
            before = one.tokens[parent - 1] if parent else text[one.position - 1]
            assert one.target_probs[j] == pytest.approx(_row(TARGET, before)[token], rel=1e-5)
            seen.add(one.kinds[j])
            if one.kinds[j] == "point":
                assert one.draft_probs[j] is None
            else:
                wanted = _row(DRAFT, before)[token]
                assert one.draft_probs[j] == pytest.approx(wanted, rel=1e-5)
    assert kind in seen


@pytest.mark.parametrize("rule", ["recursive", "hybrid", "hybrid-traversal", "match"])
def test_wide_rows_are_told_as_small_ones_are(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their laws are made on demand, and where all branches end early there may be none to make."""
    params = SamplingParams(max_tokens=30, seed=4, temperature=0.8, repetition_penalty=1.1)
    made = []
    for at_once in (1 << 19, 0):
        monkeypatch.setattr(group, "_AT_ONCE", at_once)
        suffix = SuffixDrafter(spec_factor=4.0, min_prob=0.0)
        requests = served(CombinedDrafter([suffix, model()]), TreeBudget(2, 8))
        asked = [Request((1, 2, 3)[:n], params, rule=rule, trace=True) for n in (1, 2, 3)]
        made.append(requests.complete(asked))
    for few, wide in zip(*made, strict=True):
        assert few.token_ids == wide.token_ids
        for one, other in zip(few.trace or (), wide.trace or (), strict=True):
            assert one.target_probs == pytest.approx(other.target_probs)


def _row(law, before: int):
    return law.rows[before] / law.rows[before].sum()


def test_a_trace_is_json() -> None:
    (done,) = served(model()).complete([Request((1,), LONG, trace=True)])
    assert done.trace is not None
    first = json.loads(json.dumps(done.trace[0].as_dict()))
    assert set(first) >= {"tokens", "parents", "path", "added", "draft_probs", "target_probs"}
    assert set(first["times"]) == {"draft_s", "score_s", "verify_s", "commit_s"}


STAGES = ("draft_s", "score_s", "verify_s", "commit_s", "other_s")


class Slow(ProtocolTarget):
    """Takes a while over every forward, prompts too."""

    calls = 0

    def score(self, rows):
        self.calls += 1
        time.sleep(0.002)
        return super().score(rows)


def test_five_seconds_sum_to_the_wall() -> None:
    """Of each text, one of which waits for the other, and of all; reading a prompt is scoring."""
    target = Slow(TARGET)
    engine = Engine(target, model(), Emitter(None), max_texts=1, chunk=4)
    requests = Requests(engine, depth=3, end_tokens=frozenset())
    prompt = tuple(i % VOCAB for i in range(21))
    started = time.perf_counter()
    first, last = requests.complete([Request(prompt, LONG, trace=True)] * 2)
    wall = time.perf_counter() - started
    for stats in (first.stats, last.stats, requests.engine.metrics):
        parts = [getattr(stats, name) for name in STAGES]
        assert min(parts) > 0 and sum(parts) == pytest.approx(stats.wall_s)
        assert stats.wall_s <= wall
        assert set(STAGES) < set(stats.as_dict()) and set(STAGES) < set(stats.definitions())
    assert last.stats.other_s > first.stats.wall_s, "it waited for the first"
    assert engine.metrics.score_s >= 0.002 * target.calls
    assert last.trace is not None and target.calls > 2 * len(last.trace), "nothing was read ahead"
    rounds = sum(one.times.score_s for one in last.trace)
    assert last.stats.score_s - rounds >= 0.002 * 4, "the prompt's chunks are not counted"


def test_stages_of_shared_rounds_count_for_each_text_and_once_in_all() -> None:
    requests = served(ProtocolDrafter(DRAFT))
    done = requests.complete([Request((t,), LONG, trace=True) for t in (1, 2)])
    total = requests.engine.metrics
    for one in done:
        assert one.trace is not None and {t.num_texts for t in one.trace} >= {2}
        assert one.stats.score_s <= total.score_s
        for stage in STAGES[:4]:
            rounds = sum(getattr(t.times, stage) for t in one.trace)
            assert getattr(one.stats, stage) == pytest.approx(rounds)
    assert sum(one.stats.score_s for one in done) > 1.2 * total.score_s
