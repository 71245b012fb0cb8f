"""`certify endpoint`: what a server writes with speculation on, held to what it should."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from outrider.certify.endpoint.controls import CALLS, Controls
from outrider.certify.endpoint.paired import Sides, lengths, pairs_needed
from outrider.certify.endpoint.parting import ASKED
from outrider.certify.endpoint.remote import Reference, Remote
from outrider.certify.endpoint.server import Server
from outrider.certify.endpoint.told import Told, ToldLaws, check_tellable
from outrider.certify.endpoint.wire import IDS, Ask, Prompt
from outrider.certify.model.book import set_controls
from outrider.certify.model.certain import FAR, greedy, seeds
from outrider.certify.model.looks import names
from outrider.certify.model.plan import Plan, Progress
from outrider.certify.model.report import Check, Report
from outrider.certify.model.run import certify
from outrider.certify.model.sampled import MOST_DRIFT, Sampling
from outrider.certify.model.subject import Subject
from outrider.config import SamplingParams
from outrider.errors import EndpointError, EndpointRefused, InvalidConfig

Mode = Literal["model", "log-probabilities", "pairs"]
HOW: Mapping[Mode, str] = {
    "model": "each token beside the law that a model gives here",
    "log-probabilities": "each token beside the law that is told with it",
    "pairs": "texts with speculation beside texts without",
}
PROMPTS_OF_CONTROLS = 8
REPLAYED = 24
"""Places whose log-probabilities are asked for once more, as the first token after a prompt."""
UNKNOWN_TOO = 1.5
"""Tokens that come for each one whose law log-probabilities tell, as a rule at most."""
FEWEST = 5
"""Likeliest tokens that nearly all servers tell."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What may be spent; None = what the bound needs."""

    requests: int | None = None
    tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Need:
    """What it takes at most."""

    mode: Mode
    requests: int
    tokens: int
    plan: Plan

    def __str__(self) -> str:
        return (
            f"{HOW[self.mode]}: to say within {self.plan.within:g} at alpha {self.plan.alpha:g} it "
            f"takes at most {self.requests} requests, {self.tokens} tokens"
        )


