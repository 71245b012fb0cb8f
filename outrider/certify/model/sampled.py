"""Sampled texts, token by token against the law that the text before them gives."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from outrider.certify.bets import Wealth
from outrider.certify.model.book import Text
from outrider.certify.model.evidence import Evidence, thinned, within
from outrider.certify.model.looks import looks, names
from outrider.certify.model.plan import SAMPLED_FROM, Plan, Progress, asked
from outrider.certify.model.report import Check
from outrider.certify.model.signatures import Page, emitted
from outrider.certify.model.subject import Generate, Prompts, Subject, made
from outrider.config import SamplingParams
from outrider.errors import EndpointError

DRIFT = 0.01
"""A bias that is surely smaller than this, and fits no known fault, is put down to rounding."""
MOST_DRIFT = 0.1
"""Plain decoding that is off by more than this is off for another reason than rounding."""
LONGER = 8
"""Plain decoding is off by less where so many times the tokens do not refute it."""
AT_ONCE = 1 << 20
"""Numbers in the laws that are looked at together."""
KEPT_BYTES = 1 << 26
"""Laws kept for the negative control, the first ones."""


class Sampling:
    """Sampled texts, bet on until something is decided."""

    def __init__(
        self,
        subject: Subject,
        prompts: Prompts,
        params: SamplingParams,
        plan: Plan,
        progress: Progress,
    ) -> None:
        self._subject, self._prompts, self._params = subject, prompts, params
        self._plan, self._progress = plan, progress
        self._looked = names(subject.draft is not None, bool(subject.target.ends))
        self._horizon = plan.tokens(len(self._looked))
        self._pages: list[Page] = []
        self._kept = 0
        self._broken = ""

    def checks(self) -> tuple[Check, Check]:
        """The law of sampled texts, and the negative control."""
        evidence = self._evidence()
        self._read(self._subject.generate, evidence, lambda: self._decided(evidence))
        check = self._judged(evidence)
        self._progress(f"{check.name}: {check.said}")
        control = self._control(evidence)
        self._progress(f"{control.name}: {control.said}")
        return check, control

    def _evidence(self) -> Evidence:
        plan, near = self._plan, self._subject.near_tie
        return Evidence(self._looked, plan.alpha, self._horizon, plan.seed, near)

    def _read(self, generate: Generate, evidence: Evidence, done: Callable[[], bool]) -> None:
        """Calls of all prompts, each with a seed of its own, until it is done or spent.

        It goes on where it stopped before.
        """
        shown = 0
        while evidence.tokens < self._horizon:
            number = evidence.asked
            seed = self._seed(number)
            target = self._subject.target
            try:
                texts = made(generate, self._prompts, self._params, seed, target)
            except KeyboardInterrupt:
                # What was seen so far is a result.
                return
            except EndpointError as error:
                if not evidence.tokens:
                    raise
                self._broken = f"; it ended early: {error}"
                return
            before = evidence.read_tokens
            numbers = [number + i for i, text in enumerate(texts) if text.token_ids]
            came = [
                Text(tuple(prompt), text.token_ids)
                for prompt, text in zip(self._prompts, texts, strict=True)
                if text.token_ids
            ]
            at_once = max(1, AT_ONCE // (self._plan.length * target.width))
            for start in range(0, len(came), at_once):
                part = slice(start, start + at_once)
                page = Page.of(came[part], self._params, target, self._subject.draft)
                evidence.read(page, numbers[part])
                self._keep(page)
            evidence.asked += len(self._prompts)
            if done() or evidence.read_tokens == before:
                return
            if evidence.tokens >= shown:
                shown = evidence.tokens + self._horizon // 10
                self._progress(
                    f"sampled law: {evidence.tokens} of at most {self._horizon} tokens, "
                    f"e = {evidence.value:.3g}"
                )

    def _seed(self, number: int) -> int:
        return self._plan.seed + SAMPLED_FROM + number

    def _keep(self, page: Page) -> None:
        size = page.p_NV.numel() * 8
        if not self._pages or self._kept + size <= KEPT_BYTES:
            self._kept += size
            self._pages.append(page)

    def _decided(self, evidence: Evidence) -> bool:
        shown = evidence.tokens >= self._horizon // 4
        return evidence.against or (shown and self._holds(evidence))

    def _holds(self, evidence: Evidence) -> bool:
        return within(list(evidence.intervals().values()), self._plan.within)

    def _judged(self, evidence: Evidence) -> Check:
        intervals = evidence.intervals()
        furthest = max(intervals, key=lambda name: intervals[name].most)
        numbers: dict[str, Any] = {
            "tokens": evidence.tokens,
            "e": evidence.value,
            "at a cut-off": evidence.edges,
            "furthest": furthest,
            "at most": intervals[furthest].most,
            "path": evidence.path,
            "looks": {
                name: {"mean": one.mean, "low": one.low, "high": one.high}
                for name, one in intervals.items()
            },
        }
        if evidence.against:
            return self._refuted(evidence, numbers)
        said = f"{evidence.tokens} tokens, e = {evidence.value:.3g}"
        if self._holds(evidence):
            most = intervals[furthest].most
            told = f"within {most:.3f} of the target's law in all that was looked at ({said})"
            return Check("sampled law", "lossless", told, numbers)
        told = f"nothing against it, and not enough to say within {self._plan.within}: {said}; "
        told += f"{furthest!r} may be off by {intervals[furthest].most:.3f}{self._broken}"
        return Check("sampled law", "undecided", told, numbers)

    def _refuted(self, evidence: Evidence, numbers: dict[str, Any]) -> Check:
        suspect = evidence.suspect()
        category, why = suspect.category, f"it fits: {suspect.name}"
        intervals = list(evidence.intervals().values())
        if category == "rule bias" and within(intervals, DRIFT):
            category, why = "numeric drift", f"it is smaller than {DRIFT}"
        if category == "rule bias" and self._plain_too(evidence):
            category, why = "numeric drift", "plain decoding of the same engine differs as much"
        if suspect.guessed and self._subject.obeys:
            category, why = "rule bias", "each control is obeyed where it is asked for alone"
        elif suspect.guessed and self._plain_stands(evidence):
            category, why = "rule bias", "plain decoding of the same engine has the law that is due"
        told = evidence.worst(suspect.name)
        where = self._case(told.number, told.tokens)
        numbers |= {"fits": suspect.name, "log e of it": suspect.log_e}
        said = f"refuted after {numbers['tokens']} tokens (e = {numbers['e']:.3g}); {why}"
        return Check("sampled law", category, said, numbers, where)

    def _case(self, number: int, tokens: tuple[int, ...]) -> dict[str, Any]:
        """What to ask for to see a text: its prompt alone, where that gives the text again."""
        subject, params = self._subject, self._params
        index, seed = number % len(self._prompts), self._seed(number)
        alone = [self._prompts[index]]
        with suppress(EndpointError):
            (text,) = made(subject.generate, alone, params, seed, subject.target)
            if text.token_ids == tokens:
                return {"prompt": list(alone[0]), "params": asked(params), "seed": seed}
        prompts = [list(prompt) for prompt in self._prompts]
        return {
            "prompts": prompts,
            "index": index,
            "params": asked(params),
            "seed": seed - index,
        }

    def _plain_stands(self, evidence: Evidence) -> bool:
        """Whether texts without speculation are not refuted in many times the tokens."""
        if self._subject.plain is None:
            return False
        plain, most = self._evidence(), LONGER * evidence.tokens
        self._read(self._subject.plain, plain, lambda: plain.against or plain.tokens >= most)
        return not plain.against

    def _plain_too(self, evidence: Evidence) -> bool:
        """Whether texts without speculation are refuted just as well, and are off by as little.

        Where they are, both go on until they part or the budget is spent. Texts that are right are
        read no longer than it takes to see it: refutation takes about as many tokens every time.
        """
        if self._subject.plain is None:
            return False
        plain = self._evidence()

        def apart() -> bool:
            ours = evidence.intervals()
            return not all(ours[name].meets(one) for name, one in plain.intervals().items())

        most = LONGER * evidence.tokens
        self._read(
            self._subject.plain,
            plain,
            lambda: plain.against or plain.tokens >= most or apart(),
        )
        if plain.against and not apart():
            self._read(self._subject.plain, plain, apart)
            self._read(self._subject.generate, evidence, apart)
        little = all(abs(one.mean) <= MOST_DRIFT for one in plain.intervals().values())
        return plain.against and little and not apart()

    def _control(self, evidence: Evidence) -> Check:
        """A bias of `within`, planted into the laws that were read, must be found.

        Where those laws are too sure for so much, as much as fits is planted, and said. It may take
        four times the tokens the run had at most.
        """
        name = "negative control"
        lies = [_lie(page) for page in self._pages]
        spread = _mean_distance(lies, self._pages)
        if spread <= 0:
            return Check(name, "void", "no law was read in which anything could be planted")
        share = min(1.0, self._plan.within / spread)
        planted = share * spread
        chance, rng = random.Random(self._plan.seed), torch.Generator()
        rng.manual_seed(self._plan.seed)
        wealth = Wealth(self._looked)
        tokens, most = 0, 4 * max(self._horizon, evidence.tokens)
        # The real test has half of its wealth on other bets.
        enough = 2 / self._plan.alpha
        while wealth.most < enough and tokens < most:
            at = chance.randrange(len(lies))
            page, lie_NV = self._pages[at], lies[at]
            law_NV = (1 - share) * page.p_NV + share * lie_NV
            tokens_N = law_NV.multinomial(1, generator=rng).squeeze(1)
            points = torch.rand(len(tokens_N), generator=rng, dtype=torch.float64).numpy()
            wealth.bet(looks(page, tokens_N, points))
            tokens += len(tokens_N)
        numbers = {"planted": planted, "tokens": tokens, "path": thinned(wealth.path / 2)}
        if wealth.most >= enough:
            said = f"a planted bias of {planted:.3g} was found after {tokens} tokens"
            return Check(name, "rule bias", said, numbers)
        said = f"a planted bias of {planted:.3g} was not found in {tokens} tokens: the run is void"
        return Check(name, "void", said, numbers)


def _mean_distance(lies: list[torch.Tensor], pages: list[Page]) -> float:
    """The mean total variation of some laws from those that are due; 0 of none."""
    apart = [
        (lie_NV - page.p_NV).abs().sum(1) / 2 for lie_NV, page in zip(lies, pages, strict=True)
    ]
    return float(torch.cat(apart).mean()) if apart else 0.0


def _lie(page: Page) -> torch.Tensor:
    """A law some fault gives: the draft's likeliest token scored with its law, or a sharper p."""
    if page.q_NV is None:
        sharp_NV = page.p_NV**1.5
        return sharp_NV / sharp_NV.sum(1, keepdim=True)
    top_NV = torch.zeros_like(page.q_NV).scatter(1, page.q_NV.argmax(1, keepdim=True), 1.0)
    return emitted(page.p_NV, top_NV, page.q_NV)
