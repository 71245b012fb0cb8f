"""Each control asked for in turn, where it leaves one text to come: is it honoured at all?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from outrider.certify.endpoint.paired import differ
from outrider.certify.endpoint.server import Server
from outrider.certify.endpoint.wire import Answer, Ask, Prompt
from outrider.certify.model.certain import greedy
from outrider.certify.model.plan import OTHER, SAMPLED_FROM, Plan, asked
from outrider.certify.model.report import Check
from outrider.certify.model.subject import Prompts, Subject
from outrider.config import SamplingParams
from outrider.errors import EndpointRefused

SURE: dict[str, dict[str, float]] = {
    "temperature": {"temperature": 0.01},
    "top_k": {"top_k": 1},
    "top_p": {"top_p": 1e-6},
    "min_p": {"min_p": 1.0},
}
"""Settings that leave the likeliest token alone."""
MOVING: dict[str, dict[str, float]] = {
    "presence_penalty": {"presence_penalty": 2.0},
    "frequency_penalty": {"frequency_penalty": 2.0},
    "repetition_penalty": {"repetition_penalty": 1.8},
}
"""Settings that change greedy texts."""
SHORT = 3
"""Tokens that max_tokens is tried with."""
FORBID = -100.0
TOP = 2
"""Likeliest tokens that are asked for."""
CALLS = 20
"""Calls of all its prompts that this takes, at most."""


@dataclass(frozen=True, slots=True)
class Controls:
    """Requests of some prompts, each control in turn.

    Attributes:
        server: who is asked.
        prompts: some of the prompts.
        plan: the length of texts, and seeds.
        plain: the same without speculation; None where it is not to be had.
        subject: where laws are known, who is certified; None without.
        numbered: the subject's prompts.
        judged: of penalties, those whose law the subject knows.
    """

    server: Server
    prompts: Sequence[Prompt]
    plan: Plan
    plain: Server | None = None
    subject: Subject | None = None
    numbered: Prompts = ()
    judged: Sequence[str] = tuple(MOVING)

    def checks(self) -> list[Check]:
        """One check for each control; what the server refuses is said to be refused."""
        free = SamplingParams(max_tokens=self.plan.length)
        still = replace(free, temperature=0.0)
        due, again, loose = (self._texts(params) for params in (still, still, free))
        steady = sum(not differ(one, two) for one, two in zip(due, again, strict=True))
        free_ones = sum(map(differ, due, loose))
        if 2 * free_ones < len(due):
            said = "texts at temperature 1 are those at 0"
            found = [Check(f"control {name}", "not looked at", said) for name in SURE]
        else:
            # As many as greedy texts themselves, and a few more, may part by rounding.
            ties = len(due) - steady + len(due) // 8
            found = list(self._sure(free, due, free_ones, ties))
        found += self._moving(still, due)
        for name, look in (
            ("logit_bias", self._bias),
            ("stop", self._stop),
            ("max_tokens", self._short),
            ("logprobs", self._logprobs),
        ):
            found.append(self._refusable(name, lambda look=look: look(still, due)))
        return found

    def _texts(
        self,
        params: SamplingParams,
        server: Server | None = None,
        logprobs: int | None = None,
        seeds_from: int = SAMPLED_FROM,
    ) -> list[Answer]:
        seed = self.plan.seed + seeds_from
        asks = [Ask(one, params, seed + i, logprobs) for i, one in enumerate(self.prompts)]
        return (server or self.server).all(asks)

    def _refusable(self, name: str, look: Callable[[], Check]) -> Check:
        try:
            return look()
        except EndpointRefused as error:
            return Check(f"control {name}", "refused", str(error))

    def _found(
        self,
        name: str,
        params: SamplingParams,
        texts: Sequence[Answer],
        wrong: Sequence[int],
        right: str,
    ) -> Check:
        if not wrong:
            return Check(f"control {name}", "lossless", f"all {len(texts)} texts {right}")
        at = wrong[0]
        where: dict[str, Any] = {
            "prompt": self.prompts[at],
            "params": {"temperature": params.temperature, **asked(params)},
            "seed": self.plan.seed + SAMPLED_FROM + at,
            "text": texts[at].text,
        }
        said = f"not so in {len(wrong)} of {len(texts)} texts: they {right}"
        evidence = {"texts": len(texts), "wrong": len(wrong)}
        return Check(f"control {name}", "control ignored", said, evidence, where)

    def _sure(
        self, free: SamplingParams, due: Sequence[Answer], free_ones: int, ties: int
    ) -> Iterator[Check]:
        """Under each of these every text is the greedy one, but for numeric ties.

        Where more part than should, and fewer than half of those that part without any control,
        they are asked for with another seed: a control that is ignored gives a third text, a near
        tie one of the two. A low temperature, which servers may bound, leaves near ties too.
        """
        for name, setting in SURE.items():

            def look(name: str = name, setting: dict[str, float] = setting) -> Check:
                params = replace(free, **setting)
                texts = self._texts(params)
                pairs = zip(due, texts, strict=True)
                wrong = [i for i, (one, two) in enumerate(pairs) if differ(one, two)]
                few = 2 * len(wrong) <= free_ones
                if few and len(wrong) > ties and name != "temperature":
                    again = self._texts(params, seeds_from=OTHER)
                    wrong = [
                        i for i in wrong if differ(due[i], again[i]) and differ(texts[i], again[i])
                    ]
                if len(wrong) <= ties or (few and name == "temperature"):
                    wrong = []
                right = f"are greedy at {name} {_of(setting)}"
                return self._found(name, params, texts, wrong, right)

            yield self._refusable(name, look)

    def _moving(self, still: SamplingParams, due: Sequence[Answer]) -> Iterator[Check]:
        """Greedy texts under penalties: held to the law, or to plain decoding, or only moved."""
        for name, setting in MOVING.items():

            def look(name: str = name, setting: dict[str, float] = setting) -> Check:
                params = replace(still, **setting)
                if self.subject is not None and name in self.judged:
                    found = greedy(self.subject, self.numbered, replace(params, temperature=1.0))
                    return replace(found, name=f"control {name}")
                texts = self._texts(params)
                if not any(map(differ, due, texts)):
                    where = {"prompt": self.prompts[0], "params": asked(params)}
                    said = f"{name} {_of(setting)} changes no text"
                    return Check(f"control {name}", "control ignored", said, {}, where)
                if self.plain is None:
                    return Check(f"control {name}", "lossless", "it changes texts")
                plain = self._texts(params, self.plain)
                wrong = [i for i in range(len(texts)) if differ(texts[i], plain[i])]
                if 2 * len(wrong) <= len(texts):
                    wrong = []
                return self._found(name, params, texts, wrong, "are plain decoding's")

            yield self._refusable(name, look)

    def _bias(self, still: SamplingParams, due: Sequence[Answer]) -> Check:
        if not all(answer.ids for answer in due):
            return Check("control logit_bias", "not looked at", "no token ids are told")
        firsts = sorted({answer.ids[0] for answer in due if answer.ids})
        params = replace(still, logit_bias=dict.fromkeys(firsts, FORBID))
        texts = self._texts(params)
        wrong = [i for i, answer in enumerate(texts) if set(firsts) & set(answer.ids or ())]
        return self._found("logit_bias", params, texts, wrong, "lack what it forbids")

    def _stop(self, still: SamplingParams, due: Sequence[Answer]) -> Check:
        texts: list[Answer] = []
        wrong: list[int] = []
        params = still
        for i, (prompt, answer) in enumerate(zip(self.prompts, due, strict=True)):
            half = answer.text[len(answer.text) // 2 :].strip()[:SHORT]
            if not half:
                continue
            params = replace(still, stop=(half,))
            texts.append(self.server.ask(Ask(prompt, params, i)))
            if texts[-1].text != answer.text[: answer.text.index(half)]:
                wrong.append(i)
        if not texts:
            return Check("control stop", "not looked at", "texts are empty")
        if len(wrong) <= len(texts) // 8:
            wrong = []
        return self._found("stop", params, due, wrong, "end before the stop string")

    def _short(self, still: SamplingParams, due: Sequence[Answer]) -> Check:
        params = replace(still, max_tokens=SHORT)
        texts = self._texts(params)
        wrong = [
            i
            for i, (one, whole) in enumerate(zip(texts, due, strict=True))
            if (len(one.ids) if one.ids is not None else one.num_tokens or 0) > SHORT
            or len(one.text) > len(whole.text)
        ]
        return self._found("max_tokens", params, texts, wrong, f"have at most {SHORT} tokens")

    def _logprobs(self, still: SamplingParams, due: Sequence[Answer]) -> Check:
        texts = self._texts(still, logprobs=TOP)
        if all(answer.names is None for answer in texts):
            return Check(
                "control logprobs", "control ignored", "none are told", {}, {"logprobs": TOP}
            )
        wrong = [i for i, answer in enumerate(texts) if not _all_told(answer)]
        right = f"have log-probabilities of each token and the {TOP} likeliest"
        return self._found("logprobs", still, texts, wrong, right)


def _all_told(answer: Answer) -> bool:
    names, told = answer.names or (), answer.logprobs or ()
    count = len(names) if answer.ids is None else len(answer.ids)
    # The end of a text may be told or not.
    near = answer.finish == "stop" and abs(len(names) - count) == 1
    return (len(names) == count or near) and len(told) == len(names) and all(answer.tops)


def _of(setting: dict[str, float]) -> str:
    return f"{next(iter(setting.values())):g}"
