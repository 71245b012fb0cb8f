"""Traces on disk, and replays of them: a policy walks as it would have run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from outrider import SamplingParams
from outrider.control.controller import Controller
from outrider.control.costs import Costs, DraftCost, ForwardCost
from outrider.control.fit import costs_of
from outrider.control.observe import observing
from outrider.control.policies import FORMS, policy_of
from outrider.control.record import Asked, observed, recorded
from outrider.control.replay import replay
from outrider.control.trace import TracedText, read_trace, write_trace
from outrider.decoding import RULES
from outrider.drafters import Drafter, ModelDrafter, NgramDrafter
from outrider.engine import Emitter, Engine, Requests
from outrider.errors import InvalidConfig
from outrider.models.protocol import ProtocolTarget
from outrider.tree import TreeBudget
from outrider.types import SpeculativeMetrics
from tests.engine.toys import blurred, markov

WIDE = markov(9, 2, seed=1)
PROMPTS = [[1], [2, 3, 4], [0, 0, 1, 2, 1], [6, 5]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=30)
WARM = SamplingParams(temperature=0.9, max_tokens=30, seed=11)
COSTS = Costs(
    tuple(ForwardCost(1, rows, 0, 10.0 + rows) for rows in (1, 2, 5, 9)),
    {"draft": DraftCost(0.5, 1.0, 0.1, 0.01), "ngram": DraftCost(0.1)},
    prompt_token_s=0.1,
    verify_text_s=0.5,
    verify_row_s=0.1,
)


def model(share: float = 0.4) -> ModelDrafter:
    return ModelDrafter(ProtocolTarget(blurred(WIDE, 2, share)))


def served(drafter: Drafter | None = None, trees: TreeBudget | None = None) -> Requests:
    engine = Engine(ProtocolTarget(WIDE), drafter or model(), Emitter(None), trees=trees)
    return Requests(engine, depth=4, end_tokens=frozenset())


def ran(drafter: Drafter, asked: Asked, trees: TreeBudget | None = None) -> SpeculativeMetrics:
    requests = served(drafter, trees)
    recorded(requests, asked)
    return requests.engine.metrics


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "coupled"])
@pytest.mark.parametrize("made", [model, NgramDrafter], ids=["draft", "ngram"])
def test_any_depth_walks_as_it_would_have_run(made, sampling: SamplingParams) -> None:
    texts = observed(served(made()), Asked(PROMPTS, sampling, 6))
    for depth in (1, 3, 6):
        due = ran(made(), Asked(PROMPTS, sampling, depth))
        found = replay(texts, policy_of(f"depth:{depth}"), COSTS)
        assert found.tokens == due.committed == 120
        assert found.rounds == due.rounds + due.plain_rounds
        assert (found.drafted, found.accepted) == (due.drafted, due.accepted)
        assert found.unknown == 0
    assert replay(texts, policy_of("none"), COSTS).rounds == 120


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "coupled"])
def test_any_tree_within_the_traced_one_walks_as_it_would_have_run(sampling) -> None:
    """One observed text per width has every depth and budget in it."""
    texts = observed(served(trees=TreeBudget(3, 63)), Asked(PROMPTS, sampling, 4))
    kept = set()
    for depth, nodes in ((4, 63), (3, 7), (4, 5), (1, 2)):
        due = ran(model(), Asked(PROMPTS, sampling, depth), TreeBudget(3, nodes))
        found = replay(texts, policy_of(f"tree:{depth},{nodes}"), COSTS)
        assert found.rounds == due.rounds + due.plain_rounds
        assert (found.drafted, found.accepted) == (due.drafted, due.accepted)
        kept.add(found.accepted)
    assert len(kept) > 2


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "rule",
    [
        "block",
        pytest.param("token", marks=SLOW),
        pytest.param("hybrid-traversal", marks=SLOW),
        pytest.param("recursive", marks=SLOW),
    ],
)
def test_rules_in_law_walk_as_far_in_the_mean(rule: str) -> None:
    trees = None if rule in ("token", "block") else TreeBudget(2, 8)
    params = SamplingParams(max_tokens=60, seed=1)
    asked = Asked([[t] for t in range(9)] * 3, params, 4, rule=rule)
    due = ran(model(), asked, trees)
    texts = observed(served(trees=trees), asked)
    found = replay(texts, policy_of("depth:4"), COSTS)
    near = 0.06 if trees is None else 0.12
    assert found.mean_acceptance_length == pytest.approx(due.mean_acceptance_length, rel=near)
    # The negative control: another drafter's guesses are told apart.
    worse = replay(observed(served(model(0.9), trees), asked), policy_of("depth:4"), COSTS)
    assert worse.mean_acceptance_length < 0.92 * due.mean_acceptance_length


@pytest.mark.parametrize("rule", ["token", "block"])
def test_look_ups_keep_what_the_text_has_too(rule: str) -> None:
    """Under rules in law: what stays is the text, and a rejected token is never its next one."""
    params = SamplingParams(max_tokens=60, seed=1)
    asked = Asked([[t] for t in range(9)] * 8, params, 4, rule=rule)
    due = ran(NgramDrafter(), asked)
    texts = observed(served(NgramDrafter()), asked)
    found = replay(texts, policy_of("depth:4"), COSTS)
    assert found.mean_acceptance_length == pytest.approx(due.mean_acceptance_length, rel=0.02)
    for text, steps in zip(texts, found.steps, strict=True):
        for step in steps:
            guesses = list(text.rounds[step.made].trace.tokens)
            assert guesses[: step.kept] == text.tokens[step.made : step.made + step.kept]


def test_a_threshold_under_rules_in_law_is_refused() -> None:
    texts = observed(served(), Asked(PROMPTS[:1], replace(WARM, seed=None), 3, rule="token"))
    with pytest.raises(InvalidConfig, match="trace under coupled"):
        replay(texts, policy_of("threshold:0.3"), COSTS)


def test_more_than_was_traced_is_refused() -> None:
    """Of several texts the one with the smallest drafts says how deep all can be replayed."""
    asked = Asked(PROMPTS[:1], GREEDY, 4)
    trees = observed(served(trees=TreeBudget(2, 7)), asked)
    with pytest.raises(InvalidConfig, match=r"'tree:4,8' asks for 8 nodes.* 7 at most"):
        replay(trees, policy_of("tree:4,8"), COSTS)
    both = trees + observed(served(), replace(asked, depth=2))
    with pytest.raises(InvalidConfig, match=r"'depth:3' asks for 3 levels.* at most 2"):
        replay(both, policy_of("depth:3"), COSTS)
    assert replay(both, policy_of("depth:2"), COSTS).tokens == 60


def test_texts_are_observed_side_by_side() -> None:
    with observing("greedy") as one, observing("block") as other:
        assert one.name != other.name and {one.name, other.name} <= set(RULES)
    assert not {one.name, other.name} & set(RULES)


def test_rounds_of_uneven_drafts_have_the_rows_of_all() -> None:
    """A look-up has something for some texts and nothing for others."""
    texts = recorded(served(NgramDrafter()), Asked([[1], [5, 6, 5, 6, 5]], GREEDY, 4))
    uneven = 0
    for one, other in zip(*(text.rounds for text in texts), strict=False):
        if one.trace.num_texts == 2 and one.trace.round > 0:
            nodes = len(one.trace.tokens), len(other.trace.tokens)
            assert one.trace.num_rows == other.trace.num_rows == 2 + sum(nodes)
            uneven += nodes[0] != nodes[1]
    assert uneven
    seen = {(cost.texts, cost.rows) for cost in costs_of(texts).forwards}
    assert seen == {
        (one.trace.num_texts, one.trace.num_rows)
        for text in texts
        for one in text.rounds
        if one.trace.round
    }


def test_an_observed_text_is_that_of_plain_decoding() -> None:
    for sampling in (GREEDY, WARM):
        plain = recorded(served(), Asked(PROMPTS, sampling, 0))
        texts = observed(served(), Asked(PROMPTS, sampling, 3))
        assert [text.tokens for text in texts] == [text.tokens for text in plain]
        assert all(one.trace.kept == 1 for text in texts for one in text.rounds)
    assert not any("observed" in name for name in RULES), "registered for as long as it is needed"


def test_what_was_run_is_replayed_as_it_was() -> None:
    texts = recorded(served(), Asked(PROMPTS, GREEDY, 4, batch=1))
    requests = served()
    again = recorded(requests, Asked(PROMPTS, GREEDY, 4, batch=1))
    found = replay(again, None, COSTS)
    metrics = requests.engine.metrics
    assert [text.tokens for text in again] == [text.tokens for text in texts]
    assert (
        found.tokens == metrics.committed and found.rounds == metrics.rounds + metrics.plain_rounds
    )
    laps = metrics.draft_s + metrics.score_s + metrics.verify_s + metrics.commit_s
    assert found.seconds == pytest.approx(laps) and laps <= metrics.wall_s
    with pytest.raises(InvalidConfig, match="of an observed text"):
        replay(observed(served(), Asked([[1]], GREEDY, 2)), None, COSTS)


def test_a_text_traced_as_it_ran_knows_chains_as_deep_as_its_own() -> None:
    texts = recorded(served(), Asked(PROMPTS, GREEDY, 6))
    full = observed(served(), Asked(PROMPTS, GREEDY, 6))
    same = replay(texts, policy_of("depth:6"), COSTS)
    assert same.unknown == 0 and same.rounds == replay(full, policy_of("depth:6"), COSTS).rounds
    for depth in (1, 2, 3, 4):
        found = replay(texts, policy_of(f"depth:{depth}"), COSTS)
        due = replay(full, policy_of(f"depth:{depth}"), COSTS)
        assert (
            found.tokens == due.tokens and due.rounds <= found.rounds <= due.rounds + found.unknown
        )


def test_policies_pay_what_they_take_and_the_oracle_least() -> None:
    texts = observed(served(), Asked(PROMPTS, WARM, 6))
    fixed = [replay(texts, policy_of(f"depth:{depth}"), COSTS) for depth in range(1, 7)]
    plain = replay(texts, policy_of("none"), COSTS)
    oracle = replay(texts, policy_of("oracle"), COSTS)
    expected = replay(texts, policy_of("expected"), COSTS)
    assert oracle.oracle and not expected.oracle
    assert all(oracle.seconds <= one.seconds for one in (*fixed, plain, expected))
    assert oracle.tokens == plain.tokens == 120
    assert plain.wall_s == pytest.approx(120 * COSTS.round_s())
    assert expected.seconds <= 1.15 * min(one.seconds for one in (*fixed, plain))
    assert plain.prompt_s == pytest.approx(0.1 * 11)
    assert fixed[0].prompt_s == pytest.approx(0.11 * 11)
    # An oracle never drafts what is not kept, but where the next token is to be skipped over.
    assert oracle.accepted == oracle.drafted


def test_a_threshold_keeps_the_token_that_stopped_it() -> None:
    sampling = SamplingParams(max_tokens=60, seed=2)
    texts = observed(served(), Asked(PROMPTS, sampling, 5))
    found = replay(texts, policy_of("threshold:0.3"), COSTS)
    for steps, text in zip(found.steps, texts, strict=True):
        for step in steps:
            probs = text.rounds[step.made].trace.draft_probs
            assert all(prob >= 0.3 for prob in probs[: step.levels - 1] if prob is not None)
            last = probs[step.levels - 1] if step.levels else None
            full = step.levels == min(5, 60 - step.made - 1)
            assert full or (last is not None and last < 0.3)
    everything = replay(texts, policy_of("threshold:0"), COSTS)
    assert everything.drafted == replay(texts, policy_of("depth:5"), COSTS).drafted > found.drafted


def test_texts_that_share_rounds_share_their_time() -> None:
    costs = replace(
        COSTS,
        forwards=tuple(ForwardCost(n, n * r, 0, 10.0 + n * r) for n in (1, 4) for r in (1, 5)),
    )
    texts = observed(served(), Asked(PROMPTS, GREEDY, 4))
    alone, together = (replay(texts, policy_of("depth:4"), costs, batch=b) for b in (1, 4))
    assert together.rounds == alone.rounds and together.drafted == alone.drafted
    assert together.wall_s < 0.6 * alone.wall_s
    with pytest.raises(InvalidConfig, match="batch=4"):
        replay(texts, policy_of("oracle"), costs, batch=4)


def test_costs_are_those_of_the_rounds() -> None:
    """Rounds whose times are made up: the fit gives them back."""

    def timed(text: TracedText) -> TracedText:
        rounds = []
        for one in text.rounds:
            nodes = len(one.trace.tokens)
            times = replace(
                one.trace.times,
                draft_s=0.5 + 1.0 * nodes if nodes else 0.0,
                score_s=10.0 + 1 + nodes + (5.0 if one.trace.round == 0 else 0.0),
                verify_s=0.4 + 0.1 * nodes,
                commit_s=0.1,
            )
            rounds.append(replace(one, trace=replace(one.trace, times=times)))
        return replace(text, settings=replace(text.settings, other_s=0.0), rounds=tuple(rounds))

    texts = [
        timed(text)
        for depth in (0, 1, 4)
        for text in recorded(served(), Asked([[2, 3, 4, 5, 6]], GREEDY, depth))
    ]
    costs = costs_of(texts)
    assert costs.round_s() == pytest.approx(11.5)
    assert costs.round_s("draft", levels=2, nodes=2) == pytest.approx(2.5 + 13 + 0.7)
    assert costs.round_s("draft", levels=4, nodes=4) == pytest.approx(4.5 + 15 + 0.9)
    assert costs.prompt_token_s == pytest.approx(1.0)
    with pytest.raises(InvalidConfig, match="trace longer texts"):
        costs_of([replace(texts[0], rounds=texts[0].rounds[:1])])


def test_a_trace_comes_back_from_disk(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    texts = [
        *recorded(served(trees=TreeBudget(2, 5)), Asked(PROMPTS, GREEDY, 3)),
        *observed(served(), Asked(PROMPTS[:1], WARM, 3, rule="block")),
    ]
    write_trace(file, texts)
    assert read_trace(file) == texts
    assert file.stat().st_mode & 0o777 == 0o600, "the text is in it"
    lines = file.read_text().splitlines(keepends=True)
    first, second = json.loads(lines[0]), json.loads(lines[1])
    assert first["trace"] == 2 and first["width"] == 2 and second["round"] == 0
    # A kill in the middle of a line loses that line.
    file.write_text("".join(lines[:3]) + lines[3][:40])
    (cut,) = read_trace(file)
    assert cut.rounds == texts[0].rounds[:2]
    file.write_text(lines[0].replace('"trace": 2', '"trace": 1'))
    with pytest.raises(InvalidConfig, match="version 1; 2 is read"):
        read_trace(file)
    row = next(line for line in lines if '"parents": [0' in line)
    for wrong in ('"parents": [9', '"parents": [-1', '"parents": [0, 0, 0, 0, 0, 0'):
        file.write_text(lines[0] + row.replace('"parents": [0', wrong))
        with pytest.raises(InvalidConfig, match="line 2 of"):
            read_trace(file)
    file.write_text("nothing\n")
    with pytest.raises(InvalidConfig, match=r"line 1 of .* is no line of a trace"):
        read_trace(file)
    with pytest.raises(InvalidConfig, match="cannot be read"):
        read_trace(tmp_path / "none")


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("dept:3", "did you mean 'depth'"),
        ("depth", "invalid literal"),
        ("depth:0", "depth=0"),
        ("depth:x", "invalid literal"),
        ("tree:3", "invalid literal"),
        ("threshold:2", "threshold=2"),
        ("none:1", "does not exist"),
        ("", "does not exist"),
    ],
)
def test_what_is_no_policy_is_refused(spec: str, said: str) -> None:
    with pytest.raises(InvalidConfig, match=said):
        policy_of(spec)
    for known in FORMS:
        known = known.replace("K,N", "3,5").replace("K", "3").replace(":P", ":0.5")
        policy_of(known.replace("DRAFTER", "draft"))


def test_a_controller_is_not_observed() -> None:
    """It would see that nothing is kept, and stop guessing."""
    requests = served(Controller([model(), NgramDrafter()]))
    with pytest.raises(InvalidConfig, match="name one drafter"):
        observed(requests, Asked(PROMPTS, GREEDY, 3))


def test_no_text_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="no text to replay"):
        replay([], policy_of("none"), COSTS)
