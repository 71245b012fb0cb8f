"""`certify self`: whether what is installed here still does what was proved, in half a minute."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import torch

from outrider import noise
from outrider.certify import pairs, paths, runs, tree_paths, vectors
from outrider.certify.adapters import own
from outrider.certify.model.plan import Plan
from outrider.certify.model.run import certify
from outrider.config import SamplingParams
from outrider.decoding import RULES, known_answers
from outrider.errors import MissingExtra
from outrider.llm import LLM, first_load
from outrider.models.bundled import bundled_path, eval_prompts
from outrider.noise import NoiseLedger

Progress = Callable[[str], None]
CASES, ROUNDS, TREES = 4, 300, 60
"""Golden cases of each rule and way, random rounds each rule decides beside its reference."""
TEXTS = 200
STRICT_TOKENS = 24
PROMPTS, PROMPT_TOKENS = 8, 16
LAW = Plan(within=0.1, length=12)


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the test: whether it holds, what was seen, and what it took."""

    name: str
    ok: bool
    said: str
    seconds: float = 0.0


@dataclass(slots=True)
class SelfReport:
    """All of them, and what they were run with."""

    versions: dict[str, str]
    parts: list[Part] = field(default_factory=list[Part])

    @property
    def ok(self) -> bool:
        """Whether every part holds."""
        return self.fault is None

    @property
    def fault(self) -> str | None:
        """The first part that does not hold, with what was seen; None where all do."""
        return next((f"{part.name}: {part.said}" for part in self.parts if not part.ok), None)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        parts = [
            {"name": p.name, "ok": p.ok, "said": p.said, "seconds": round(p.seconds, 2)}
            for p in self.parts
        ]
        return {"ok": self.ok, "versions": self.versions, "parts": parts}


def certify_self(progress: Progress = lambda _: None) -> SelfReport:
    """Rules beside references, noise addresses, strict bits and the law of the bundled pair.

    All but the first have a negative control. Without the bundled models the last two are left
    out, which the report says.
    """
    report = SelfReport({name: version(name) for name in ("outrider", "torch", "transformers")})
    started = time.perf_counter()
    for part in _parts():
        seconds = time.perf_counter() - started
        report.parts.append(Part(part.name, part.ok, part.said, seconds))
        progress(f"{part.name}: {part.said}")
        started = time.perf_counter()
    return report


def _parts() -> Iterator[Part]:
    yield known()
    yield golden()
    yield beside_references()
    yield addresses()
    try:
        bundled_path("target")
    except MissingExtra as error:
        yield Part("bundled pair", True, f"left out: {error}")
        return
    yield strict_bits()
    yield law()


def known() -> Part:
    """What the first load asks: rounds whose outcome is known."""
    fault = known_answers.fault()
    rounds = known_answers.TEXTS * len(known_answers.ANSWERS)
    return Part("known answers", fault is None, fault or f"{rounds} rounds decided as known")


def golden() -> Part:
    """Every rule answers the golden vectors."""
    cases = list(vectors.emit(CASES))
    found = vectors.judged(cases, [vectors.answer(case) for case in cases])
    first = f"; first {found.failures[0]}" if found.failures else ""
    return Part("golden vectors", found.ok, f"{found.right} right, {found.wrong} wrong{first}")


def beside_references() -> Part:
    """Every rule decides random rounds as its reference does; another rule does not."""
    compared, wrong = 0, list[str]()
    for name, rule in RULES.items():
        if rule.guarantee == "lossy":
            continue
        counts = [paths.compare(name, 7, ROUNDS, "dense", torch.float32)]
        if name in tree_paths.TREE_RULES:
            style, form = tree_paths.combinations_of(name)[0]
            counts.append(tree_paths.compare_trees(name, 7, TREES, style, form, torch.float32))
        compared += sum(count.rounds for count in counts)
        wrong += [f"{name} ({count.wrong})" for count in counts if count.wrong]
    control = paths.compare("block", 7, ROUNDS, "dense", torch.float32, RULES["token"])
    said = f"{compared} random rounds decided alike"
    if wrong:
        said = f"other decisions than the reference's: {', '.join(wrong)}"
    elif not control.wrong:
        said = "another rule passed for block: the comparison shows nothing"
    return Part("beside references", not wrong and control.wrong > 0, said)


def addresses() -> Part:
    """No address of the noise serves twice; a second use is noticed."""
    pair = pairs.small()
    try:
        with NoiseLedger() as ledger:
            for name in ("token", "block", "match"):
                # A seed of its own for each rule: the next text is another request.
                seeds = range(TEXTS * len(ledger.addresses), TEXTS * len(ledger.addresses) + TEXTS)
                runs.write(name, pair.target, pair.draft, seeds, 2, 8)
    except AssertionError as error:
        return Part("noise addresses", False, str(error))
    used = len(ledger.addresses)
    try:
        with NoiseLedger():
            for _ in range(2):
                noise.uniforms53(1, 0, noise.STREAM_EXTRA, 0, 0)
    except AssertionError:
        return Part("noise addresses", used > 0, f"{used} addresses, each used once")
    return Part("noise addresses", False, "a second use of an address went unnoticed")


def strict_bits() -> Part:
    """Under strict, greedy and seeded texts are plain decoding's."""
    with first_load.unchecked():
        llm = LLM.load("bundled", drafter="draft", strict=True)
    prompts = [llm.tokenizer.encode(text)[:PROMPT_TOKENS] for text in eval_prompts("code")[:4]]
    wanted = [
        SamplingParams(temperature=0, max_tokens=STRICT_TOKENS),
        SamplingParams(seed=1, max_tokens=STRICT_TOKENS),
    ]
    texts: list[list[tuple[int, ...]]] = []
    for depth in (None, 0):
        done = (llm.generate(prompts, params, depth=depth) for params in wanted)
        texts.append([one.token_ids for group in done for one in group])
    fast, plain = texts
    equal = sum(one == other for one, other in zip(fast, plain, strict=True))
    # The control: a greedy text is not the seeded one.
    told = fast[: len(prompts)] != fast[len(prompts) :]
    said = f"{equal} of {len(plain)} texts of {STRICT_TOKENS} tokens are plain decoding's"
    return Part("strict", equal == len(plain) and told, said)


def law() -> Part:
    """Sampled texts of the bundled pair have the target's law; a planted bias is found."""
    with first_load.unchecked():
        llm = LLM.load("bundled", drafter="draft")
    texts = eval_prompts("code")[:PROMPTS]
    prompts = [llm.tokenizer.encode(text)[:PROMPT_TOKENS] for text in texts]
    report = certify(own.subject(llm, "block"), prompts, SamplingParams(), LAW)
    shown = next((one for one in report.checks if one.verdict == report.verdict), report.control)
    said = report.checks[-1].said if report.verdict == "lossless" else f"{shown.name}: {shown.said}"
    # Undecided is a matter of chance, and nothing against it.
    fine = report.verdict in ("lossless", "undecided")
    return Part("law of the bundled pair", fine, said)
