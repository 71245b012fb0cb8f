"""The rule of docs/write-a-rule.md: its page runs, and its checks would find it broken."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from outrider.decoding import Draft, Kind, Law, Rule, TargetLaws
from outrider.errors import InvalidConfig
from outrider.tree import TokenTree, full
from tests.decoding.toy_trees import drawn, nobody_left_out, noise_of
from tests.house.layout import ROOT
from tests.house.pages import blocks_of

PAGE = ROOT / "docs" / "write-a-rule.md"
BLOCKS = [block.text for block in blocks_of(PAGE) if block.language == "python"]


def run(source: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "__page__"}
    exec(compile(source, str(PAGE), "exec"), names)
    return names


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    return run("\n".join(BLOCKS))


def broken(wrong: str, right: str, blocks: list[str]) -> str:
    source = "\n".join(blocks)
    assert right in source
    return source.replace(right, wrong)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("tests_BN[at] * q_n <", "tests_BN[at] <"),
        ("left_BV = q.excess(weights_BV)", "left_BV = weights_BV"),
        ("walk.children()[:, 0]", "walk.children()[:, 1]"),
    ],
)
def test_the_page_finds_a_broken_rule(right: str, wrong: str):
    with pytest.raises(AssertionError):
        run(broken(wrong, right, BLOCKS))


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("test(node) * q[x] < p[x]", "test(node) < p[x]"),
        ("drawn_from(excess(p, q)", "drawn_from(p"),
        ("node = children[0]", "node = min(children, key=lambda n: round.tree.tokens[n])"),
    ],
)
def test_the_enumeration_finds_a_broken_reference(right: str, wrong: str):
    """Without any production code: the third and fourth blocks alone."""
    with pytest.raises(AssertionError):
        run(broken(wrong, right, BLOCKS[1:3]))


def test_ragged_trees_and_both_ways_of_walking(page: dict[str, Any]):
    rule: Rule = page["FirstRule"]()
    case = drawn([full(2, 2), (0, 1), (), (0, 0, 0, 2)] * 60, 4, 5)
    verdict = rule.verify(case.draft, case.target, case.noise)
    wanted = [page["first"](round_) for round_ in case.rounds()]
    paths = [tuple(row for row in path if row) for path in verdict.path_BD.tolist()]
    assert paths == [one.path for one in wanted]
    assert verdict.token_B.tolist() == [one.token for one in wanted]
    with nobody_left_out():
        other = rule.verify(case.draft, case.target, case.noise)
    assert torch.equal(verdict.path_BD, other.path_BD)
    assert torch.equal(verdict.token_B, other.token_B)


def test_it_refuses_what_it_cannot_verify(page: dict[str, Any]):
    tree = TokenTree.of([[0, 1]], [[0, 0]])
    draft = Draft(tree, Law.dense(torch.ones(2, 2) / 2), kinds=frozenset({Kind.TAIL}))
    with pytest.raises(InvalidConfig, match="TAIL"):
        page["FirstRule"]().verify(draft, TargetLaws(torch.ones(1, 3, 2) / 2), noise_of(1))


def test_the_page_names_the_files_it_speaks_of():
    text = PAGE.read_text(encoding="utf-8")
    files = set(re.findall(r"`((?:outrider|scripts)/[\w/.]+)`", text)) - {
        "outrider/decoding/rules/first.py"
    }
    assert len(files) >= 3
    assert [name for name in files if not (ROOT / name).exists()] == []
