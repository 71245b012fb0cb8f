"""Texts in which nothing that was guessed is kept, so that there is a guess behind every token.

One such text tells what any draft length would have done with it: the walk of a policy from token
to token finds a guess wherever it comes to stand. Under `greedy` and
`coupled` the text is that of plain decoding; under rules in law it is one of the same law. Its seed
alone says which, so that several drafters can be observed at one text.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

import torch
from torch import Tensor

from outrider.decoding import RULES, Draft, RoundNoise, Rule, TargetRows, Verdict, rule_named
from outrider.decoding.laws import Law
from outrider.drafters.base import Drafter
from outrider.drafters.stop import Stop

NAME = "observed"
"""What wrapped rules are registered as meanwhile, each with a number of its own."""
_NUMBERS = count()
_WORD = (1 << 64) - 1


class Observed(Rule):
    """A rule that keeps no drafted token, and notes which the rule it wraps would have kept."""

    def __init__(self, rule: Rule) -> None:
        self.rule, self.name = rule, f"{NAME}-{next(_NUMBERS)}"
        self.source, self.guarantee, self.trees = rule.source, rule.guarantee, rule.trees
        self.kinds, self.reads, self.drawing = rule.kinds, rule.reads, rule.drawing
        self.needs_probs, self.needs_draft_law = rule.needs_probs, rule.needs_draft_law
        self._would: dict[tuple[int, int, int], tuple[int, ...]] = {}

    def draw(self, law: Law, noise_n: RoundNoise, index: int) -> Tensor:
        """As the rule draws."""
        return self.rule.draw(law, noise_n, index)

    def verify(self, draft: Draft, target: TargetRows, noise: RoundNoise) -> Verdict:
        """What the rule says of no draft at all."""
        would = self.rule.verify(draft, target, noise)
        paths = zip(would.path_BD.tolist(), would.num_accepted_B.tolist(), strict=True)
        keys = zip(*(part.tolist() for part in _address(noise)), strict=True)
        for key, (path, kept) in zip(keys, paths, strict=True):
            self._would[key] = tuple(path[:kept])
        tokens_BN = draft.tree.tokens_BN
        none_B = torch.zeros_like(draft.tree.counts_B)
        plain = self.rule.verify(Draft.chain(tokens_BN[:, :0], none_B, None), target, noise)
        return Verdict.of_chain(torch.zeros_like(plain.num_accepted_B), plain.token_B, 0)

    def would(self, seed: int, position: int, sample: int = 0) -> tuple[int, ...]:
        """The rows that the rule would have kept in the round at a position of a text."""
        signed = (seed & _WORD) - (1 << 64 if seed & 1 << 63 else 0)
        return self._would[signed, sample, position]


@contextmanager
def observing(
    rule: str, drafter: Drafter | None = None, *, lossless: bool = True
) -> Iterator[Observed]:
    """A rule under a name of its own, which requests can ask for meanwhile.

    Of greedy texts `drafter` says meanwhile how sure it is of each token: a controller ends drafts
    by that, and so does a replayed one.

    Raises:
        InvalidConfig: an unknown rule, or a lossy one that is not asked for.
    """
    observed = Observed(rule_named(rule, lossless=lossless))
    asked = None if rule != "greedy" else drafter
    before = None if asked is None else asked.stop
    RULES[observed.name] = observed
    try:
        if asked is not None:
            asked.stop = Stop()
        yield observed
    finally:
        if asked is not None:
            asked.stop = before
        del RULES[observed.name]


def _address(noise: RoundNoise) -> tuple[Tensor, Tensor, Tensor]:
    return noise.seed_B, noise.sample_B, noise.anchor_B
