"""Trees through the engine: the same tokens where they are promised, the same law everywhere."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from outrider import SamplingParams, SpeculativeDecoder, SpeculativeDecoderConfig
from outrider.decoding import RULES, Kind
from outrider.decoding.best import grow_best
from outrider.decoding.children import TailThenTop
from outrider.decoding.draft import Draft, RoundNoise
from outrider.decoding.draw import Draws
from outrider.decoding.laws import Law
from outrider.decoding.rows import TargetLaws
from outrider.drafters import Drafter, ModelDrafter
from outrider.engine import Emitter, Engine, Requests, group
from outrider.engine.places import Places
from outrider.errors import InvalidConfig, TargetShapeMismatch, UnsupportedModel
from outrider.models.protocol import ProtocolTarget
from outrider.models.tabular import MarkovModel
from outrider.noise import as_key
from outrider.tree import TokenTree, TreeBudget, full
from outrider.types import Request
from tests.drafters.tapped import TappedTarget, ToyEagle
from tests.engine.test_law import LENGTH, PREFIX, TARGET, chi_square
from tests.engine.toys import blurred, markov

WIDE = markov(9, 2, seed=1)
PREFIXES = [[1], [2, 3, 4], [0, 0, 1, 2, 1], [6, 5], [3]]
TREE_RULES = [name for name, rule in RULES.items() if rule.trees and name != "greedy"]


def drafts(model, **config) -> SpeculativeDecoder:
    """A decoder that drafts trees with a model of its own cache."""
    made = SpeculativeDecoderConfig(**{"k": 3, "width": 3, **config})
    return SpeculativeDecoder(ProtocolTarget(model), WIDE, made)


@pytest.mark.parametrize(("share", "width", "nodes"), [(0.1, 2, None), (0.9, 3, 5), (0.5, 4, 16)])
def test_greedy_and_seeded_texts_are_those_of_plain_decoding(share, width, nodes) -> None:
    draft = blurred(WIDE, 2, share)
    greedy = SamplingParams(temperature=0.0)
    plain = SpeculativeDecoder(None, WIDE, SpeculativeDecoderConfig(sampling=greedy))
    speculative = drafts(draft, width=width, nodes=nodes, sampling=greedy)
    assert speculative.generate_batch(PREFIXES, 23) == plain.generate_batch(PREFIXES, 23)
    warm = SamplingParams(temperature=0.8, top_k=6)
    plain = SpeculativeDecoder(None, WIDE, SpeculativeDecoderConfig(sampling=warm))
    speculative = drafts(draft, width=width, nodes=nodes, sampling=warm)
    due = plain.generate_batch(PREFIXES, 40, seed=11)
    assert speculative.generate_batch(PREFIXES, 40, seed=11) == due
    assert [speculative.generate(p, 40, seed=11) for p in PREFIXES] == due
    metrics = speculative.metrics
    assert metrics.drafted > metrics.rounds * 2 and 0 < metrics.acceptance_rate < 1
    assert len(metrics.acceptance_per_pos) <= 3


@pytest.mark.parametrize("rule", ["coupled", "recursive", "token", "gbv"])
def test_rows_made_on_demand_are_those_made_at_once(rule: str, monkeypatch) -> None:
    """Whether a row becomes a law before or while the rule reads it changes no token."""
    width = 1 if rule == "token" else 2
    sampling = SamplingParams(temperature=0.9, top_k=7, min_tokens=3)
    made = []
    for at_once in (1 << 19, 0):
        monkeypatch.setattr(group, "_AT_ONCE", at_once)
        asked = []
        monkeypatch.setattr(
            group.OnDemand, "probs", _counting(group.OnDemand.probs, asked), raising=True
        )
        decoder = drafts(blurred(WIDE, 2, 0.5), width=width, rule=rule, sampling=sampling)
        made.append(decoder.generate_batch(PREFIXES, 20, seed=5))
        assert bool(asked) == (at_once == 0)
    assert made[0] == made[1]


def _counting(probs, asked: list[int]):
    def counted(self, at_n):
        asked.append(len(at_n))
        return probs(self, at_n)

    return counted


def test_a_tree_keeps_more_than_a_chain() -> None:
    draft = blurred(WIDE, 2, 0.5)
    kept = {}
    for width in (1, 3):
        decoder = drafts(draft, width=width)
        decoder.generate_batch([[1, 2]] * 4, 200, seed=3)
        kept[width] = decoder.metrics.mean_acceptance_length
    assert kept[3] > kept[1] + 0.15


class Liar(ModelDrafter):
    """Draws from one law and says it was another: the negative control."""

    def propose(self, texts, depths, draws):
        draft = super().propose(texts, depths, draws)
        if draft.law is None:
            return draft
        flat = torch.full_like(draft.law.probs, 1 / draft.law.probs.shape[1])
        return replace(draft, law=Law.dense(flat))


class Kept(ModelDrafter):
    """Keeps its drafts, beside the texts they were made for."""

    def __init__(self, model) -> None:
        super().__init__(model)
        self.drafts = []

    def propose(self, texts, depths, draws):
        draft = super().propose(texts, depths, draws)
        self.drafts.append(([tuple(text.tokens) for text in texts], list(depths), draft))
        return draft


@pytest.mark.parametrize("rule", ["recursive", "hybrid", "gbv", "token"])
def test_the_law_told_is_the_law_each_node_was_drawn_from(rule: str) -> None:
    model = blurred(WIDE, 2, 0.5)
    drafter = Kept(ProtocolTarget(model))
    trees = None if rule == "token" else TreeBudget(2, 10)
    engine = Engine(ProtocolTarget(WIDE), drafter, Emitter(None), trees=trees)
    requests = Requests(engine, depth=3, end_tokens=frozenset())
    requests.complete(
        [
            Request(tuple(prefix), SamplingParams(max_tokens=4 + 3 * i, seed=i), rule=rule)
            for i, prefix in enumerate(PREFIXES)
        ]
    )
    seen = set()
    for texts, depths, draft in drafter.drafts:
        assert draft.law is not None
        rows_BN, kinds_BN = draft.law_rows(), draft.node_kinds()
        places = Places.of(draft.tree)
        levels = draft.tree.depths()
        paths = iter(places.paths)
        for b, (text, depth) in enumerate(zip(texts, depths, strict=True)):
            own = [next(paths) for _ in range(int(draft.tree.counts_B[b]) + 1)]
            for j in range(int(draft.tree.counts_B[b])):
                assert levels[b, j + 1] <= depth
                before = own[int(draft.tree.parents_BN[b, j])]
                due = torch.from_numpy(model.law([*text, *before]))
                law = draft.law.probs[int(rows_BN[b, j])]
                torch.testing.assert_close(law, due, rtol=0, atol=1e-12)
                seen.add((Kind(int(kinds_BN[b, j])), depth, len(before)))
    assert len({depth for _, depth, _ in seen}) > 1 and max(n for *_, n in seen) >= 1


def samples(
    drafter: Drafter,
    rule: str,
    count: int,
    trees: TreeBudget,
    *,
    max_texts: int = 500,
    **controls,
) -> Counter[tuple[int, ...]]:
    engine = Engine(TappedTarget(TARGET), drafter, Emitter(None), max_texts=max_texts, trees=trees)
    requests = Requests(engine, depth=3, end_tokens=frozenset())
    done = requests.complete(
        [
            Request(PREFIX, SamplingParams(seed=s, max_tokens=LENGTH, **controls), rule=rule)
            for s in range(count)
        ]
    )
    assert engine.metrics.drafted > count
    return Counter(completion.token_ids for completion in done)


@pytest.mark.parametrize("rule", TREE_RULES)
def test_first_five_tokens_follow_the_target(rule: str) -> None:
    drafter = ModelDrafter(ProtocolTarget(blurred(TARGET, 5, 0.6)))
    assert chi_square(samples(drafter, rule, 1000, TreeBudget(2, 5)), TARGET) < 4.5


@pytest.mark.parametrize("rule", ["recursive", "traversal"])
def test_first_five_tokens_of_a_heads_trees_follow_the_target(rule: str) -> None:
    """Its laws are over two of the three tokens."""
    assert chi_square(samples(ToyEagle(3, 1), rule, 1000, TreeBudget(2, 5)), TARGET) < 4.5


def two_likeliest(weights):
    """A law, or several, under top_k=2."""
    return weights * (weights >= np.sort(weights)[..., -2, None])


SHAPED = [rule for rule in TREE_RULES if rule != "gbv"]
"""Rules for trees of any shape."""
SLOW = pytest.mark.slow


@pytest.fixture
def none_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round of several texts that fails is no round of each by itself."""

    def isolate(self, texts, error):
        raise error

    monkeypatch.setattr(Engine, "_isolate", isolate)


