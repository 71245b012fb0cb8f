"""Whatever is chosen, the law is the target's, and the tokens where the rule promises them."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from outrider import SamplingParams
from outrider.control import Controller
from outrider.drafters import Drafter, ModelDrafter, NgramDrafter, NoDrafter
from outrider.engine import Emitter, Engine, Requests
from outrider.models.protocol import ProtocolTarget
from outrider.tree import TreeBudget
from outrider.types import Completion, Request
from tests.engine.test_law import LENGTH, PREFIX, TARGET, chi_square
from tests.engine.toys import blurred, markov

# Laws are compared, and not texts of one seed.
pytestmark = pytest.mark.filterwarnings("ignore:rule=:outrider.errors.OutriderWarning")
OTHER = markov(6, 2, seed=5, zeros=0.5)
WIDE = TreeBudget(2, 8)
PROMPTS = [(1,), (2, 3, 4, 2, 3), (0, 0, 1, 2, 1, 0, 0), (5, 4)]


@pytest.fixture(autouse=True)
def ticks(monkeypatch) -> None:
    """Every stage takes one second: drafts cost little, and what is chosen changes all the time."""
    count = itertools.count()
    clock = SimpleNamespace(perf_counter=lambda: float(next(count)))
    monkeypatch.setattr("outrider.engine.laps.time", clock)


def chosen(model=OTHER, share: float = 0.2) -> Controller:
    return Controller([ModelDrafter(ProtocolTarget(blurred(model, 3, share))), NgramDrafter(1, 2)])


def made(drafter: Drafter, params: SamplingParams, trees=None) -> list[Completion]:
    engine = Engine(ProtocolTarget(OTHER), drafter, Emitter(None), trees=trees)
    requests = Requests(engine, depth=8, end_tokens=frozenset())
    return requests.complete([Request(prompt, params) for prompt in PROMPTS])


def samples(
    drafter: Drafter, rule: str, count: int, trees: TreeBudget | None = None
) -> Counter[tuple[int, ...]]:
    """The first tokens of texts with a seed each, a few at a time, so that most are drafted for."""
    engine = Engine(ProtocolTarget(TARGET), drafter, Emitter(None), max_texts=20, trees=trees)
    requests = Requests(engine, depth=3, end_tokens=frozenset())
    asked = [
        Request(PREFIX, SamplingParams(seed=seed, max_tokens=LENGTH), rule=rule)
        for seed in range(count)
    ]
    return Counter(one.token_ids for one in requests.complete(asked))


class Dropper(Controller):
    """The negative control: it looks at the tokens just drawn, and takes back what it dislikes."""

    def propose(self, texts, depths, draws):
        draft = super().propose(texts, depths, draws)
        tree = draft.tree
        if draft.law is None or not tree.num_nodes:
            return draft
        kept_BN = (tree.tokens_BN != 0).long().cumprod(1)
        counts_B = torch.minimum(tree.counts_B, kept_BN.sum(1))
        return replace(draft, tree=replace(tree, counts_B=counts_B))


@pytest.mark.parametrize("trees", [None, TreeBudget(3, 12)], ids=["chains", "trees"])
@pytest.mark.parametrize("law", [{"temperature": 0.0}, {"seed": 11, "temperature": 0.7}])
def test_tokens_are_those_of_plain_decoding(law, trees) -> None:
    params = SamplingParams(max_tokens=40, **law)
    plain = [one.token_ids for one in made(NoDrafter(), params)]
    drafter = chosen()
    for _ in range(2):
        done = made(drafter, params, trees)
        assert [one.token_ids for one in done] == plain
        named = {told.drafter for one in done for told in one.provenance}
        assert named & {"draft", "ngram"} and named <= {"draft", "ngram", None}
    assert not drafter._states and not drafter._reading


def test_a_wrong_target_is_noticed() -> None:
    """The comparison above would fail where drafts were taken unseen."""
    params = SamplingParams(max_tokens=40, temperature=0.0)
    drafter = chosen(share=0.9)
    done = made(drafter, params)
    assert any(one.stats.accepted < one.stats.drafted for one in done)


@pytest.mark.parametrize("rule", ["token", "block"])
def test_the_law_is_the_targets(rule: str) -> None:
    drafter = chosen(TARGET, 0.6)
    assert chi_square(samples(drafter, rule, 500), TARGET) < 4.5
    report = drafter.report()
    drafted = sum(one["rounds"] for name, one in report.items() if "draft" in name)
    assert drafted > 0.5 * sum(one["rounds"] for one in report.values()), report


@pytest.mark.parametrize("rule", ["token", "block"])
def test_a_choice_by_the_token_just_drawn_is_found(rule: str) -> None:
    wrong = Dropper([ModelDrafter(ProtocolTarget(blurred(TARGET, 3, 0.6)))])
    assert chi_square(samples(wrong, rule, 1500), TARGET) > 8


@pytest.mark.parametrize("rule", ["hybrid-traversal", "recursive", "kseq"])
def test_the_law_is_the_targets_with_chains_and_trees_of_all_sizes(rule: str) -> None:
    drafter = chosen(TARGET, 0.6)
    assert chi_square(samples(drafter, rule, 500, WIDE), TARGET) < 4.5
    report = drafter.report().values()
    trees = sum(one["tree_rounds"] for one in report)
    assert 0 < trees < sum(one["rounds"] for one in report), report


def test_a_tree_cut_by_a_token_just_drawn_is_found() -> None:
    wrong = Dropper([ModelDrafter(ProtocolTarget(blurred(TARGET, 3, 0.6)))])
    assert chi_square(samples(wrong, "recursive", 1500, WIDE), TARGET) > 8
