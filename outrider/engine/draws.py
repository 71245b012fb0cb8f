"""The round's draws: drafters hand in logits or tokens, the laws they came from are kept."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Sequenced
from functools import lru_cache

import torch
from torch import Tensor

from outrider import host, noise
from outrider.decoding import Draft, Draws, Kind, Law, RoundNoise, check_logits
from outrider.decoding.best import grow_best
from outrider.decoding.grow import clipped, grow
from outrider.decoding.laws import likeliest, one_table, softmax
from outrider.drafters.base import ExpandNodes, Node
from outrider.engine.group import Group
from outrider.engine.places import Places, path_to
from outrider.tree import TokenTree


class GroupDraws:
    """Draws drafted tokens for one group and round; implements `drafters.base.RoundDraws`."""

    def __init__(
        self,
        group: Group,
        noise_B: RoundNoise,
        vocab_size: int,
        expect: Callable[[int, Tensor], None] | None = None,
    ) -> None:
        self.trees = group.trees
        self._expect = expect
        self.followed = group.followed
        self._draws = Draws(group.rule, noise_B)
        self._noise = noise_B
        self._controls = group.controls
        self._width = vocab_size
        self._rule = group.rule
        num_texts = len(group.texts)
        self._tokens: list[list[int]] = [[] for _ in range(num_texts)]
        # Each with the tokens its columns stand for; None = all.
        self._laws: list[list[tuple[Tensor, Tensor | None]]] = [[] for _ in range(num_texts)]
        # Tokens of a text that the host has not read.
        self._unread: dict[int, list[Tensor]] = {}

    @property
    def max_certain(self) -> int:
        """Nodes that a tree of certain tokens may have; 0 where only chains are verified."""
        return self.trees.nodes if self.trees and Kind.POINT in self._rule.kinds else 0

    def sample(
        self,
        logits_nV: Tensor,
        members: Sequenced[int],
        index: int,
        ids_V: Tensor | None = None,
    ) -> list[int]:
        """Draws drafted token `index` of the `members`-th texts and keeps its law.

        A row that is no law (NaN) is drafted from as if uniform, greedily any token from it: a bad
        guess costs speed only.
        """
        tokens = self._drawn_of(logits_nV, members, index, ids_V).tolist()
        for member, token in zip(members, tokens, strict=True):
            self._tokens[member].append(token)
        return tokens

    @property
    def may_wait(self) -> bool:
        """Where no control looks at the tokens before."""
        return not self._controls.act

    def draw_unread(self, logits_1V: Tensor, member: int, index: int) -> Tensor:
        """The same of one text, the token left where it is."""
        token_1 = self._drawn_of(logits_1V, [member], index, None)
        self._unread.setdefault(member, []).append(token_1)
        return token_1

    def read_drawn(self, member: int) -> list[int]:
        """One wait for all; meanwhile the target may go ahead."""
        tokens_K = torch.cat(self._unread.pop(member))
        reading = host.Reading((tokens_K,))
        self.expect(member, tokens_K)
        self._tokens[member] += reading.wait()[0].tolist()
        return self._tokens[member]

    def expect(self, member: int, tokens_K: Tensor) -> None:
        """Tells the target of a text's drafted tokens, which nobody has read."""
        if self._expect is not None:
            self._expect(member, tokens_K)

    def _drawn_of(
        self, logits_nV: Tensor, members: Sequenced[int], index: int, ids_V: Tensor | None
    ) -> Tensor:
        """Tokens `[n]`, whose laws are kept where the rule needs them."""
        paths = [self._tokens[member] for member in members]
        logits_nV = self._adjusted(logits_nV, members, paths, ids_V)
        if not self._rule.needs_probs:
            best_n = likeliest(logits_nV)
            return best_n if ids_V is None else ids_V[best_n]
        law = self._controls.law(_sound(logits_nV), members)
        few_nM, ids_n = law.ids, [ids_V] * len(members)
        if few_nM is None:
            law = law_of(law.probs, ids_V)
        else:
            few_nM = few_nM if ids_V is None else ids_V[few_nM]
            law, ids_n = Law.sparse(few_nM, law.probs), list(few_nM)
        for member, probs_M, ids_M in zip(members, law.probs, ids_n, strict=True):
            self._laws[member].append((probs_M, ids_M))
        return self._draws.draw(law, index, torch.tensor(members))

    def _adjusted(
        self,
        logits_nV: Tensor,
        members: Sequenced[int],
        paths: Sequenced[Sequenced[int]],
        ids_V: Tensor | None,
    ) -> Tensor:
        """Rows of the target's width, or of some of its tokens, under the requests' controls."""
        if ids_V is not None:
            if not self._controls.act:
                return logits_nV
            whole_nV = logits_nV.new_full((len(logits_nV), self._width), -torch.inf)
            whole_nV[:, ids_V] = logits_nV
            return self._controls.adjusted(whole_nV, Places(members, paths))[:, ids_V]
        missing = self._width - logits_nV.shape[-1]
        if missing > 0:
            logits_nV = torch.nn.functional.pad(logits_nV, (0, missing), value=-torch.inf)
        logits_nV = logits_nV[:, : self._width]
        return self._controls.adjusted(logits_nV, Places(members, paths))

    def grown(
        self,
        roots_nV: Tensor,
        depths: Sequenced[int],
        expand: ExpandNodes,
        ids_V: Tensor | None = None,
    ) -> Draft:
        """Trees, the drafter being asked level by level; see `drafters.base.RoundDraws`."""
        assert self.trees is not None, "the group drafts chains"
        growing = _Growing(self, roots_nV, depths, expand, ids_V)
        depths_B, deepest = torch.tensor(list(depths)), max(depths, default=0)
        shape = self.trees.shaped(deepest)
        if shape is None and self._draws.drawing.ranked:
            return grow_best(self._draws, self.trees, depths_B, growing.expand)
        shape = self.trees.paths(deepest) if shape is None else shape
        return clipped(grow(self._draws, shape, growing.expand), depths_B)

    def laws_of(
        self,
        logits_nV: Tensor,
        members: Sequenced[int],
        paths: Sequenced[Sequenced[int]],
        ids_V: Tensor | None = None,
    ) -> Tensor:
        """The laws `[n, V]` that children of some rows are drawn from, and judged by.

        `paths` are the drafted tokens before each row. Where the text is greedy the likeliest come
        first, whatever the temperature.
        """
        logits_nV = _sound(self._adjusted(logits_nV, members, paths, ids_V))
        if not self._rule.needs_probs:
            return softmax(logits_nV.float())
        return self._controls.probs(logits_nV, members)

    def point_trees(
        self, tokens: Sequenced[Sequenced[int]], parents: Sequenced[Sequenced[int]]
    ) -> Draft:
        """A draft of certain trees."""
        return Draft(TokenTree.of(tokens, parents), None)

    def drawn(self) -> Draft:
        """The chains sampled this round and, where the rule needs them, their laws."""
        lengths, tokens_BK = _padded(self._tokens)
        if not self._rule.needs_probs or tokens_BK.shape[1] == 0:
            return Draft.chain(tokens_BK, lengths, None)
        return Draft.chain(tokens_BK, lengths, self._stacked(tokens_BK.shape[1]))

    def _stacked(self, depth: int) -> Law:
        """All laws in the layout of chains, sparse where all are."""
        kept = [law for laws in self._laws for law in laws]
        probs_V, ids_V = kept[0]
        alike = all(ids is ids_V for _, ids in kept)
        # Of a token that was not drafted.
        none_1 = probs_V.new_zeros(1)
        filler = (torch.zeros_like(probs_V), ids_V) if alike else (none_1, none_1.long())
        rows = [row for laws in self._laws for row in [*laws, *[filler] * (depth - len(laws))]]
        if alike:
            return law_of(torch.stack([row_V for row_V, _ in rows]), ids_V)
        return one_table([Law(row[None], None if ids is None else ids[None]) for row, ids in rows])

    def points(self, tokens: Sequenced[Sequenced[int]]) -> Draft:
        """A draft of certain tokens."""
        if not any(tokens):
            return _nothing(len(tokens))
        lengths, tokens_BK = _padded(tokens)
        return Draft.chain(tokens_BK, lengths, None)

    def trusted(
        self, tokens: Sequenced[Sequenced[int]], logprobs: Sequenced[Sequenced[Tensor] | None]
    ) -> Draft:
        """A foreign drafter's chains; a text whose laws are None drafted point masses."""
        if all(rows is None for rows in logprobs) or not self._rule.needs_probs:
            return self.points(tokens)
        for member, (chain, rows) in enumerate(zip(tokens, logprobs, strict=True)):
            self._tokens[member] = list(chain)
            for i, token in enumerate(chain):
                point = torch.zeros(self._width, dtype=torch.float64)
                point[token] = 1.0
                self._laws[member].append((point if rows is None else rows[i].exp(), None))
        return self.drawn()

    def rng(self, member: int) -> StreamRng:
        """Uniforms of the draft stream, one after another."""
        return StreamRng(self._noise, member)


