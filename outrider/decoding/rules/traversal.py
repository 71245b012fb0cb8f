"""`traversal`: a tree is tested from its leaves to its root; of a chain that is `block`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from outrider.decoding.children import Drawing, TailThenTop, Without
from outrider.decoding.draft import Draft, RoundNoise, Verdict
from outrider.decoding.rows import TargetRows
from outrider.decoding.rules.base import Rule, first_rows, round_uniforms
from outrider.decoding.rules.block import BlockRule
from outrider.decoding.rules.residual import Family, Refused, Residuals, by_row
from outrider.decoding.rules.rowwise import Row, Trees
from outrider.tree import TokenTree

_BLOCK = BlockRule()
# Room for what rounding may add to a share that should not grow.
_ROUNDING = 1 + 1e-3


class TraversalRule(Rule):
    """Tests nodes in post-order and keeps the path to the first with `u < a`.

    A node is given `a = min(1, a R(x) / law(x))` by its parent as that stands when the earlier
    siblings and all below them were refused. A refused child leaves its parent
    `Z = max(0, a R - law)`, from which follow `R = norm(Z)` and `a = |Z| / (|Z| + 1 - a)`. The
    root is always kept, and the added token is drawn from R of the node that was. Generalised to
    one law per child; a node's final a depends on no test, which is why it can be known in advance.
    """

    name = "traversal"
    source = "Weng et al., NeurIPS 2025, arXiv 2505.12398"
    trees = True
    reads = "all"
    needs_draft_law = True
    drawing: Drawing = Without()

    def verify(self, draft: Draft, target: TargetRows, noise: RoundNoise) -> Verdict:
        """Node j is tested on stream ACCEPT, index j; the added token is drawn on EXTRA, index 0.

        On a CPU rows are read when the traversal reaches them, elsewhere all are.
        """
        if draft.tree.is_chain:
            return _BLOCK.verify(draft, target, noise)
        self.check(draft)
        draft = draft.to(target.device)
        tests_BN, extra_B = round_uniforms(noise, draft.tree.num_nodes, target.device)
        if target.on_host:
            trees = Trees(draft, target, tests_BN)
            return trees.verdict(_tree_by_tree(trees), extra_B)
        residuals = Residuals(draft, target)
        row_B = _at_once(residuals, draft.tree, target, by_row(tests_BN, target))
        token_B = residuals.draw(first_rows(target) + row_B, extra_B)
        return _verdict(draft.tree, row_B, token_B)


class HybridTraversalRule(TraversalRule):
    """`traversal` of trees whose children are drawn as `hybrid` draws them."""

    name = "hybrid-traversal"
    source = "Weng et al., NeurIPS 2025, arXiv 2505.12398, and Hu et al., ICLR 2025, 2502.18779"
    drawing: Drawing = TailThenTop()


def _tree_by_tree(trees: Trees) -> Iterator[tuple[list[int], Row]]:
    """The path to the row each text stops at, and that row."""
    for root in trees.roots:
        found = _stop(trees, Row(trees, root), [])
        # The root is always kept.
        assert found is not None
        yield found


def _stop(trees: Trees, row: Row, path: list[int]) -> tuple[list[int], Row] | None:
    """Where the traversal stops at or below the row a path leads to; None where it goes on."""
    test = trees.tests[path[-1]] if path else 0.0
    for k, kid in enumerate(row.kids):
        child = row.child(k)
        owed, own = row.ratio(k, child)
        if not trees.kids(kid):
            if trees.tests[kid] * own < owed:
                return [*path, kid], Row(trees, kid)
        elif owed > 0:
            # Where only the law is 0 (a drafter's rounding) any share of the target is more.
            share = min(1.0, owed / own) if own > 0 else 1.0
            found = _stop(trees, Row(trees, kid, share), [*path, kid])
            if found is not None:
                return found
        # The root is sure to be kept, and a node with u beyond its share now will not be.
        may_stop = bool(path) and test < row.share * _ROUNDING
        row.refuse(k, child, may_stop or k + 1 < len(row.kids))
    return (path, row) if not path or test < row.share else None


def _share(family: Family, k_n: Tensor) -> Tensor:
    """The share that each row gives to its child of rank k."""
    owed_n, own_n = family.ratio(k_n)
    # Where only the law is 0 (a drafter's rounding) any share of the target is endlessly more.
    return torch.where(own_n > 0, owed_n / own_n, (owed_n > 0).double()).clamp(max=1)


def _at_once(residuals: Residuals, tree: TokenTree, target: TargetRows, tests_R: Tensor) -> Tensor:
    """The row each text stops at, found from the shares of all nodes; the host reads nothing.

    Nodes stand behind their parents and earlier siblings, so that one after another, node j of
    every tree at once, they find what they need.
    """
    first_B, real_BN = first_rows(target), tree.is_node()
    ranks_BN = tree.ranks().clamp(max=residuals.width - 1)
    for j in range(tree.num_nodes):
        at_B, ranks_B, real_B = first_B + tree.parents_BN[:, j], ranks_BN[:, j], real_BN[:, j]
        probs_BV, family = target.probs(at_B), residuals.family(at_B)
        family.enter_some(real_B & (ranks_B == 0), probs_BV)
        share_B = _share(family, ranks_B)
        family.refuse(ranks_B, Refused(real_B, real_B), probs_BV)
        family.save()
        residuals.share_R[first_B + j + 1] = torch.where(real_B, share_B, 0)
    passed_BT = (tests_R < residuals.share_R).view(len(first_B), -1)
    return _first_in_post_order(tree, passed_BT)


def _first_in_post_order(tree: TokenTree, passed_BT: Tensor) -> Tensor:
    """The first row that passed, children in their order before the row they hang from."""
    children_BTW = tree.children()
    size = children_BTW.shape
    passed_BT = passed_BT & torch.nn.functional.pad(tree.is_node(), (1, 0), value=True)

    def of_children(marks_BT: Tensor) -> Tensor:
        marks_BTW = marks_BT.gather(1, children_BTW.flatten(1)).view(size)
        return marks_BTW & (children_BTW > 0)

    inside_BT = passed_BT
    for _ in range(tree.depth):
        inside_BT = passed_BT | of_children(inside_BT).any(2)
    ways_BTW = of_children(inside_BT)
    first_BT1 = ways_BTW.byte().argmax(2, keepdim=True)
    # Each row's first child with a passed row at or below it; itself where there is none.
    here_BT = torch.arange(size[1], device=passed_BT.device).expand(size[:2])
    next_BT = children_BTW.gather(2, first_BT1).squeeze(2)
    next_BT = torch.where(ways_BTW.any(2), next_BT, here_BT)
    row_B1 = torch.zeros_like(tree.counts_B)[:, None]
    for _ in range(tree.depth):
        row_B1 = next_BT.gather(1, row_B1)
    return row_B1.squeeze(1)


def _verdict(tree: TokenTree, row_B: Tensor, token_B: Tensor) -> Verdict:
    """The path to one row of each tree."""
    parents_BT = torch.nn.functional.pad(tree.parents_BN, (1, 0))
    depth_B1 = tree.depths().gather(1, row_B[:, None])
    path_BD = row_B.new_zeros(len(row_B), tree.depth)
    at_B1 = row_B[:, None]
    for level in range(tree.depth, 0, -1):
        here_B1 = depth_B1 >= level
        path_BD[:, level - 1 : level] = torch.where(here_B1, at_B1, 0)
        at_B1 = torch.where(here_B1, parents_BT.gather(1, at_B1), at_B1)
    return Verdict(depth_B1.squeeze(1), token_B, path_BD)