class Certifier:
    """A server, what it is held to, and how.

    The mode follows from what there is: a model here is best, then log-probabilities that the
    server tells, then a server without speculation.

    Args:
        server: with speculation on.
        prompts: text, or token ids, which a model here needs.
        params: the controls; of `max_tokens` and `seed` the plan's are used.
        plan: how long, how sure; its budget follows from `limits`.
        plain: the same server with speculation off; None where it cannot be had.
        reference: a model that says what should come; None without.
        tops: likeliest tokens to ask for; 0 = log-probabilities are left alone.
        near_tie: two logits closer than this may change places by rounding.
        limits: what may be spent.

    Raises:
        EndpointError: a server that cannot be reached, or gives nothing to hold it to.
        InvalidConfig: limits that do not suffice to look once; controls that cannot be judged.
    """

    def __init__(
        self,
        server: Server,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        plan: Plan,
        *,
        plain: Server | None = None,
        reference: Reference | None = None,
        tops: int = 20,
        near_tie: float = 0.1,
        limits: Limits | None = None,
    ) -> None:
        if params.temperature == 0:
            raise InvalidConfig("temperature=0: greedy texts are certified anyway; name another")
        self._server, self._plain, self._reference = server, plain, reference
        self._params = replace(
            params, max_tokens=plan.length, n=1, seed=None, stop=(), logprobs=None
        )
        self._prompts = list(dict.fromkeys(prompts))
        self._near_tie, self._tops = near_tie, tops
        self._probe()
        self.mode: Mode = self._mode()
        limits = Limits() if limits is None else limits
        self.need = self._needed(plan, limits)
        self._plan = self.need.plan
        if plain is not None:
            plain.meter = server.meter

    def report(self, progress: Progress = lambda _: None) -> Report:
        """Looks.

        Raises:
            EndpointError: a server that fails meanwhile.
        """
        started = time.perf_counter()
        if self.mode == "model":
            checks, control = self._by_model(progress)
        elif self.mode == "log-probabilities":
            checks, control = self._by_told(progress)
        else:
            checks, control = self._by_pairs(progress)
        said: dict[str, Any] = {
            name: getattr(self._params, name)
            for name in ("temperature", *set_controls(self._params))
        }
        plan, meter = self._plan, self._server.meter
        spent = f"{meter.requests} requests, {meter.tokens} tokens"
        name = f"{self._server.url}, {HOW[self.mode]}, {spent}"
        seconds = time.perf_counter() - started
        return Report(name, said, plan.within, plan.alpha, tuple(checks), control, seconds)

    def _probe(self) -> None:
        """Finds out which fields the server takes, and how many log-probabilities it tells."""
        usual = [self._server.taken, {**IDS}, {}]
        tops = [self._tops, min(self._tops, FEWEST), 0] if self._tops else [0]
        tries = [(taken, count) for count in dict.fromkeys(tops) for taken in usual]
        plain = SamplingParams(max_tokens=2)
        refusal: EndpointRefused | None = None
        for taken, count in tries:
            self._server.taken = taken
            try:
                self._first = self._server.ask(Ask(self._prompts[0], plain, 0, count or None))
            except EndpointRefused as error:
                refusal = error
                continue
            self._tops = count
            if self._plain is not None:
                self._plain.taken = taken
                self._plain.ask(Ask(self._prompts[0], plain, 0))
            return
        assert refusal is not None
        raise refusal

    def _mode(self) -> Mode:
        if self._reference is not None:
            return "model"
        if self._tops and any(self._first.tops):
            check_tellable(self._params, set_controls(self._params))
            return "log-probabilities"
        if self._plain is not None:
            return "pairs"
        raise EndpointError(
            f"{self._server.url} tells no log-probabilities, so there is nothing to hold it to; "
            "give --plain-url or a switch of its speculation, or --model"
        )

    def _needed(self, plan: Plan, limits: Limits) -> Need:
        once, length = len(self._prompts), plan.length
        fixed = CALLS * min(once, PROMPTS_OF_CONTROLS)
        fixed += {
            "model": 6 * once,
            "log-probabilities": 4 * once + REPLAYED,
            "pairs": 8 * once + ASKED,
        }[self.mode]
        if self.mode == "pairs":
            sampled = 2 * pairs_needed(plan)
        else:
            reference = self._reference
            looked = (
                names(reference.draft is not None, bool(reference.target.ends))
                if reference is not None
                else names(False, False)
            )
            sampled = -(-plan.tokens(len(looked)) // length)
            if reference is None:
                sampled = math.ceil(sampled * UNKNOWN_TOO)
        most = sampled
        if limits.requests is not None:
            most = min(most, limits.requests - fixed)
        if limits.tokens is not None:
            most = min(most, limits.tokens // length - fixed)
        if most < min(sampled, 2 * once):
            raise InvalidConfig(
                f"a budget of {limits.requests or limits.tokens} is too little: looking once takes "
                f"{fixed + 2 * once} requests of {length} tokens; allow more, or give fewer prompts"
            )
        self._server.meter.most_requests = self._server.meter.requests + fixed + most
        own = plan if most == sampled else replace(plan, budget=most * length)
        return Need(self.mode, fixed + most, (fixed + most) * length, own)

    def _by_model(self, progress: Progress) -> tuple[list[Check], Check]:
        reference = self._reference
        assert reference is not None
        spelt = self._first.ids is None
        plain = None if self._plain is None else Remote(self._plain, reference, spelt)
        subject = Subject(
            name=self._server.url,
            generate=Remote(self._server, reference, spelt),
            target=reference.target,
            plain=plain,
            draft=reference.draft,
            near_tie=self._near_tie,
        )
        prompts = [prompt for prompt in self._prompts if not isinstance(prompt, str)]
        some = prompts[:PROMPTS_OF_CONTROLS]
        asked = Controls(self._server, some, self._plan, self._plain, subject, some)
        controls = _said(asked.checks(), progress)
        subject = replace(subject, obeys=_obeyed(controls))
        found = certify(subject, prompts, self._params, self._plan, progress)
        return [*controls, *found.checks], found.control

    def _by_told(self, progress: Progress) -> tuple[list[Check], Check]:
        laws = ToldLaws(self._params, self._processed(), self._near_tie)
        told = Told(self._server, laws, self._tops)
        prompts = told.numbered(self._prompts)
        plain = None if self._plain is None else replace(told, server=self._plain)
        subject = Subject(self._server.url, told, laws, plain, near_tie=self._near_tie)
        some = prompts[:PROMPTS_OF_CONTROLS]
        asked = Controls(
            self._server,
            self._prompts[:PROMPTS_OF_CONTROLS],
            self._plan,
            self._plain,
            subject,
            some,
            () if laws.processed else ("presence_penalty", "frequency_penalty"),
        )
        controls = _said(asked.checks(), progress)
        subject = replace(subject, obeys=_obeyed(controls))
        own, plan = self._params, self._plan
        first = subject.texts(prompts, own, plan.seed)
        ends = lengths(told.answers, plan.length)
        certain = [
            greedy(subject, prompts, own),
            ends,
            seeds(subject, prompts, own, plan, first),
            self._replayed(told),
        ]
        certain = _said(certain, progress)
        if "nats" in certain[2].evidence:
            said = "texts of different seeds are the same"
            sampled = control = Check("sampled law", "undecided", said)
        else:
            sampled, control = Sampling(subject, prompts, own, plan, progress).checks()
        return [*controls, *(_readable(one, told) for one in (*certain, sampled))], control

    def _by_pairs(self, progress: Progress) -> tuple[list[Check], Check]:
        assert self._plain is not None
        some = self._prompts[:PROMPTS_OF_CONTROLS]
        asked = Controls(self._server, some, self._plan, self._plain)
        controls = _said(asked.checks(), progress)
        sides = Sides(
            self._server,
            self._plain,
            self._prompts,
            self._params,
            self._plan,
            progress,
            self._near_tie,
        )
        checks, control = sides.checks()
        return [*controls, *checks], control

    def _processed(self) -> bool:
        """Whether log-probabilities change with the controls, so that they are told after them."""
        if not set_controls(self._params):
            return False
        short = replace(self._params, max_tokens=1)
        raw = SamplingParams(max_tokens=1)
        one, two = (
            self._server.ask(Ask(self._prompts[0], params, 0, self._tops)).tops[:1]
            for params in (raw, short)
        )
        return bool(one and two) and _apart(one[0], two[0]) > MOST_DRIFT

    def _replayed(self, told: Told) -> Check:
        """What is told within a text, beside what is told at the end of it as a prompt.

        No draft has a part in the latter.
        """
        count = len(told.places)
        if told.silent:
            said = f"nothing was told of {told.silent} tokens, so that nobody can judge them"
            return Check("logprobs", "control ignored", said, {"silent": told.silent}, {})
        if not count or told.laws.processed:
            why = "they are told after the controls" if count else "no token ids are told"
            return Check("logprobs", "not looked at", why)
        server = self._plain or self._server
        chance = random.Random(self._plan.seed)
        places = chance.sample(told.places, min(REPLAYED, count))
        one = SamplingParams(max_tokens=1)
        answers = server.all([Ask(prefix, one, 0, self._tops) for prefix, _ in places])
        apart: list[float] = []
        for (_, row), answer in zip(places, answers, strict=True):
            name = told.laws.vocabulary.name
            pairs = zip(row.tokens.tolist(), row.logprobs.tolist(), strict=True)
            known = {key: number for x, number in pairs if (key := name(x)) is not None}
            apart.append(_apart(known, answer.tops[0] if answer.tops else {}))
        most, usual = max(apart), statistics.median(apart)
        evidence = {"largest difference": most, "median": usual, "places": len(apart)}
        if most <= self._near_tie:
            said = f"within {most:.2g} nats of those told as a prompt's first token"
            return Check("logprobs", "lossless", said, evidence)
        at = places[apart.index(most)][0]
        said = (
            f"off by up to {most:.3g} nats, by {usual:.2g} as a rule, from a prompt's first token"
        )
        where = {"prompt": list(at), "params": {"max_tokens": 1}, "logprobs": self._tops}
        verdict = "numeric drift" if usual <= self._near_tie else "control ignored"
        return Check("logprobs", verdict, said, evidence, where)


def _apart(one: Mapping[Any, float], two: Mapping[Any, float]) -> float:
    """The largest difference where both say something."""
    return max((min(FAR, abs(one[x] - two[x])) for x in one.keys() & two.keys()), default=FAR)


def _said(checks: list[Check], progress: Progress) -> list[Check]:
    for check in checks:
        progress(f"{check.name}: {check.said}")
    return checks


def _obeyed(controls: list[Check]) -> bool:
    return all(check.verdict != "control ignored" for check in controls)


def _readable(check: Check, told: Told) -> Check:
    """With prompts and tokens as the server knows them."""
    if check.reproduction is None:
        return check
    where = dict(check.reproduction)
    name = told.laws.vocabulary.name
    if "prompts" in where:
        where["prompts"] = [told.given.get(tuple(one), one) for one in where["prompts"]]
    if "prompt" in where and check.name != "logprobs":
        where["prompt"] = told.given.get(tuple(where["prompt"]), where["prompt"])
    if "text" in where and check.name != "ends":
        where["text"] = [name(token) for token in where["text"]]
    where |= {key: name(where[key]) for key in ("came", "due") if key in where}
    return replace(check, reproduction=where)
