"""What needs no statistics: greedy texts, seeds, log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from outrider.certify.model.book import Text, set_controls, without
from outrider.certify.model.plan import OTHER, Plan, asked
from outrider.certify.model.report import Check
from outrider.certify.model.signatures import Page
from outrider.certify.model.subject import Made, Prompts, Subject, made
from outrider.config import SamplingParams

FAR = 1e30
"""Nats, in place of what is no number."""
STRANGE = 25.0
"""Nats: texts that are less likely than this do not come twice by chance."""
COOL = 0.5
"""A temperature to ask for where the request has the one that engines fall back to."""
HEDGE = 0.05
"""Share of a bet on another law that is kept back, so that no token loses all of it."""


def greedy(
    subject: Subject, prompts: Prompts, params: SamplingParams, came: list[Made] | None = None
) -> Check:
    """Every token of greedy texts is the target's largest score, or nearly as large.

    `came` are texts of seed 0 at temperature 0; None = they are asked for.
    """
    own = replace(params, temperature=0.0)
    first = subject.texts(prompts, own, 0) if came is None else came
    worst, where, off = 0.0, dict[str, Any](), list[int]()
    for index, (prompt, text) in enumerate(zip(prompts, first, strict=True)):
        if not text.token_ids:
            continue
        texts = [Text(tuple(prompt), text.token_ids)]
        logits_NV = subject.target.logits(texts)
        scores_NV = subject.target.scores(logits_NV, texts, own)
        own_N = scores_NV.gather(1, torch.tensor(text.token_ids)[:, None]).squeeze(1)
        gaps_N = scores_NV.amax(1) - own_N
        wrong = (gaps_N > subject.near_tie).nonzero().squeeze(1)
        off += [index] if len(wrong) else []
        # What follows a wrong token is judged on its own, but the first is what to look at.
        at = int(wrong[0]) if len(wrong) else int(gaps_N.argmax())
        if float(gaps_N[at]) > worst:
            worst = float(gaps_N[at])
            where = {
                "prompt": list(prompt),
                "params": {"temperature": 0, **asked(own)},
                "position": at,
                "text": list(text.token_ids),
                "came": text.token_ids[at],
                "due": int(scores_NV[at].argmax()),
                "excuse": _excuse(subject, texts, own, at),
            }
    evidence = {"largest gap": worst, "near tie": subject.near_tie}
    if worst <= subject.near_tie:
        tie = f"; the largest gap is {worst:.2g}, a numeric tie" if worst > 0 else ""
        return Check("greedy", "lossless", f"every token is the target's own{tie}", evidence)
    if _drawn(subject, prompts, own, first, off):
        where["excuse"] = "temperature ignored"
    name = where["excuse"]
    said = f"token {where['position']} is {worst:.3g} below the target's own: logic, not rounding"
    if name is not None:
        return Check("greedy", "control ignored", f"{name}; {said}", evidence, where)
    return Check("greedy", "rule bias", said, evidence, where)


def _drawn(
    subject: Subject,
    prompts: Prompts,
    params: SamplingParams,
    first: Sequence[Made],
    off: Sequence[int],
) -> bool:
    """Whether most of the greedy texts that are off come otherwise with another seed."""
    again = subject.texts(prompts, params, OTHER)
    return 2 * sum(first[i].token_ids != again[i].token_ids for i in off) > len(off)


def _excuse(subject: Subject, texts: list[Text], params: SamplingParams, at: int) -> str | None:
    """What must go wrong with the controls for the token to be right."""
    logits_NV = subject.target.logits(texts)
    for name in set_controls(params):
        if name != "temperature":
            scores_NV = subject.target.scores(logits_NV, texts, without(params, name))
            if int(scores_NV[at].argmax()) == texts[0].output[at]:
                return f"{name} ignored"
    for late in range(1, at + 1):
        scores_NV = subject.target.scores(logits_NV, texts, params, late)
        if set_controls(params) and int(scores_NV[at].argmax()) == texts[0].output[at]:
            return f"controls {late} tokens late"
    return None


def ends(
    subject: Subject, prompts: Prompts, params: SamplingParams, plan: Plan, texts: list[Made]
) -> Check:
    """No text goes on behind its end or beyond max_tokens, and none is cut short.

    `texts` are those of the plan's seed.
    """
    for prompt, text in zip(prompts, texts, strict=True):
        where = {"prompt": list(prompt), "params": asked(params), "seed": plan.seed}
        where |= {"text": list(text.token_ids)}
        if len(text.token_ids) > plan.length:
            said = f"{len(text.token_ids)} tokens came where at most {plan.length} were asked for"
            return Check("ends", "control ignored", said, {}, where)
        own = () if params.ignore_eos else subject.target.ends
        last = {*own, *params.stop_token_ids}
        if passed := last & set(text.token_ids[:-1]):
            said = f"a text goes on behind its end, token {min(passed)}"
            return Check("ends", "rule bias", said, {}, where)
        if len(text.token_ids) < plan.length and not last & set(text.token_ids[-1:]):
            said = f"a text ends after {len(text.token_ids)} tokens without its end, which counts"
            return Check("ends", "rule bias", said, {}, where)
    return Check("ends", "lossless", "no text goes on behind its end, none is cut short")


def seeds(
    subject: Subject, prompts: Prompts, params: SamplingParams, plan: Plan, first: list[Made]
) -> Check:
    """A seed gives the same texts again, those that were `first`, and another seed others."""
    again, other = (subject.texts(prompts, params, seed) for seed in (plan.seed, plan.seed + OTHER))
    where = {"prompts": [list(p) for p in prompts], "params": asked(params), "seed": plan.seed}
    if subject.seeded and (parted := _parted(first, again)):
        return _unsteady(subject, prompts, params, plan, parted, where)
    pairs = zip(prompts, first, other, strict=True)
    if all(one.token_ids == two.token_ids for _, one, two in pairs):
        nats = sum(
            _surprise(subject, p, one, params) for p, one in zip(prompts, first, strict=True)
        )
        if nats > STRANGE:
            said = f"two seeds gave the same texts, which chance does once in e^{nats:.0f} times"
            return Check("seeds", "seed ignored", said, {"nats": nats}, where)
        return Check(
            "seeds", "lossless", f"texts are too sure to tell seeds apart ({nats:.1f} nats)"
        )
    told = "a seed gives its texts again, another seed others"
    return Check("seeds", "lossless", told if subject.seeded else "another seed gives other texts")


def _parted(first: Sequence[Made], again: Sequence[Made]) -> list[tuple[int, int]]:
    """Which texts are others the second time, and the first token of each that is."""
    found: list[tuple[int, int]] = []
    for index, (one, two) in enumerate(zip(first, again, strict=True)):
        if one.token_ids != two.token_ids:
            pairs = zip(one.token_ids, two.token_ids, strict=False)
            short = min(len(one.token_ids), len(two.token_ids))
            found.append((index, next((i for i, (x, y) in enumerate(pairs) if x != y), short)))
    return found


def _unsteady(
    subject: Subject,
    prompts: Prompts,
    params: SamplingParams,
    plan: Plan,
    parted: list[tuple[int, int]],
    where: dict[str, Any],
) -> Check:
    """A seed gave other texts the second time: most of them, or a few by rounding?"""
    index, position = parted[0]
    where |= {"index": index, "position": position}
    evidence: dict[str, Any] = {"parted": len(parted)}
    said = f"seed {plan.seed} gave {len(parted)} of {len(prompts)} texts otherwise the second "
    said += f"time, one from token {position} on"
    if 2 * len(parted) > len(prompts):
        return Check("seeds", "seed ignored", said, evidence, where)
    if subject.plain is not None:
        ours = (
            made(subject.plain, prompts, params, plan.seed, subject.target) for _ in ("one", "two")
        )
        evidence["plain from itself"] = unsteady = len(_parted(*ours))
        if unsteady:
            said += f"; {unsteady} of plain decoding's own as well"
            return Check("seeds", "numeric drift", said, evidence, where)
    return Check("seeds", "undecided", f"{said}: rounding or a fault", evidence, where)


def temperature(subject: Subject, prompts: Prompts, params: SamplingParams, plan: Plan) -> Check:
    """Whether temperatures are heard of, where texts at temperature 1 would not show it."""
    own, name = replace(params, temperature=COOL), "temperature"
    texts = [
        Text(tuple(prompt), text.token_ids)
        for prompt, text in zip(prompts, subject.texts(prompts, own, plan.seed), strict=True)
        if text.token_ids
    ]
    if not texts:
        return Check(name, "not looked at", "texts are empty")
    page = Page.of(texts, own, subject.target)
    due_N, warm_N = page.at(page.p_NV), page.at(page.law(params))
    # A token that its law forbids, maybe by rounding, counts as one that is half as likely.
    due_N = torch.maximum(due_N, warm_N / 2).clamp(min=1e-300)
    for_warm = float((HEDGE + (1 - HEDGE) * warm_N / due_N).log().sum())
    for_due = float((HEDGE + (1 - HEDGE) * due_N / warm_N.clamp(min=1e-300)).log().sum())
    evidence = {"nats for 1": for_warm, f"nats for {COOL}": for_due}
    if for_warm > STRANGE:
        said = f"texts asked for at {COOL} are those of 1, by e^{for_warm:.0f} to one"
        where = {"prompts": [list(one.prompt) for one in texts], "params": asked(own)}
        return Check(name, "control ignored", said, evidence, where | {"seed": plan.seed})
    if for_due < STRANGE:
        return Check(name, "not looked at", f"texts at {COOL} and 1 are too much alike", evidence)
    said = f"texts asked for at {COOL} are not those of 1, by e^{for_due:.0f} to one"
    return Check(name, "lossless", said, evidence)


def _surprise(subject: Subject, prompt: Sequence[int], text: Made, params: SamplingParams) -> float:
    if not text.token_ids:
        return 0.0
    page = Page.of([Text(tuple(prompt), text.token_ids)], params, subject.target)
    return float(-page.at(page.p_NV).clamp(min=1e-300).log().sum())


def logprobs(subject: Subject, prompts: Prompts, params: SamplingParams, plan: Plan) -> Check:
    """Log-probabilities that are told are the target's own."""
    own = replace(params, logprobs=1)
    furthest, where, told = 0.0, dict[str, Any](), 0
    for prompt, text in zip(prompts, subject.texts(prompts, own, plan.seed), strict=True):
        if text.logprobs is None or not text.token_ids:
            continue
        page = Page.of([Text(tuple(prompt), text.token_ids)], own, subject.target)
        raw_N = page.at(page.logits_NV.double().log_softmax(1))
        told_N = torch.tensor(text.logprobs, dtype=torch.float64)
        off_N = (raw_N - told_N).abs().nan_to_num(nan=FAR, posinf=FAR)
        told += len(raw_N)
        if float(off_N.max()) > furthest:
            furthest, at = float(off_N.max()), int(off_N.argmax())
            where = {
                "prompt": list(prompt),
                "params": asked(own),
                "seed": plan.seed,
                "position": at,
                "told": text.logprobs[at],
                "due": float(raw_N[at]),
            }
    if not told:
        return Check("logprobs", "not looked at", "none are told")
    bound = subject.near_tie
    evidence = {"largest difference": furthest, "bound": bound, "tokens": told}
    if furthest <= bound:
        return Check(
            "logprobs", "lossless", f"within {furthest:.2g} nats of the target's", evidence
        )
    said = f"off by up to {furthest:.3g} nats: not the target's own"
    return Check("logprobs", "control ignored", said, evidence, where)
