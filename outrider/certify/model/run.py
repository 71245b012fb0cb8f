"""`certify model`: texts of a model, speculation on, held to the law they should have."""

from __future__ import annotations

import time
from dataclasses import replace

from outrider.certify.model.book import Book, set_controls
from outrider.certify.model.captured import captured
from outrider.certify.model.certain import ends, greedy, logprobs, seeds
from outrider.certify.model.plan import Plan, Progress
from outrider.certify.model.report import Check, Report
from outrider.certify.model.sampled import Sampling
from outrider.certify.model.subject import Prompts, Subject
from outrider.config import SamplingParams
from outrider.errors import EmptyPrompt, InvalidConfig


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
    texts = subject.texts(prompts, own, plan.seed)
    checks = [
        greedy(subject, prompts, own),
        ends(subject, prompts, own, plan, texts),
        seeds(subject, prompts, own, plan, texts),
        logprobs(subject, prompts, own, plan),
    ]
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
