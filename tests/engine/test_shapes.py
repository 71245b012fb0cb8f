"""Static shapes through the engine: every tree has the shape, no text or law changes by it."""

from __future__ import annotations

import pytest

from outrider import SamplingParams, SpeculativeDecoder, SpeculativeDecoderConfig
from outrider.decoding import RULES
from outrider.drafters import ModelDrafter
from outrider.engine import Emitter, Engine, Requests
from outrider.errors import InvalidConfig
from outrider.models.protocol import ProtocolTarget
from outrider.tree import TreeBudget
from outrider.types import Request
from tests.engine.test_law import TARGET, chi_square
from tests.engine.test_trees import Liar, samples
from tests.engine.toys import blurred, markov

WIDE = markov(9, 2, seed=1)
PREFIXES = [[1], [2, 3, 4], [0, 0, 1, 2, 1]]
SHAPE = (0, 0, 0, 1, 1, 2, 4)
QUICK = ("coupled", "hybrid-traversal", "traversal")
RULES_OF_SHAPES = [
    name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
    for name, rule in RULES.items()
    # Whole paths from the root are gbv's, and it says so.
    if rule.trees and name not in ("greedy", "gbv")
]


def decoder(**config) -> SpeculativeDecoder:
    draft = ProtocolTarget(blurred(WIDE, 2, 0.5))
    return SpeculativeDecoder(draft, WIDE, SpeculativeDecoderConfig(k=3, **config))


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.8, "top_k": 6}])
def test_texts_are_those_of_plain_decoding(sampling) -> None:
    params = SamplingParams(**sampling)
    config = SpeculativeDecoderConfig(sampling=params)
    due = SpeculativeDecoder(None, WIDE, config).generate_batch(PREFIXES, 30, seed=11)
    shaped = decoder(shape=SHAPE, sampling=params)
    assert shaped.generate_batch(PREFIXES, 30, seed=11) == due
    assert shaped.metrics.accepted > 0
    chain = decoder(sampling=params)
    chain.generate_batch(PREFIXES, 30, seed=11)
    assert shaped.metrics.mean_acceptance_length > chain.metrics.mean_acceptance_length


def test_every_tree_has_the_shape_as_far_as_there_is_room() -> None:
    trees = TreeBudget.of_shape(SHAPE)
    assert (trees.width, trees.nodes, trees.levels) == (3, 7, 3)
    assert trees.shaped(2) == (0, 0, 0, 1, 1, 2) and trees.shaped(0) == ()
    drafter = ModelDrafter(ProtocolTarget(blurred(WIDE, 2, 0.5)))
    engine = Engine(ProtocolTarget(WIDE), drafter, Emitter(None), trees=trees)
    requests = Requests(engine, depth=3, end_tokens=frozenset())
    params = SamplingParams(max_tokens=20, temperature=0.0)
    (done,) = requests.complete([Request((1,), params, trace=True)])
    for one in done.trace or ():
        assert one.parents == trees.shaped(one.allowed)


@pytest.mark.parametrize("rule", RULES_OF_SHAPES)
def test_the_law_is_the_targets(rule: str) -> None:
    drafter = ModelDrafter(ProtocolTarget(blurred(TARGET, 5, 0.6)))
    trees = TreeBudget.of_shape((0, 0, 1, 1, 2))
    assert chi_square(samples(drafter, rule, 1000, trees), TARGET) < 4.5


@pytest.mark.parametrize("rule", ["hybrid-traversal"])
def test_a_drafter_that_lies_about_its_law_is_found(rule: str) -> None:
    drafter = Liar(ProtocolTarget(blurred(TARGET, 5, 0.6)))
    try:
        distance = chi_square(samples(drafter, rule, 1000, TreeBudget.of_shape((0, 0, 1))), TARGET)
    except AssertionError:
        return
    assert distance > 8


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"shape": (0, 1, 2)}, "is a chain; leave it out and set k=3"),
        ({"shape": ()}, "is a chain"),
        ({"shape": (0, 3)}, "node 1 follows row 3"),
        ({"shape": (0, -1)}, "shape=-1"),
        ({"shape": (0, 0), "width": 2}, "leave width=2"),
        ({"shape": (0, 0), "nodes": 5}, "nodes=5 out"),
        ({"shape": (0,) * 64}, "nodes=64"),
        ({"shape": (0, 0, *range(1, 60))}, "59 nodes have children"),
    ],
)
def test_what_is_no_shape_is_refused(config, said: str) -> None:
    with pytest.raises(InvalidConfig, match=said):
        SpeculativeDecoderConfig(**config)
