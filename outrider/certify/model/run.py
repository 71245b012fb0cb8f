"""`certify model`: texts of a model, speculation on, held to the law they should have."""

from __future__ import annotations

import time
from dataclasses import replace

from outrider.certify.model.book import PLAIN, Book, Text, set_controls
from outrider.certify.model.captured import captured
from outrider.certify.model.certain import ends, greedy, logprobs, seeds, temperature
from outrider.certify.model.plan import Plan, Progress
from outrider.certify.model.report import Check, Report
from outrider.certify.model.sampled import Sampling
from outrider.certify.model.subject import Made, Prompts, Subject
from outrider.config import SamplingParams
from outrider.errors import EmptyPrompt, InvalidConfig

SOME = 4
"""Texts whose scores are looked at for how large they are."""


def certify(
    subject: Subject,
    prompts: Prompts,
    params: SamplingParams,
    plan: Plan | None = None,
    progress: Progress = lambda _: None,
) -> Report:
    """Holds a subject to the law of plain decoding under `params`.

    Greedy texts are held to the target's own choice token by token, seeds to their promise,
    log-probabilities to the target's, what the rule makes of rows it was given to the law that is
    due there, if the subject can show them, and sampled texts, token by token, to the law that the
    target's book gives given the text before. It stops when the law is refuted or shown to hold
    within `plan.within`, whichever comes first, or when the budget is spent.

    Args:
        subject: who is certified.
        prompts: token ids; several, so that one odd text decides nothing.
        params: the controls; of `max_tokens`, `n`, `seed` and `stop` the plan's are used.
        plan: how long, how sure; None = Plan().
        progress: called with a line now and then.

    Raises:
        EmptyPrompt, InvalidConfig: nothing to certify; a grammar; a control it does not have.
        PromptTooLong: a text that the target or the draft model could not read.
        ModelError: the subject returned what is no text.
    """
    plan = Plan() if plan is None else plan
    if not prompts or not all(len(prompt) for prompt in prompts):
        raise EmptyPrompt("certify needs at least one prompt, none of them empty")
    if params.temperature == 0:
        raise InvalidConfig("temperature=0: greedy texts are certified anyway; name a temperature")
    if any(isinstance(word, str) for word in params.bad_words):
        raise InvalidConfig("bad_words as text: give token ids here, as there is no tokenizer")
    subject.refuse(params)
    subject.hold(prompts, plan.length)
    started = time.perf_counter()
    own = replace(
        params, max_tokens=plan.length, n=1, seed=None, stop=(), logprobs=None, logprobs_mode="raw"
    )
    cold = replace(own, temperature=0.0)
    texts, still = subject.texts(prompts, own, plan.seed), subject.texts(prompts, cold, 0)
    ended = ends(subject, prompts, own, plan, texts)
    if ended.verdict == "lossless":
        ended = ends(subject, prompts, cold, replace(plan, seed=0), still)
    subject = _rounding(subject, prompts, texts)
    checks = [
        greedy(subject, prompts, own, still),
        ended,
        seeds(subject, prompts, own, plan, texts),
        logprobs(subject, prompts, own, plan),
    ]
    if own.temperature == PLAIN.temperature and not subject.obeys:
        checks.append(temperature(subject, prompts, own, plan))
    capture = None if subject.capture is None else subject.capture(prompts, own, plan.seed)
    if capture is not None and capture.rows and isinstance(subject.target, Book):
        checks.append(captured(subject.target, capture, own, subject.near_tie))
    for check in checks:
        progress(f"{check.name}: {check.said}")
    if "nats" in checks[2].evidence:
        said = "not looked at: texts of different seeds are the same"
        sampled = control = Check("sampled law", "undecided", said)
    else:
        sampled, control = Sampling(subject, prompts, own, plan, progress).checks()
    checks.append(sampled)
    said = {name: getattr(own, name) for name in ("temperature", *set_controls(own))}
    seconds = time.perf_counter() - started
    return Report(subject.name, said, plan.within, plan.alpha, tuple(checks), control, seconds)


def _rounding(subject: Subject, prompts: Prompts, texts: list[Made]) -> Subject:
    """The subject, near ties at least as wide as the last digit of its target's scores."""
    if not isinstance(subject.target, Book):
        return subject
    pairs = zip(prompts, texts, strict=True)
    came = [Text(tuple(prompt), text.token_ids) for prompt, text in pairs if text.token_ids]
    near = subject.target.last_digit(came[:SOME])
    return replace(subject, near_tie=max(subject.near_tie, near))
