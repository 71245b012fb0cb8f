"""Combinations: who serves which text, mixed laws in one draft, trees of several drafters."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from outrider import SamplingParams
from outrider.decoding import Draft, Kind, Law
from outrider.drafters import (
    CombinedDrafter,
    Drafter,
    DrafterSpec,
    ModelDrafter,
    NgramDrafter,
    ProtocolDrafter,
    SuffixDrafter,
)
from outrider.drafters.combined import named
from outrider.engine import Emitter, Engine, Requests
from outrider.errors import InvalidConfig
from outrider.models.protocol import ProtocolTarget
from outrider.sequence import Sequence
from outrider.tree import TokenTree, TreeBudget
from outrider.types import Request
from tests.drafters.test_suffix import Draws, text
from tests.engine.test_law import TARGET as LAW_TARGET
from tests.engine.test_law import Liar, chi_square, samples
from tests.engine.test_trees import samples as tree_samples
from tests.engine.toys import blurred

VOCAB = 7


class Says(Drafter):
    """Certain chains, as told."""

    name, certain = "says", True

    def __init__(self, *chains: list[int]) -> None:
        self.chains, self.asked = chains, []

    def propose(self, texts, depths, draws) -> Draft:
        self.asked.append(list(depths))
        told = self.chains or [[]] * len(depths)
        chains = [chain[:depth] for chain, depth in zip(told, depths, strict=True)]
        return Draft(TokenTree.of(chains, [list(range(len(chain))) for chain in chains]), None)


class Draws1(Says):
    """Drawn chains, as told, each node of a law of its own (the uniform one less its number)."""

    name, certain = "draws", False

    def propose(self, texts, depths, draws) -> Draft:
        draft = super().propose(texts, depths, draws)
        rows = draft.tree.tokens_BN.numel()
        law = Law.dense(torch.eye(rows, VOCAB) + 0.1) if rows else None
        return Draft(draft.tree, law, kinds=frozenset({Kind.IID if rows else Kind.POINT}))


def chains(draft: Draft) -> list[list[int]]:
    rows = zip(draft.tree.tokens_BN.tolist(), draft.tree.counts_B.tolist(), strict=True)
    return [row[:count] for row, count in rows]


def test_each_text_gets_the_longest_chain_and_drawing_costs_only_where_it_may_help() -> None:
    certain = Says([1, 2], [], [3, 3, 3], [4])
    other = Says([5], [6], [5, 5, 5], [5, 5])
    drawn = Draws1([0, 0, 0], [1, 1, 1], [2, 2, 2], [])
    both = CombinedDrafter([drawn, certain, other])
    draft = both.propose([text([1], i) for i in range(4)], [3, 3, 3, 3], Draws())
    assert chains(draft) == [[0, 0, 0], [1, 1, 1], [3, 3, 3], [5, 5]]
    assert drawn.asked == [[3, 3, 0, 3]] and certain.asked == [[3, 3, 3, 3]]
    assert other.asked == [[3, 3, 0, 3]], "a full depth is enough"
    assert draft.kinds == {Kind.POINT, Kind.IID} and draft.kinds_BN is not None
    assert draft.kinds_BN[:, 0].tolist() == [Kind.IID, Kind.IID, Kind.POINT, Kind.POINT]
    law = draft.law
    assert law is not None
    for b, drawn_row in ((0, 0), (1, 3)):
        for j in range(3):
            wanted = torch.eye(12, VOCAB)[drawn_row + j] + 0.1
            assert torch.equal(law.probs[draft.law_rows()[b, j]], wanted)


def test_where_the_drawing_one_has_nothing_the_certain_chain_stays() -> None:
    both = CombinedDrafter([Says([1]), Draws1([])])
    draft = both.propose([text([1])], [3], Draws())
    assert chains(draft) == [[1]] and draft.law is None and draft.kinds == {Kind.POINT}
    nothing = both.propose([text([1])], [0], Draws())
    assert nothing.tree.num_nodes == 0


def test_where_one_alone_says_something_its_draft_is_handed_on_under_its_name() -> None:
    certain, drawn = Says([], []), Draws1([4, 5], [])
    both, texts = CombinedDrafter([certain, drawn]), [text([1], i) for i in range(2)]
    draft = both.propose(texts, [2, 2], Draws())
    assert chains(draft) == [[4, 5], []] and draft.kinds == {Kind.IID}
    assert draft.parts()[0].tolist() == [1, 1]
    own = drawn.propose(texts, [2, 2], Draws())
    assert draft.law is not None and own.law is not None
    assert torch.equal(draft.law.probs, own.law.probs)
    assert torch.equal(draft.law_rows(), own.law_rows())
    certain.chains = [[3], []]
    draft = both.propose(texts, [1, 1], Draws())
    assert chains(draft) == [[3], []] and draft.law is None and draft.parts()[0].tolist() == [0]
    certain.chains = [[], []]
    # Of a combination within: its own names follow those of the ones before.
    whole = CombinedDrafter([Says([], []), both])
    assert whole.propose(texts, [2, 2], Draws()).parts()[0].tolist() == [2, 2]
    # And where each of its parts serves a text.
    certain.chains, drawn.chains = [[3], []], [[], [4, 5]]
    draft = whole.propose(texts, [2, 2], Draws())
    assert chains(draft) == [[3], [4, 5]]
    assert draft.parts()[0, 0] == 1 and draft.parts()[1].tolist() == [2, 2]


@pytest.mark.parametrize("each", [True, False])
def test_a_draft_under_another_name_is_the_same_draft(each: bool) -> None:
    own = Draws1([4, 5]).propose([text([1])], [2], Draws())
    ones_BN = torch.ones_like(own.tree.tokens_BN)
    own = replace(
        own, law_rows_BN=own.law_rows(), kinds_BN=own.node_kinds(), worth_BN=ones_BN.double()
    )
    own = replace(own, part_BN=ones_BN) if each else replace(own, part=1)
    found = named(own, 3)
    assert found.parts().tolist() == [[4, 4]]
    others = [one.name for one in fields(Draft) if not one.name.startswith("part")]
    assert len(others) == 6
    assert all(getattr(found, name) is getattr(own, name) is not None for name in others)


def test_what_a_part_thinks_of_its_tokens_is_its_own() -> None:
    """By that a controller would learn when to stop a draft, and it cannot stop a combination."""

    class Sure(Draws1):
        def propose(self, texts, depths, draws) -> Draft:
            draft = super().propose(texts, depths, draws)
            return replace(draft, worth_BN=torch.ones(draft.tree.tokens_BN.shape).double())

    both = CombinedDrafter([Says([]), Sure([4, 5])])
    assert both.propose([text([1])], [2], Draws()).worth_BN is None


def test_a_tree_has_all_paths_the_drawn_one_first() -> None:
    certain, other = Says([1, 2, 3]), Says([1, 4])
    both = CombinedDrafter([certain, Draws1([5, 6]), other])
    draft = both.propose([text([1])], [3], Draws(TreeBudget(2, 63)))
    assert chains(draft) == [[5, 6, 1, 2, 3, 4]]
    assert draft.tree.parents_BN.tolist() == [[0, 1, 0, 3, 4, 3]]
    assert draft.kinds_BN is not None
    assert draft.kinds_BN.tolist() == [[Kind.IID] * 2 + [Kind.POINT] * 4]
    small = both.propose([text([1])], [3], Draws(TreeBudget(2, 3)))
    assert chains(small) == [[5, 6, 1]]


def test_a_drawn_child_and_a_certain_one_of_the_same_token_both_stay() -> None:
    """Leaving one out by what was drawn would make the other's law another one."""
    both = CombinedDrafter([Says([5]), Draws1([5])])
    draft = both.propose([text([1])], [1], Draws(TreeBudget(2, 63)))
    assert chains(draft) == [[5, 5]] and draft.tree.parents_BN.tolist() == [[0, 0]]
    greedy = CombinedDrafter([Says([5]), Says([5, 6])])
    assert chains(greedy.propose([text([1])], [2], Draws(TreeBudget(2, 63)))) == [[5, 6]]


