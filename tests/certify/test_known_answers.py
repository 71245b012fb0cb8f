"""What the first load asks has the references' answers, away from any threshold."""

from __future__ import annotations

import math

import pytest
import torch

from outrider import noise
from outrider.certify import tree_paths
from outrider.certify.paths import MARGIN, Watched
from outrider.certify.reference import Noise
from outrider.certify.reference_trees import DraftedTree, TreeRound
from outrider.certify.tree_paths import Readings
from outrider.certify.vectors import rule_of_tree
from outrider.decoding import RULES, Kind, known_answers


def referred(rule: str) -> tuple[str, float]:
    """The answer by the reference, and how near a decision came to its threshold."""
    draft, target, chance = known_answers.rounds(rule)
    assert draft.law is not None and draft.law_rows_BN is not None
    laws, rows = draft.law.probs.double(), draft.law_rows_BN.tolist()
    readings = Readings(chance, draft.tree.num_nodes, known_answers.WIDTH)
    name, answers, met = rule_of_tree(rule), list[str](), list[float]()
    for b in range(known_answers.TEXTS):
        tokens, parents = draft.tree.tokens_BN[b].tolist(), draft.tree.parents_BN[b].tolist()
        tree = DraftedTree(
            tokens, parents, [laws[row].tolist() for row in rows[b]], [Kind.IID] * len(tokens)
        )
        p = target.probs(torch.arange(len(tokens) + 1) + b * (len(tokens) + 1)).double().tolist()
        plain = readings.noise(b)
        found = tree_paths.reference_of(name)(TreeRound(tree, p, plain))
        watched = Noise(
            lambda i, of=plain: Watched(of.test(i), met),
            lambda i, of=plain: Watched(of.extra(i), met),
            plain.draft,
            race=plain.race,
        )
        tree_paths.reference_of(name)(TreeRound(tree, p, watched))
        if name == "greedy":
            met.extend(1.0 for row in p if len(set(row)) == len(row))
        answers.append(f"{'-'.join(map(str, found.path))}:{found.token}")
    return " ".join(answers), min(met, default=math.inf)


@pytest.mark.parametrize("rule", known_answers.ANSWERS)
def test_the_references_answer_so(rule: str) -> None:
    answer, margin = referred(rule)
    assert answer == known_answers.ANSWERS[rule]
    assert margin >= MARGIN


def test_every_exact_rule_is_asked() -> None:
    exact = {name for name, rule in RULES.items() if rule.guarantee != "lossy"}
    assert set(known_answers.ANSWERS) == exact
    assert known_answers.fault() is None
    for answers in known_answers.ANSWERS.values():
        # Kept, refused at once, and kept in part.
        assert {answer.partition(":")[0].count("-") for answer in answers.split()} >= {0, 1} or (
            len(set(answers.split())) > 5
        )


def test_each_other_rule_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, other in (("token", "match"), ("block", "token"), ("recursive", "traversal")):
        with monkeypatch.context() as patched:
            patched.setitem(RULES, name, RULES[other])
            assert known_answers.fault() == f"rules: {name} decided otherwise than proved"


def test_what_torch_raises_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(known_answers.noise, "philox4x32", broken)
    assert known_answers.fault() == "noise: RuntimeError: no such kernel"
    monkeypatch.undo()
    monkeypatch.setattr(known_answers, "processed_probs", lambda *_: torch.full((1, 6), 1 / 6))
    fault = known_answers.fault()
    assert fault is not None and fault.startswith("laws: ")


def test_what_the_caller_has_set_has_no_part_in_it() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"), torch.autocast("cpu", dtype=torch.bfloat16), noise.NoiseLedger():
            assert known_answers.fault() is None
            assert torch.get_default_dtype() is torch.bfloat16
    finally:
        torch.set_default_dtype(before)
