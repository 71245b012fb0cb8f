"""Rounds as they were verified: what the shipped rule makes of the rows it was given, exactly.

A rule is wrapped while some texts are made, and keeps what it is handed. Each row of a round is
then put to it again by itself, with the tokens the draft could have drawn and the uniforms where it
changes its mind; so the law of what it writes there is known without any sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from outrider.certify.model.book import Book, Text, set_controls, without
from outrider.certify.model.plan import asked
from outrider.certify.model.report import Check, Verdict
from outrider.config import SamplingParams
from outrider.decoding import RULES, Draft, RoundNoise, Rule, TargetLaws, TargetRows
from outrider.decoding import Verdict as Decision
from outrider.decoding.draft import Kind
from outrider.decoding.laws import Law
from outrider.decoding.rules.base import ChainRejection

CHECK = "captured rows"
NAME = "captured"
"""What the wrapped rule is registered as, meanwhile."""
STEPS = 2**24
"""Uniforms of accept tests are multiples of 1 / STEPS."""
CHAINS = 64
"""Chains that are put to a rule at once."""
ROWS = 16
"""Positions that are looked at."""
ASKED = 256
"""Tokens that a rule is asked about at a position, the draft's likeliest."""
EXACT = 1e-3
"""Total variation that arithmetic in float32 stays below, on rows that are given."""
LIKELY = 1e-3
"""Chance from which on a token's log-probability says something about rounding."""
APART = 4.0
"""A rule's rows may be so many times as far from the book's as the book's are from themselves."""


@dataclass(frozen=True, slots=True)
class Row:
    """One position of a round.

    Attributes:
        text: the prompt, and what stood before the position, with any token behind it.
        p_V, q_V: the target's and the draft's law, as the rule had them.
    """

    text: Text
    p_V: Tensor
    q_V: Tensor


@dataclass(frozen=True, slots=True)
class Capture:
    """What rules were given, and the rule itself."""

    rule: ChainRejection
    rows: tuple[Row, ...]


Capturing: TypeAlias = Callable[[Sequence[Sequence[int]], SamplingParams, int], "Capture | None"]
"""`(prompts, params, seed)` -> the rounds of their texts; None where the rule has none to show."""


@dataclass(frozen=True, slots=True)
class Seen:
    """One text's part in one round: whose, how long it was, and the rows."""

    seed: int
    anchor: int
    tokens: tuple[int, ...]
    p_TV: Tensor
    q_KV: Tensor


class Watched(Rule):
    """A rule of chains that keeps what it is handed; it decides as it always does."""

    name = NAME
    source = "the rule that it wraps"
    needs_draft_law = True

    def __init__(self, rule: ChainRejection) -> None:
        self.rule = rule
        self.kinds, self.reads, self.drawing = rule.kinds, rule.reads, rule.drawing
        self.seen: list[Seen] = []

    def draw(self, law: Law, noise_n: RoundNoise, index: int) -> Tensor:
        """As the rule draws."""
        return self.rule.draw(law, noise_n, index)

    def verify(self, draft: Draft, target: TargetRows, noise: RoundNoise) -> Decision:
        """As the rule decides."""
        num_texts, num_rows, vocab = target.shape
        for b in range(num_texts):
            depth = int(draft.tree.counts_B[b])
            tokens_K = draft.tree.tokens_BN[b, :depth]
            p_TV = target.probs(b * num_rows + torch.arange(depth + 1)).clone()
            q_KV = torch.nn.functional.one_hot(tokens_K, vocab).to(p_TV.dtype)
            if draft.law is not None:
                law_KV = draft.law.select(draft.law_rows()[b, :depth]).table(vocab)
                certain_K1 = (draft.node_kinds()[b, :depth] == Kind.POINT)[:, None]
                q_KV = torch.where(certain_K1, q_KV.to(law_KV.dtype), law_KV)
            seed, anchor = int(noise.seed_B[b]), int(noise.anchor_B[b])
            self.seen.append(Seen(seed, anchor, tuple(tokens_K.tolist()), p_TV, q_KV))
        return self.rule.verify(draft, target, noise)


@contextmanager
def watching(name: str) -> Iterator[Watched | None]:
    """The rule of a name under the name NAME; None for one that tests no chains with uniforms."""
    rule = RULES.get(name)
    if not isinstance(rule, ChainRejection):
        yield None
        return
    watched = Watched(rule)
    RULES[NAME] = watched
    try:
        yield watched
    finally:
        del RULES[NAME]


