"""A server with speculation on beside the same with speculation off, and no model here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from outrider.certify.bets import needed
from outrider.certify.endpoint.pairs import (
    BOLDEST,
    LOOKS,
    NONE,
    IntArray,
    Paired,
    coded,
    fits,
    stacked,
)
from outrider.certify.endpoint.parting import Outcome, Partings, Settled
from outrider.certify.endpoint.server import Server
from outrider.certify.endpoint.wire import Answer, Ask, Name, Prompt, words
from outrider.certify.model.evidence import within
from outrider.certify.model.plan import OTHER, SAMPLED_FROM, Plan, Progress, asked
from outrider.certify.model.report import Check
from outrider.certify.model.sampled import DRIFT
from outrider.config import SamplingParams
from outrider.errors import EndpointError

ALIKE = 2.0
"""How far tokens of a text go together: means over n of them vary like those of n / 2."""
SAME = "plain texts that differ"
"""Evidence that seeds are ignored in another way than by chance."""
MOST_TIES = 0.03
"""Of greedy tokens: no rounding parts texts at more of them."""
DRAWN_AT_ONCE = 64
"""Pairs of texts that the negative control draws together."""


@dataclass(slots=True)
class Sides:
    """Two servers, or one with a switch.

    Attributes:
        on, off: with speculation and without.
        prompts: the prompts.
        params: the controls.
        plan: how long, how sure.
        progress: called with a line now and then.
        near: log-probabilities closer than this may change places by rounding.
    """

    on: Server
    off: Server
    prompts: Sequence[Prompt]
    params: SamplingParams
    plan: Plan
    progress: Progress
    near: float = 0.1
    _texts: list[list[IntArray]] = field(default_factory=list[list[IntArray]])
    _apart: int = 0
    _broken: str = ""

    def checks(self) -> tuple[list[Check], Check]:
        """All that is looked at, and the negative control."""
        found = [self._greedy(), *self._seeds()]
        for check in found:
            self.progress(f"{check.name}: {check.said}")
        if SAME in found[-1].evidence:
            said = "texts of different seeds are the same"
            return found, Check("sampled law", "undecided", said)
        sampled, evidence = self._sampled()
        self.progress(f"{sampled.name}: {sampled.said}")
        return [*found, sampled], self._control(evidence)

    def _answers(self, server: Server, params: SamplingParams, seed: int) -> list[Answer]:
        return server.all([Ask(prompt, params, seed + i) for i, prompt in enumerate(self.prompts)])

    def _greedy(self) -> Check:
        own = replace(self.params, temperature=0.0)
        on, off, again = (self._answers(one, own, 0) for one in (self.on, self.off, self.off))
        parted = [i for i, (one, two) in enumerate(zip(on, off, strict=True)) if differ(one, two)]
        unsteady = sum(map(differ, off, again))
        evidence = {"texts": len(on), "parted": len(parted), "plain from itself": unsteady}
        if not parted:
            return Check("greedy", "lossless", "every text is the plain one", evidence)
        look = Partings(self.off, self.prompts, own, self.near, self.plan.alpha, self.plan.seed)
        found = list(look.settled(parted, on, off))
        said = f"{len(parted)} of {len(on)} texts are not the plain ones"
        if wrong := _of(found, "fault"):
            one = wrong[0]
            said += f"; plain decoding goes on as one does in {one.ours} of {one.drawn} draws at a "
            said += "temperature that leaves near ties alone: logic, not rounding"
            return Check("greedy", "rule bias", said, evidence, one.case)
        ties, still = _of(found, "tie"), _of(found, "open")
        evidence |= {"looked into": len(found), "ties": len(ties)}
        if not still:
            said += (
                f": {len(ties)} were looked into, and each parts at a near tie of plain decoding"
            )
            return Check("greedy", "lossless", said, evidence)
        i = still[0].index
        where = {
            "prompt": self.prompts[i],
            "params": {"temperature": 0, **asked(own)},
            "text": on[i].text,
            "due": off[i].text,
        }
        if unsteady >= len(parted):
            said += f", and {unsteady} plain ones differ from themselves as well"
            return Check("greedy", "numeric drift", said, evidence, where)
        if len(parted) > len(on) * max(0.5, 1 - (1 - MOST_TIES) ** self.plan.length):
            return Check("greedy", "rule bias", f"{said}, more than ties part", evidence, where)
        said += f": near ties or a fault, and asking again does not tell ({still[0].why}). What "
        said += "would: the same weights as --model, or a server that tells log-probabilities"
        return Check("greedy", "undecided", said, evidence, where)

    def _seeds(self) -> list[Check]:
        seed, plan = self.plan.seed, self.plan
        first, again, other = (
            self._answers(self.on, self.params, one) for one in (seed, seed, seed + OTHER)
        )
        checks = [lengths(first, plan.length)]
        where = {"prompts": list(self.prompts), "params": asked(self.params), "seed": seed}
        if parted := sum(map(differ, first, again)):
            return [*checks, self._parted(parted, where)]
        if any(map(differ, first, other)):
            said = "a seed gives its texts again, another seed others"
            return [*checks, Check("seeds", "lossless", said)]
        greedy = self._answers(self.on, replace(self.params, temperature=0.0), seed)
        if any(map(differ, first, greedy)):
            said = "two seeds gave the same texts, and these are not the greedy ones"
            return [*checks, Check("seeds", "seed ignored", said, {SAME: 0}, where)]
        plain = [self._answers(self.off, self.params, one) for one in (seed, seed + OTHER)]
        moved = sum(map(differ, *plain))
        if moved:
            said = f"two seeds gave the same texts; {moved} of {len(first)} plain ones differ"
            return [*checks, Check("seeds", "seed ignored", said, {SAME: moved}, where)]
        return [*checks, Check("seeds", "lossless", "texts are too sure to tell seeds apart")]

    def _parted(self, parted: int, where: dict[str, Any]) -> Check:
        """A seed gave other texts the second time: all of them, or a few by rounding?"""
        most = len(self.prompts)
        said = f"seed {self.plan.seed} gave {parted} of {most} texts otherwise the second time"
        if 2 * parted > most:
            return Check("seeds", "seed ignored", said, {"parted": parted}, where)
        plain = (self._answers(self.off, self.params, self.plan.seed) for _ in "ab")
        unsteady = sum(map(differ, *plain))
        evidence = {"parted": parted, "plain from itself": unsteady}
        if unsteady:
            said += f", and {unsteady} plain ones as well"
            return Check("seeds", "numeric drift", said, evidence, where)
        said += ": rounding or a fault, as plain ones are the same"
        return Check("seeds", "undecided", said, evidence, where)

    def _sampled(self) -> tuple[Check, Paired]:
        """Pairs of texts, each of one seed, until something is decided or the budget is spent."""
        length, horizon = self.plan.length, pairs_needed(self.plan)
        evidence = Paired(self.plan.alpha, horizon)
        self._texts = [[] for _ in self.prompts]
        self._apart = 0
        paid: list[np.ndarray] = []
        shown = 0
        while evidence.pairs < horizon and not self._decided(evidence):
            if self.on.meter.spent:
                break
            try:
                both = [
                    self._answers(one, self.params, self._seed(evidence.pairs))
                    for one in (self.on, self.off)
                ]
            except KeyboardInterrupt:
                # What was seen so far is a result.
                break
            except EndpointError as error:
                if not evidence.pairs:
                    raise
                self._broken = f"; it ended early: {error}"
                break
            on_NL, off_NL = (
                stacked(coded(pieces(one), length) for one in answers) for answers in both
            )
            self._apart += int((on_NL != off_NL).any(1).sum())
            for kept, text_L in zip(self._texts, off_NL, strict=True):
                kept.append(text_L)
            paid.append(evidence.read(on_NL, off_NL))
            if evidence.pairs >= shown:
                shown = evidence.pairs + max(1, horizon // 40)
                self.progress(
                    f"sampled law: {evidence.pairs} of at most {horizon} pairs, "
                    f"e = {evidence.value:.3g}"
                )
        return self._judged(evidence, paid), evidence

    def _seed(self, number: int) -> int:
        return self.plan.seed + SAMPLED_FROM + number

    def _decided(self, evidence: Paired) -> bool:
        return evidence.against or self._holds(evidence)

    def _holds(self, evidence: Paired) -> bool:
        return within(list(evidence.intervals().values()), self.plan.within)

    def _judged(self, evidence: Paired, paid: list[np.ndarray]) -> Check:
        intervals = evidence.intervals()
        furthest = max(intervals, key=lambda name: intervals[name].most)
        most = intervals[furthest].most
        numbers: dict[str, Any] = {
            "pairs": evidence.pairs,
            "e": evidence.value,
            "furthest": furthest,
            "at most": most,
            "looks": {
                name: {"mean": one.mean, "low": one.low, "high": one.high}
                for name, one in intervals.items()
            },
        }
        said = f"{evidence.pairs} pairs of texts, e = {evidence.value:.3g}"
        if evidence.against:
            return self._refuted(evidence, numbers, paid)
        if not self._apart:
            told = f"all {evidence.pairs} texts are the same with and without speculation: either "
            told += "one noise for both, or a switch without effect; --model tells which"
            return Check("sampled law", "undecided", told, numbers)
        if self._holds(evidence):
            told = f"within {most:.3f} of plain decoding in all that was looked at ({said})"
            return Check("sampled law", "lossless", told, numbers)
        told = f"nothing against it, and not enough to say within {self.plan.within}: {said}; "
        told += f"{furthest!r} may be off by {most:.3f}{self._broken}"
        return Check("sampled law", "undecided", told, numbers)

    def _refuted(self, evidence: Paired, numbers: dict[str, Any], paid: list[np.ndarray]) -> Check:
        name = evidence.suspect()
        mean = evidence.intervals()[name].mean
        sign = fits(name, mean)
        payoffs_N = np.concatenate(paid)[:, LOOKS.index(name)]
        at = int((np.sign(mean) * payoffs_N).argmax())
        where = {
            "prompt": self.prompts[at % len(self.prompts)],
            "params": asked(self.params),
            "seed": self._seed(at),
        }
        small = within(list(evidence.intervals().values()), DRIFT)
        why = f"{name!r} is off by {mean:+.3f}" + (f", as of {sign}" if sign else "")
        numbers |= {"fits": sign or name}
        said = f"refuted after {evidence.pairs} pairs (e = {evidence.value:.3g}); {why}"
        return Check("sampled law", "numeric drift" if small else "rule bias", said, numbers, where)

    def _control(self, evidence: Paired) -> Check:
        """A bias of `within`, planted into plain texts that were read, must be found.

        Each token is now and then the likeliest one after the token before it.
        """
        name, rng = "negative control", np.random.default_rng(self.plan.seed)
        pools = [np.stack(texts) for texts in self._texts if len(texts) > 1]
        if not pools:
            return Check(name, "void", "no texts were read in which anything could be planted")
        habits = evidence.habits
        every_NL = np.concatenate(pools)
        there_NL = every_NL != NONE
        others = float((every_NL != habits.likely(every_NL))[there_NL].mean())
        if others <= 0:
            return Check(name, "void", "the texts are too sure for anything to be planted")
        share = min(1.0, self.plan.within / others)
        trial = Paired(self.plan.alpha, pairs_needed(self.plan), habits.copy())
        most = 4 * max(pairs_needed(self.plan), evidence.pairs)
        while not trial.against and trial.pairs < most:
            drawn = [pools[i] for i in rng.integers(len(pools), size=DRAWN_AT_ONCE)]
            on_NL, off_NL = (stacked(pool[rng.integers(len(pool))] for pool in drawn) for _ in "ab")
            lie_NL = (rng.random(on_NL.shape) < share) & (on_NL != NONE)
            trial.read(np.where(lie_NL, habits.likely(on_NL), on_NL), off_NL)
        planted = share * others
        numbers = {"planted": planted, "pairs": trial.pairs}
        if trial.against:
            said = f"a planted bias of {planted:.3g} was found after {trial.pairs} pairs"
            return Check(name, "rule bias", said, numbers)
        said = f"a planted bias of {planted:.3g} was not found in {trial.pairs} pairs: "
        return Check(name, "void", said + "the run is void", numbers)


def pairs_needed(plan: Plan) -> int:
    """Pairs of texts that suffice, as a rule, to say that they are within the plan's bound.

    A budget of tokens is one of both sides together.
    """
    if plan.budget is not None:
        return max(1, plan.budget // (2 * plan.length))
    # `needed` counts a variance of 1/4; a difference of two means over a text's tokens has twice
    # that over their number, were they independent. Stakes are bounded, which takes time too.
    varied = 2 * ALIKE * needed(len(LOOKS), plan.alpha, plan.within) / plan.length
    return math.ceil(varied + 4 * math.log(2 * len(LOOKS) / plan.alpha) / BOLDEST / plan.within)


def _of(found: Sequence[Settled], outcome: Outcome) -> list[Settled]:
    return [one for one in found if one.outcome == outcome]


def pieces(answer: Answer) -> Sequence[Name]:
    """A text's tokens: ids, or what log-probabilities call them, or words and signs."""
    if answer.ids is not None:
        return answer.ids
    return answer.names if answer.names is not None else words(answer.text)


def differ(one: Answer, two: Answer) -> bool:
    """Whether two texts are not the same."""
    if one.ids is not None and two.ids is not None:
        return one.ids != two.ids
    return one.text != two.text


def lengths(answers: Sequence[Answer], most: int) -> Check:
    """No text is longer than asked for, and one that says it reached its length did."""
    for answer in answers:
        count = answer.num_tokens if answer.ids is None else len(answer.ids)
        if count is None:
            continue
        where = {"text": answer.text, "finish_reason": answer.finish}
        if count > most:
            said = f"{count} tokens came where at most {most} were asked for"
            return Check("ends", "control ignored", said, {}, where)
        if answer.finish == "length" and count < most:
            said = f"a text of {count} tokens says that it reached its {most}"
            return Check("ends", "rule bias", said, {}, where)
    return Check("ends", "lossless", "no text is longer than asked for, or cut short")