@pytest.mark.usefixtures("none_alone")
@pytest.mark.parametrize(
    "rule",
    [
        pytest.param(rule, marks=SLOW if rule in ("recursive", "hybrid-traversal") else ())
        for rule in SHAPED
    ],
)
def test_trees_that_are_all_smaller_than_their_shape_follow_the_target(rule: str) -> None:
    """Three children are due where two tokens may come: the shape's last places stay empty.

    Of two texts, so that rows of the one that were taken for the other's would be there.
    """
    due = MarkovModel(two_likeliest(TARGET.init), two_likeliest(TARGET.rows))
    drafter = ModelDrafter(ProtocolTarget(blurred(TARGET, 5, 0.6)))
    shape = TreeBudget(3, 12, full(3, 2))
    seen = samples(drafter, rule, 600, shape, max_texts=2, top_k=2)
    assert chi_square(seen, due) < 4.5


@pytest.mark.usefixtures("none_alone")
@pytest.mark.parametrize("num", [2, 5])
@pytest.mark.parametrize("rule", SHAPED)
def test_greedy_texts_of_a_batch_are_plain_decoding_s_under_any_rule(rule: str, num: int) -> None:
    """Laws are of one token there, and a row has one child of the three."""
    greedy, prefixes = SamplingParams(temperature=0.0), PREFIXES[:num]
    plain = SpeculativeDecoder(None, WIDE, SpeculativeDecoderConfig(sampling=greedy))
    speculative = drafts(blurred(WIDE, 2, 0.5), k=2, nodes=12, sampling=greedy, rule=rule)
    assert speculative.generate_batch(prefixes, 23) == plain.generate_batch(prefixes, 23)
    assert speculative.metrics.drafted > 0


