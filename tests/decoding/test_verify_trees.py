"""Verification of trees as a function: what comes back, its law, a typed error per mistake."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from outrider import errors
from outrider.decoding import RULES, verify_token_trees
from outrider.decoding.sampling import gumbel_race
from outrider.noise import as_key

TEXTS = [[7, 8], [9], []]
TOKENS = [[1, 2, 0], [2], []]
PARENTS = [[0, 0, 1], [0], []]


def one_hot(*rows: list[int]) -> torch.Tensor:
    return torch.eye(3, dtype=torch.float64)[torch.tensor(rows)]


TARGET = one_hot([1, 0, 2, 2], [0, 1, 1, 1], [2, 0, 0, 0])


@pytest.mark.parametrize("rule", ["greedy", "match", "coupled", "recursive", "traversal"])
def test_what_comes_back(rule: str):
    """Text 0 keeps 1 and 0 and gains 2; text 1 refuses 2 and gains 0; text 2 had no draft."""
    done = verify_token_trees(TEXTS, TOKENS, PARENTS, TARGET, seed=1, rule=rule)
    assert done.num_accepted.tolist() == [2, 0, 0]
    assert done.accepted_tokens == [[1, 0], [], []]
    assert done.paths == [[0, 2], [], []]
    assert done.bonus_token.tolist() == [2, 0, 2]
    assert done.updated_tokens.tolist() == [[7, 8, 1, 0, 2], [9, 0, 0, 0, 0], [2, 0, 0, 0, 0]]
    assert done.lengths.tolist() == [5, 2, 1]
    assert len(done) == 3
    assert done.updated_tokens.dtype == torch.int64


LEVEL = torch.full((3, 3, 3), 1 / 3, dtype=torch.float64)


def test_every_round_adds_a_token():
    """Where everything is refused the text still grows: no round without progress."""
    target = one_hot([0, 0, 0, 0]).expand(3, 4, 3)
    done = verify_token_trees(TEXTS, [[1, 2, 0], [2], []], PARENTS, target, seed=1)
    assert (done.lengths - torch.tensor([2, 1, 0])).tolist() == [1, 1, 1]


def test_no_text_at_all():
    done = verify_token_trees([], [], [], torch.ones(0, 1, 3), seed=0)
    assert len(done) == 0
    assert done.updated_tokens.shape == (0, 0)


def test_arrays_and_lists_decide_alike():
    draft = torch.full((3, 3, 3), 1 / 3, dtype=torch.float64)
    arguments = {"seed": 4, "rule": "recursive", "drawn": "iid"}
    target = torch.softmax(torch.randn(3, 4, 3, generator=torch.Generator().manual_seed(1)), -1)
    made = [
        verify_token_trees(
            [np.array(text, dtype=np.int64) for text in TEXTS],
            [np.array(row, dtype=np.int32) for row in TOKENS],
            [as_(torch.tensor(row, dtype=torch.int64)) for row in PARENTS],
            as_(target),
            draft_probs=as_(draft.float()),
            **arguments,
        )
        for as_ in (lambda x: x, lambda x: x.numpy(), lambda x: x.tolist())
    ]
    assert made[0].updated_tokens.tolist() == made[1].updated_tokens.tolist()
    assert made[0].updated_tokens.tolist() == made[2].updated_tokens.tolist()


def test_parents_may_be_one_array():
    both = [
        verify_token_trees([[1]], [[0, 1]], parents, np.full((1, 3, 2), 0.5), seed=1)
        for parents in ([[0, 0]], np.array([[0, 0]]))
    ]
    assert both[0].updated_tokens.tolist() == both[1].updated_tokens.tolist()


@pytest.mark.parametrize(
    ("rule", "drawn"),
    [("match", "certain"), ("recursive", "iid"), ("recursive", "without"), ("kseq", "iid")],
)
def test_the_next_token_has_the_targets_law(rule: str, drawn: str):
    """Two children of each text; what is written first is distributed as the target."""
    rounds = 6000
    p = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    q = p.flip(0)
    chance = torch.Generator().manual_seed(3)
    if drawn == "certain":
        tokens = [[0, 1]] * rounds
    else:
        tokens = torch.multinomial(
            q.expand(rounds, 4), 2, replacement=drawn == "iid", generator=chance
        ).tolist()
    done = verify_token_trees(
        [[5]] * rounds,
        tokens,
        [[0, 0]] * rounds,
        p.expand(rounds, 3, 4),
        seed=8,
        rule=rule,
        draft_probs=None if drawn == "certain" else q.expand(rounds, 2, 4),
        drawn=drawn,
    )
    seen = torch.bincount(done.updated_tokens[:, 1], minlength=4) / rounds
    assert float((seen - p).abs().max()) < 5 * 0.5 / math.sqrt(rounds)
    assert float((seen - q).abs().max()) > 5 * 0.5 / math.sqrt(rounds)


def test_coupled_is_plain_sampling_with_the_seed():
    p = torch.softmax(torch.randn(40, 2, 5, generator=torch.Generator().manual_seed(2)), -1)
    done = verify_token_trees(
        [[0] * (b % 3) for b in range(40)],
        [[b % 5] for b in range(40)],
        [[0]] * 40,
        p,
        seed=3,
        rule="coupled",
    )
    lengths = torch.arange(40) % 3
    own = gumbel_race(p[:, 0], None, as_key([3] * 40), torch.arange(40), lengths)
    assert done.updated_tokens.gather(1, lengths[:, None]).squeeze(1).tolist() == own.tolist()


@pytest.mark.parametrize("rule", [name for name, rule in RULES.items() if not rule.trees])
def test_rules_for_chains_say_so(rule: str):
    with pytest.raises(errors.InvalidConfig, match=f"{rule}.*chains"):
        verify_token_trees(TEXTS, TOKENS, PARENTS, TARGET, seed=1, rule=rule)


@pytest.mark.parametrize(
    ("error", "match", "changed"),
    [
        (errors.DraftShapeMismatch, "stand before it", {"parents": [[0, 3, 1], [0], []]}),
        (errors.DraftShapeMismatch, "one parent row per token", {"parents": [[0, 0], [0], []]}),
        (errors.DraftShapeMismatch, "one of each per text", {"texts": [[1]]}),
        (errors.TargetShapeMismatch, "one row more", {"target_probs": TARGET[:, :3]}),
        (errors.TokenOutOfRange, r"0\.\.2", {"draft_tokens": [[1, 3, 0], [2], []]}),
        (errors.NonFinite, "target_probs", {"target_probs": TARGET * math.nan}),
        (errors.DegenerateDistribution, r"\(0, 0\) has mass 0;", {"target_probs": TARGET * 0}),
        (
            errors.DegenerateDistribution,
            r"draft_probs row \(0, 0\) has mass 3; a law sums to one",
            {"draft_probs": torch.ones(3, 3, 3), "drawn": "iid", "rule": "recursive"},
        ),
        (errors.InvalidConfig, "did you mean 'match'", {"rule": "mtach"}),
        (errors.InvalidConfig, "lossless=False", {"rule": "lenience"}),
        (errors.InvalidConfig, "seed=-1", {"seed": -1}),
        (errors.InvalidConfig, "certain, iid, without", {"drawn": "tail"}),
        (errors.InvalidConfig, "draft_probs missing", {"drawn": "iid"}),
        (errors.InvalidConfig, "draft_probs given", {"draft_probs": TARGET[:, :3]}),
        (errors.InvalidConfig, "integer dtype", {"draft_tokens": [[1.0, 2.0, 0.0], [2], []]}),
        (
            errors.DistributionWidthMismatch,
            "covers 4",
            {"draft_probs": torch.ones(3, 3, 4), "drawn": "iid"},
        ),
        (
            errors.InvalidConfig,
            "does not verify nodes drawn WITHOUT",
            {"draft_probs": LEVEL, "drawn": "without", "rule": "kseq"},
        ),
        (
            errors.InvalidConfig,
            "tree 0, node 1 are not those of its first sibling",
            {
                "draft_probs": LEVEL * 0.9 + 0.1 * one_hot([0, 1, 2]),
                "drawn": "iid",
                "rule": "recursive",
            },
        ),
    ],
)
def test_mistakes_are_named(error: type[Exception], match: str, changed: dict):
    arguments = {
        "texts": TEXTS,
        "draft_tokens": TOKENS,
        "parents": PARENTS,
        "target_probs": TARGET,
        "seed": 1,
        **changed,
    }
    with pytest.raises(error, match=match):
        verify_token_trees(**arguments)