def rows_of(
    watched: Watched, prompts: Sequence[Sequence[int]], texts: Sequence[Any], seed: int
) -> tuple[Row, ...]:
    """Positions with a draft, of texts whose seeds count on from `seed`."""
    found: list[Row] = []
    for one in watched.seen:
        prompt = tuple(prompts[one.seed - seed])
        before = tuple(texts[one.seed - seed].token_ids)[: one.anchor - len(prompt)]
        for i, q_V in enumerate(one.q_KV):
            text = Text(prompt, (*before, *one.tokens[:i], one.tokens[i]))
            found.append(Row(text, one.p_TV[i], q_V))
    return tuple(found)


def captured(target: Book, capture: Capture, params: SamplingParams, near: float) -> Check:
    """The law of what the rule would write at positions it was asked about, against the book's.

    Two things may be off: what the rule makes of its rows, which are the same numbers here, so that
    no rounding excuses it; and the rows. Those are held to what the same rows differ by when the
    book reads them twice, each text alone and all together, as other numbers of rows are summed in
    another order, or, where that is less, to what they differ by when each logit moves by half of
    its own last digit.

    Args:
        target: the target's book.
        capture: the rule and its rounds.
        params: the controls.
        near: log-probabilities closer than this may be moved by rounding.
    """
    every = max(1, len(capture.rows) // ROWS)
    looked = capture.rows[::every][:ROWS]
    due = [_due(target, row, params) for row in looked]
    spread = _mean(map(_apart, due, _due_together(target, looked, params)))
    grain = _mean(
        _apart(due_V, _due(target, row, params, target.eps / 2))
        for due_V, row in zip(due, looked, strict=True)
    )
    bound = max(EXACT, APART * spread, grain)
    laws = [law_of(capture.rule, row) for row in looked]
    off = [_apart(law_V, due_V) for (law_V, _), due_V in zip(laws, due, strict=True)]
    ruled = _mean(_apart(law_V, row.p_V) for (law_V, _), row in zip(laws, looked, strict=True))
    given = _mean(_apart(row.p_V, due_V) for row, due_V in zip(looked, due, strict=True))
    asked_about = (row.q_V.double().topk(min(ASKED, len(row.q_V))).values for row in looked)
    numbers = {
        "positions": len(looked),
        "mean TV": _mean(off),
        "largest TV": max(off),
        "TV of the rule": ruled,
        "TV of its rows": given,
        "TV of rows read twice": spread,
        "TV of a last digit": grain,
        "bound": bound,
        "asked about": _mean(float(mass_S.sum()) for mass_S in asked_about),
        "acceptance": _mean(accepted for _, accepted in laws),
        "ceiling": _mean(1 - _apart(row.p_V, row.q_V) for row in looked),
    }
    said = (
        f"TV {numbers['mean TV']:.2g} from the target's law, {max(off):.2g} at most, at "
        f"{len(looked)} positions; accepts {numbers['acceptance']:.4f}, the ceiling is "
        f"{numbers['ceiling']:.4f}"
    )
    if bound > EXACT:
        said += f"; rounding alone makes up to {bound:.2g}"
    # One token at the edge of a cut-off may change sides by rounding; the mean says what counts.
    if ruled <= EXACT and given <= bound:
        return Check(CHECK, "lossless", said, numbers)
    row = looked[off.index(max(off))]
    where = {
        "prompt": list(row.text.prompt),
        "text": list(row.text.output[:-1]),
        "params": asked(params),
    }
    if ruled > EXACT:
        return Check(CHECK, "rule bias", said, numbers, where)
    for name in set_controls(params):
        if _apart(row.p_V, _due(target, row, without(params, name))) <= bound:
            return Check(CHECK, "control ignored", f"{name} ignored; {said}", numbers, where)
    moved = max(_moved(row.p_V, due_V) for row, due_V in zip(looked, due, strict=True))
    numbers["nats"] = moved
    verdict: Verdict = "numeric drift" if moved <= near else "rule bias"
    return Check(CHECK, verdict, f"{said}: {moved:.2g} nats", numbers, where)


def law_of(rule: ChainRejection, row: Row) -> tuple[Tensor, float]:
    """What the rule writes at a position `[V]`, and how often it keeps the drafted token.

    Both over every uniform there is and the ASKED likeliest tokens of the draft; rarer ones are
    taken to be kept at p / q, and replaced like the others.
    """
    p_V, q_V = row.p_V.double(), row.q_V.double()
    order_S = q_V.argsort(descending=True)[: int((q_V > 0).sum())]
    rare = order_S[ASKED:]
    law_V, again_V = torch.zeros_like(p_V), torch.zeros_like(p_V)
    law_V[rare] = torch.minimum(p_V, q_V)[rare]
    for part_n in order_S[:ASKED].split(CHAINS):
        steps_n, left_nV = _asked(rule, row, part_n)
        kept_n = q_V[part_n] * steps_n.double() / STEPS
        law_V[part_n] += kept_n
        left_nV = left_nV / left_nV.sum(1, keepdim=True)
        again_V += ((q_V[part_n] - kept_n)[:, None] * left_nV).sum(0)
    accepted = float(law_V.sum())
    redrawn = float(again_V.sum())
    if redrawn > 0:
        law_V += again_V * ((float(q_V.sum()) - accepted) / redrawn)
    return law_V, accepted


def _asked(rule: ChainRejection, row: Row, part_n: Tensor) -> tuple[Tensor, Tensor]:
    """How many of the STEPS uniforms let each token through `[n]`, and what is left `[n, V]`."""
    # Those below p / q should. The first one that does not has the other answer with it.
    ratio_n = (row.p_V[part_n].double() / row.q_V[part_n].double()).clamp(max=1.0)
    guess_n = (ratio_n * STEPS).ceil().long()
    refused_n, left_nV = _sifted(rule, row, part_n, guess_n.clamp(max=STEPS - 1))
    low_n, high_n = torch.zeros_like(guess_n), torch.full_like(guess_n, STEPS)
    bounds = _narrowed(refused_n, guess_n.clamp(max=STEPS - 1), (low_n, high_n))
    below_n = (guess_n - 1).clamp(min=0)
    low_n, high_n = _narrowed(_sifted(rule, row, part_n, below_n)[0], below_n, bounds)
    while bool((open_n := low_n < high_n).any()):
        at = open_n.nonzero().squeeze(1)
        middle = (low_n[at] + high_n[at]) // 2
        kept, left = _sifted(rule, row, part_n[at], middle)
        left_nV[at] = torch.where(kept[:, None] > 0, left_nV[at], left)
        low_n[at], high_n[at] = _narrowed(kept, middle, (low_n[at], high_n[at]))
    return low_n, left_nV


def _narrowed(kept_n: Tensor, at_n: Tensor, bounds: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The bounds of how many uniforms let a token through, knowing what uniform `at_n` does."""
    low_n, high_n = bounds
    above_n, below_n = torch.maximum(low_n, at_n + 1), torch.minimum(high_n, at_n)
    return torch.where(kept_n > 0, above_n, low_n), torch.where(kept_n > 0, high_n, below_n)


def _sifted(
    rule: ChainRejection, row: Row, part_n: Tensor, steps_n: Tensor
) -> tuple[Tensor, Tensor]:
    """Chains of one token each, put to the rule with uniforms `steps_n / STEPS`."""
    num = len(part_n)
    laws = TargetLaws(row.p_V.expand(num, 2, -1).contiguous())
    law = Law.dense(row.q_V.expand(num, -1).contiguous())
    draft = Draft.chain(part_n[:, None], torch.ones(num, dtype=torch.int64), law)
    sifted = rule.sift(draft, laws, steps_n.double()[:, None] / STEPS)
    return sifted.num_accepted_B, sifted.weights_BV.double()


def _due(target: Book, row: Row, params: SamplingParams, moved: float = 0.0) -> Tensor:
    """The book's law at the row `[V]`, each logit moved by a share of itself."""
    texts = [row.text]
    logits_NV = target.logits(texts).double()
    # Every other token up, the others down: what moves all alike changes nothing.
    signs_V = 1.0 - 2.0 * (torch.arange(logits_NV.shape[1]) % 2)
    return target.laws(logits_NV * (1 + moved * signs_V), texts, params)[-1]


def _due_together(target: Book, rows: Sequence[Row], params: SamplingParams) -> list[Tensor]:
    """The same of some rows, their texts read in one forward."""
    texts = [row.text for row in rows]
    lasts = torch.tensor([len(text.output) for text in texts]).cumsum(0) - 1
    return list(target.laws(target.logits(texts), texts, params)[lasts])


def _apart(one_V: Tensor, other_V: Tensor) -> float:
    return float((one_V.double() - other_V.double()).abs().sum()) / 2


def _moved(one_V: Tensor, other_V: Tensor) -> float:
    """By how many nats the likely tokens' log-probabilities differ.

    A token that one law alone gives has moved from there to the least likely one there is.
    """
    one_V, other_V = one_V.double(), other_V.double()
    least = torch.minimum(one_V[one_V > 0].min(), other_V[other_V > 0].min())
    likely_V = torch.maximum(one_V, other_V) > LIKELY
    logs = (law_V.clamp(min=float(least)).log()[likely_V] for law_V in (one_V, other_V))
    return float(torch.sub(*logs).abs().max())


def _mean(numbers: Iterable[float]) -> float:
    every = list(numbers)
    return sum(every) / len(every)