@pytest.mark.parametrize("rule", ["recursive", "hybrid", "traversal", "hybrid-traversal"])
def test_rows_that_are_not_those_of_the_trees_are_refused(rule: str) -> None:
    """By the rules that find them by their number: they would read one text's for another's."""
    tree = TokenTree.of([[1, 2, 3], [1, 2]], [[0, 0, 1], [0, 0]])
    noise = RoundNoise(as_key([0, 1]), torch.zeros(2, dtype=torch.int64), torch.tensor([3, 3]))
    draft = Draft(tree, None)
    rows = torch.full((2, 4, 5), 0.2)
    assert RULES[rule].verify(draft, TargetLaws(rows), noise).num_accepted_B.shape == (2,)
    with pytest.raises(TargetShapeMismatch, match="has 3 rows a text; 4 are due for trees of 3"):
        RULES[rule].verify(draft, TargetLaws(rows[:, :3]), noise)


@pytest.mark.parametrize("rule", ["recursive", "hybrid-traversal", "kseq", "gbv"])
def test_a_drafter_that_lies_about_its_law_is_found(rule: str) -> None:
    drafter = Liar(ProtocolTarget(blurred(TARGET, 5, 0.6)))
    try:
        distance = chi_square(samples(drafter, rule, 1000, TreeBudget(2, 5)), TARGET)
    except AssertionError:
        return
    assert distance > 8