class _Growing:
    """A drafter's rows, asked for by their place in the trees so far.

    The drafter numbers the rows it has read of each text in their order; the text as it stands is
    number 0.
    """

    def __init__(
        self,
        draws: GroupDraws,
        roots_nV: Tensor,
        depths: Sequenced[int],
        expand: ExpandNodes,
        ids_V: Tensor | None,
    ) -> None:
        members = [b for b, depth in enumerate(depths) if depth > 0]
        self._draws, self._depths, self._ask = draws, depths, expand
        self._ids_V = ids_V
        self._numbers: list[dict[int, int]] = [{0: 0} for _ in depths]
        laws_nV = draws.laws_of(roots_nV, members, [()] * len(members), ids_V)
        # A text that drafts nothing gets some law; nothing is drawn from it that stays.
        self._laws_RV = laws_nV
        self._root = [members.index(b) if b in members else 0 for b in range(len(depths))]

    def expand(self, tree: TokenTree, rows_BL: Tensor) -> Law:
        """The laws after some rows, the root's where a row is none or lies too deep."""
        if tree.depth == 0:
            return law_of(self._laws_RV[self._root], self._ids_V)
        tokens, parents = tree.tokens_BN.tolist(), tree.parents_BN.tolist()
        nodes: list[Node] = []
        paths: list[tuple[int, ...]] = []
        places: list[int] = []
        for b, rows in enumerate(rows_BL.tolist()):
            for row in rows:
                if row == 0 or tree.depth >= self._depths[b]:
                    places.append(self._root[b])
                    continue
                number = self._numbers[b]
                parent = number[parents[b][row - 1]]
                number[row] = len(number)
                places.append(len(self._laws_RV) + len(nodes))
                nodes.append(Node(b, tokens[b][row - 1], parent))
                paths.append(path_to(row, tokens[b], parents[b]))
        if not nodes:
            return law_of(self._laws_RV[places], self._ids_V)
        members = [node.member for node in nodes]
        laws_nV = self._draws.laws_of(self._ask(nodes), members, paths, self._ids_V)
        return law_of(torch.cat((self._laws_RV, laws_nV))[places], self._ids_V)