@pytest.mark.parametrize("rule", ["token", "block"])
def test_chains_of_certain_and_drawn_tokens_keep_the_law(rule: str) -> None:
    """By frequency over 1500 texts, some of whose rounds are drafted by one and some by the other;
    the same with a drafter that lies about its law must be found."""
    draft = blurred(LAW_TARGET, 5, 0.6)
    made = CombinedDrafter([NgramDrafter(1, 2), ProtocolDrafter(draft)])
    assert chi_square(samples(made, rule, 1000), LAW_TARGET) < 4.5
    lies = CombinedDrafter([Says(), Liar(draft)])
    assert chi_square(samples(lies, rule, 1000), LAW_TARGET) > 8


class Seen(CombinedDrafter):
    """Counts the drafts of more than one kind."""

    mixed = 0

    def propose(self, texts, depths, draws) -> Draft:
        draft = super().propose(texts, depths, draws)
        self.mixed += len(draft.kinds) > 1
        return draft


@pytest.mark.parametrize("rule", ["recursive", "traversal", "hybrid-traversal", "kseq"])
def test_trees_of_several_drafters_keep_the_law(rule: str) -> None:
    """By frequency; certain nodes stand beside drawn ones where the rule takes both."""
    model = ModelDrafter(ProtocolTarget(blurred(LAW_TARGET, 5, 0.6)))
    made = Seen([SuffixDrafter(longest=2, spec_factor=4.0, min_prob=0.0), model])
    counts = tree_samples(made, rule, 1000, TreeBudget(2, 8))
    assert chi_square(counts, LAW_TARGET) < 4.5
    assert bool(made.mixed) == (rule != "kseq")