@pytest.mark.parametrize("nodes", range(2, 12))
def test_a_tail_child_never_stands_without_its_certain_siblings(nodes: int) -> None:
    """Its law is that of the row without them: one that was pruned would make it a lie."""
    chance = torch.Generator().manual_seed(nodes)
    laws = torch.rand(40, 6, generator=chance, dtype=torch.float64) ** 4
    laws = laws / laws.sum(1, keepdim=True)

    def expand(tree, rows_BL):
        texts = torch.arange(len(rows_BL))[:, None]
        return Law.dense(laws[(texts * 7 + rows_BL).flatten() % len(laws)])

    seeds = torch.arange(30)
    noise = RoundNoise(seeds, torch.zeros_like(seeds), torch.zeros_like(seeds))
    draws = Draws(RULES["hybrid"], noise, TailThenTop())
    depths = torch.tensor([3] * 20 + [1] * 10)
    draft = grow_best(draws, TreeBudget(3, nodes), depths, expand)
    assert draft.kinds_BN is not None
    tree, children = draft.tree, draft.tree.children()
    assert (tree.counts_B <= nodes).all() and (tree.counts_B[20:] <= 3).all()
    assert (tree.depths()[20:] <= 1).all()
    for b in range(30):
        for row in range(int(tree.counts_B[b]) + 1):
            kids = [k for k in children[b, row].tolist() if k]
            kinds = [int(draft.kinds_BN[b, k - 1]) for k in kids]
            assert Kind.TAIL not in kinds or len(kids) == 3


class Careless(TailThenTop):
    """Judges the tail child by its mass alone, so that siblings are pruned beside it."""

    def _worth(self, probs_RM, tops_RK):
        own_RK = probs_RM.gather(1, tops_RK).double()
        return torch.cat((1 - own_RK.sum(1, keepdim=True), own_RK * 1e-3), 1)


def test_pruning_the_siblings_of_a_tail_child_is_found(monkeypatch) -> None:
    monkeypatch.setattr(RULES["hybrid"], "drawing", Careless())
    drafter = ModelDrafter(ProtocolTarget(blurred(TARGET, 5, 0.6)))
    assert chi_square(samples(drafter, "hybrid", 1500, TreeBudget(2, 3)), TARGET) > 8


def test_trees_are_refused_where_they_cannot_be() -> None:
    with pytest.raises(InvalidConfig, match="width=1"):
        drafts(WIDE, rule="block").generate([1], 4)
    with pytest.raises(InvalidConfig, match="nodes=4"):
        SpeculativeDecoderConfig(nodes=4)
    with pytest.raises(InvalidConfig, match="nodes"):
        SpeculativeDecoderConfig(width=2, nodes=64)
    with pytest.raises(InvalidConfig, match="room for 56"):
        SpeculativeDecoderConfig(k=9, width=8)
    target = ProtocolTarget(WIDE)
    target.scores_trees = False
    with pytest.raises(UnsupportedModel, match="chains"):
        SpeculativeDecoder(None, target, SpeculativeDecoderConfig(width=2))


def test_lossy_rules_are_asked_for_and_marked() -> None:
    with pytest.raises(InvalidConfig, match="lossless=False"):
        SpeculativeDecoderConfig(rule="mixture")
    config = SpeculativeDecoderConfig(rule="mixture", lossless=False, width=2)
    decoder = SpeculativeDecoder(ProtocolTarget(blurred(WIDE, 2, 0.5)), WIDE, config)
    request = Request((1, 2), SamplingParams(max_tokens=8), rule="mixture")
    (done,) = decoder._requests.complete([request])
    assert (done.rule, done.lossless) == ("mixture", False)
    (done,) = decoder._requests.complete([replace(request, rule="recursive")])
    assert (done.rule, done.lossless) == ("recursive", True)