class StreamRng:
    """`uniform()` over one text's draft stream of one round."""

    def __init__(self, noise_B: RoundNoise, member: int) -> None:
        self._address = (
            noise_B.seed_B[member],
            noise_B.sample_B[member],
            noise.STREAM_DRAFT,
            noise_B.anchor_B[member],
        )
        self._next = 0

    def uniform(self) -> float:
        """The next number in (0, 1), of 53 bits."""
        value = noise.uniforms53(*self._address, self._next)
        self._next += 1
        return float(value)


def law_of(probs_nV: Tensor, ids_V: Tensor | None) -> Law:
    """Laws over the vocabulary, or over the tokens that the columns stand for."""
    return Law(probs_nV, None if ids_V is None else ids_V.expand(len(probs_nV), -1))


def _sound(logits_nV: Tensor) -> Tensor:
    """The rows, those that are no law replaced by uniform ones."""
    usable_n1 = check_logits(logits_nV)[:, None]
    if host.reads_free(logits_nV.device) and usable_n1.all():
        return logits_nV
    return logits_nV.masked_fill(~usable_n1, 0.0)


@lru_cache(maxsize=256)
def _nothing(num_texts: int) -> Draft:
    """A draft of nothing, which all rounds of as many texts share."""
    lengths, tokens_B0 = _padded([()] * num_texts)
    return Draft.chain(tokens_B0, lengths, None)


def _padded(tokens: Sequenced[Sequenced[int]]) -> tuple[Tensor, Tensor]:
    """Lengths `[B]` and tokens `[B, K]`, padded with 0."""
    lengths = tuple([len(chain) for chain in tokens])
    depth = max(lengths, default=0)
    rows = [[*chain, *[0] * (depth - len(chain))] for chain in tokens]
    tokens_BK = torch.tensor(rows, dtype=torch.int64, device="cpu")
    return _counts(lengths), tokens_BK if depth else tokens_BK.reshape(len(rows), 0)


@lru_cache(maxsize=256)
def _counts(lengths: tuple[int, ...]) -> Tensor:
    """Lengths `[B]`, which all drafts of these lengths share."""
    return torch.tensor(lengths, dtype=torch.int64, device="cpu")