def test_what_cannot_be_combined_is_named() -> None:
    with pytest.raises(InvalidConfig, match="1 drafters to combine"):
        CombinedDrafter([SuffixDrafter()])
    for spec, message in (
        ("suffix+sufix", "'sufix' in drafter='suffix.sufix' does not exist.*mean 'suffix'"),
        ("draft,drat", "'drat' in drafter='draft,drat' does not exist; .* a,b.* mean 'draft'"),
        ("draft:./a+b,drat+ngram:x", "no other drafter takes anything"),
        ("drat", "^drafter='drat' does not exist"),
        ("suffix+suffix", "twice"),
        ("none+suffix", "leave it out"),
        ("suffix+", "does not exist"),
        ("suffix:x+draft", "mtp:PATH and bridge:PATH take"),
    ):
        with pytest.raises(InvalidConfig, match=message):
            DrafterSpec.parse_all(spec)


def test_specs_of_several_are_read() -> None:
    read = DrafterSpec.parse_all
    assert read("suffix") == (DrafterSpec("suffix"),)
    assert read("suffix+draft:/a+b/c") == (DrafterSpec("suffix"), DrafterSpec("draft", "/a+b/c"))
    kinds = [one.kind for one in read("draft:/x+recycle+int8")]
    assert kinds == ["draft", "recycle", "int8"]


def test_metrics_name_all_of_them() -> None:
    both = CombinedDrafter([SuffixDrafter(), NgramDrafter()])
    assert both.name == "suffix+ngram" and both.certain and not both.trusted


def test_a_draft_model_keeps_what_the_text_went_on_with() -> None:
    """Beside others' nodes its own chain may be left: the cache follows the text all the same."""
    draft = ProtocolTarget(blurred(LAW_TARGET, 5, 0.5))
    draft.scores_trees = False
    model = ModelDrafter(draft)
    engine = Engine(
        ProtocolTarget(LAW_TARGET),
        CombinedDrafter([SuffixDrafter(min_prob=0.0), model]),
        Emitter(None),
        trees=TreeBudget(3, 12),
    )
    requests = Requests(engine, depth=4, end_tokens=frozenset())
    params = SamplingParams(max_tokens=60, seed=3)
    with requests.running([Request((1, 2, 1, 2, 1), params, rule="recursive")]) as (text,):
        others = kept = 0
        while not text.finished:
            before = text.num_output
            engine.step()
            handle = model._handles.get(text.key)
            if handle is None:
                continue
            committed = draft._texts[handle].committed
            assert committed == text.tokens[: len(committed)]
            kept += len(committed) > before + 5
            others += len(committed) < len(text.tokens) - 1 and text.num_output > before + 1
        assert others, "never was another's node kept: the case is not met"
        assert kept, "what was read of an own node that stayed is read again"


def test_its_parts_are_asked_and_told_what_it_is() -> None:
    told: list[tuple[str, object]] = []

    class Told(NgramDrafter):
        def expect(self, num_prompt: int) -> None:
            told.append(("expect", num_prompt))

        def unread(self, text: Sequence) -> int:
            return 7

        def read(self, text: Sequence, rows: int) -> None:
            told.append(("read", rows))

        def target_changed(self) -> None:
            told.append(("target_changed", None))

    both = CombinedDrafter([SuffixDrafter(), Told()])
    requests = Requests(
        Engine(ProtocolTarget(LAW_TARGET), both, Emitter(None)), depth=2, end_tokens=frozenset()
    )
    text = requests.text(Request((1,), SamplingParams(max_tokens=2)))
    assert both.unread(text) == 7
    both.read(text, 5)
    both.expect(9)
    both.target_changed()
    assert told[-3:] == [("read", 5), ("expect", 9), ("target_changed", None)]
