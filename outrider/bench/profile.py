"""Where a step's time goes: stages timed from within, one after another, so that they add up.

A clock charges every moment to the stage entered last. Hooks tell it the stages: they stand around
the linear layers, the attention op, the forwards, the controls and draws while a profile is taken,
and are gone afterwards. What they cost is measured by the same texts made without them.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import outrider.engine.engine as engine_module
from outrider.bench.machine import read_bandwidth
from outrider.config import SamplingParams
from outrider.engine.controls import Controls
from outrider.engine.draws import GroupDraws
from outrider.engine.engine import Engine
from outrider.engine.group import Scores
from outrider.engine.laps import Laps, Stage
from outrider.errors import InvalidConfig, UnsupportedModel
from outrider.llm import LLM
from outrider.llm.load import draft_models
from outrider.models.attention_op import Forward, current
from outrider.models.calls import Times
from outrider.models.chain import PackageChain
from outrider.models.compiled import CompiledForward
from outrider.models.hf import HuggingFaceTarget
from outrider.models.libllama import LibllamaTarget
from outrider.models.packing import FusedLinear, OwnLinear, PackedLinear
from outrider.models.quantised import Int8Linear
from outrider.models.strict import SlabLinear

PARTS = ("target", "draft", "round")
FORWARD = ("linears", "attention", "head", "rest", "plan")
STAGES: dict[tuple[str, str], str] = {
    **{("target", name): f"target: {name}" for name in FORWARD},
    **{("draft", name): f"draft: {name}" for name in FORWARD},
    ("draft", "guesses"): "draft: guesses",
    ("round", "sampling"): "sampling",
    ("round", "verify"): "verify",
    ("round", "commit"): "commit",
    ("round", "other"): "other",
}
"""All stages by part and name, in the order of a table, and what a table calls them."""

MEANINGS = {
    "linears": "products with weights inside the layers",
    "attention": "writing keys and values, attending to those cached",
    "head": "the output layer",
    "rest": "what else the forward does: embedding, norms, rotations, gates, calls between them",
    "plan": "where rows go and what they may see; staging them",
    "guesses": "what the drafter does outside of forwards",
    "sampling": "logits to laws: controls, temperature, truncation, draws of drafted tokens",
    "verify": "what the rule keeps, and the records of it",
    "commit": "tokens and caches moved on, text handed out",
    "other": "the rest of the wall: admission, grouping, the call around it",
}
OTHER = ("round", "other")
# The stage of a round behind each of its laps.
_BEHIND: dict[Stage, tuple[str, str]] = {
    "draft_s": ("target", "plan"),
    "score_s": ("round", "verify"),
    "verify_s": ("round", "commit"),
    "commit_s": OTHER,
}


@dataclass(slots=True)
class Spent:
    """What one stage took."""

    seconds: float = 0.0
    calls: int = 0
    num_bytes: int = 0


def _no_stages() -> dict[tuple[str, str], Spent]:
    return {key: Spent() for key in STAGES}


@dataclass(slots=True)
class Book:
    """What some steps took, stage by stage."""

    steps: int = 0
    stages: dict[tuple[str, str], Spent] = field(default_factory=_no_stages)

    @property
    def wall_s(self) -> float:
        """All of it."""
        return sum(spent.seconds for spent in self.stages.values())


class Clock:
    """Charges the time since it was last asked to the stage under way.

    Steps in which a prompt is read are booked apart from the others. `part` is whose forwards these
    are at the moment: the target's, or those of who drafts.
    """

    def __init__(self) -> None:
        self.decoding, self.reading = Book(), Book()
        self.part = "target"
        self._book, self._at = self.reading, OTHER
        self._last = time.perf_counter()

    def switch(self, stage: tuple[str, str]) -> tuple[str, str]:
        """Another stage from here on; returns the one that was under way."""
        now = time.perf_counter()
        before, self._at = self._at, stage
        self._book.stages[before].seconds += now - self._last
        self._last = now
        return before

    def count(self, stage: tuple[str, str], num_bytes: int) -> None:
        """One call of a stage, and what it has read."""
        spent = self._book.stages[stage]
        spent.calls += 1
        spent.num_bytes += num_bytes

    def lay_aside(self, stage: tuple[str, str], seconds: float, calls: int, num_bytes: int) -> None:
        """So much of the stage under way was another's: calls that took their own time."""
        self._book.stages[self._at].seconds -= seconds
        spent = self._book.stages[stage]
        spent.seconds += seconds
        spent.calls += calls
        spent.num_bytes += num_bytes

    def step(self, *, reads: bool) -> None:
        """A step begins."""
        self.switch(OTHER)
        self._book = self.reading if reads else self.decoding
        self._book.steps += 1
        self.part = "target"


@dataclass(frozen=True, slots=True)
class Stages:
    """One stage of a step: means over the steps that read no prompt.

    Attributes:
        gb_per_s: bytes read over its time; None where none are counted.
        of_bandwidth: that over the machine's; above 1 where bytes stay in the processor's cache.
    """

    part: str
    stage: str
    ms: float
    share: float
    calls: float
    num_bytes: float
    gb_per_s: float | None
    of_bandwidth: float | None


@dataclass(frozen=True, slots=True)
class Profile:
    """Where the time of a step went, and what was there beside it.

    Attributes:
        stages: in the order of `STAGES`, those that took any time.
        ms_per_step: the sum of the stages.
        ms_without_hooks: a step of the same texts without hooks inside it.
        steps, tokens: of one run: steps that read no prompt, and all tokens made.
        reading_ms: the steps that read prompts, together, without hooks.
        bandwidth_gb_s: what the machine reads at best.
        notes: what the stages do not hold.
    """

    stages: tuple[Stages, ...]
    ms_per_step: float
    ms_without_hooks: float
    steps: int
    tokens: int
    reading_ms: float
    bandwidth_gb_s: float
    notes: tuple[str, ...]


def profile(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    *,
    batch: int = 1,
    repeats: int = 1,
    bandwidth: float | None = None,
) -> Profile:
    """Makes the texts of some prompts, `batch` at a time, with and without hooks in turn.

    One untimed run comes first. `bandwidth` in bytes per second is measured where it is not given.

    Raises:
        InvalidConfig: no prompt, a batch below 1, or no step but those that read prompts.
        UnsupportedModel: a model that is not on the processor, whose calls return before their end.
    """
    if not prompts or batch < 1:
        raise InvalidConfig(f"{len(prompts)} prompts in batches of {batch}; give one at least")
    target = llm.target
    if isinstance(target, LibllamaTarget):
        raise UnsupportedModel(
            "profile: a GGUF file's forward is one call of libllama, which nothing looks into; "
            "give a model folder"
        )
    if target.device.type != "cpu":
        raise UnsupportedModel(
            f"profile: the target is on {target.device}, whose calls return before they are done; "
            "use device='cpu'"
        )
    bandwidth = read_bandwidth() if bandwidth is None else bandwidth

    def texts() -> int:
        return sum(
            len(done.token_ids)
            for first in range(0, len(prompts), batch)
            for done in llm.generate([list(p) for p in prompts[first : first + batch]], sampling)
        )

    texts()
    bare, full, tokens = Clock(), Clock(), 0
    for i in range(repeats):
        for clock in (bare, full) if i % 2 == 0 else (full, bare):
            with hooked(llm, clock, inside=clock is full):
                tokens = texts()
                clock.switch(OTHER)
    return _profile(bare, full, tokens, repeats, bandwidth, _notes(llm))


@contextmanager
def hooked(llm: LLM, clock: Clock, *, inside: bool = True) -> Iterator[None]:
    """Lets the clock run, with hooks in the llm that tell it the stages; they go in the end.

    `inside=False` tells it where steps begin, and nothing else.
    """
    engine: Engine = llm._requests.engine
    with ExitStack() as placed:
        placed.enter_context(_instead(engine, "step", _stepping(engine, clock)))
        for owner, name, call in _hooks(llm, clock) if inside else ():
            placed.enter_context(_instead(owner, name, call))
        for package in _packages(llm) if inside else ():
            times = placed.enter_context(package.timed())
            placed.enter_context(_instead(package, "outputs", _told(package, times, clock)))
        clock._last = time.perf_counter()
        yield


@contextmanager
def _instead(owner: Any, name: str, call: Any) -> Iterator[None]:
    """Another attribute of an object, class or module; what the object had itself comes back."""
    own = vars(owner)
    had, before = name in own, own.get(name)
    setattr(owner, name, call)
    try:
        yield
    finally:
        if had:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


def _stepping(engine: Engine, clock: Clock) -> Callable[[], None]:
    step = engine.step

    def stepping() -> None:
        scheduler = engine._scheduler
        fresh = any(text.num_output == 0 for text in scheduler.active)
        clock.step(reads=fresh or bool(scheduler.waiting))
        try:
            step()
        finally:
            clock.switch(OTHER)

    return stepping


def _hooks(llm: LLM, clock: Clock) -> Iterator[tuple[Any, str, Any]]:
    """Owners, names of their attributes, and what stands there while a profile is taken."""

    class Told(Laps):
        """Laps that tell the clock as well."""

        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            clock.part = "draft"
            clock.switch(("draft", "guesses"))

        def __call__(self, stage: Stage) -> None:
            super().__call__(stage)
            clock.part = "target"
            clock.switch(_BEHIND[stage])

    def timed(owner: Any, name: str, part: str | None, stage: str, read: Any = None) -> Any:
        call = getattr(owner, name)

        @functools.wraps(call)
        def timing(*arguments: Any, **named: Any) -> Any:
            key = (part or clock.part, stage)
            before = clock.switch(key)
            try:
                return call(*arguments, **named)
            finally:
                clock.switch(before)
                clock.count(key, 0 if read is None else read(*arguments))

        return owner, name, timing

    yield engine_module, "Laps", Told
    for owner, name in (
        (Controls, "probs"),
        (Controls, "adjusted"),
        (GroupDraws, "sample"),
        (GroupDraws, "laws_of"),
        (Scores, "__init__"),
        (Scores, "laws"),
    ):
        yield timed(owner, name, "round", "sampling")
    yield timed(Forward, "attend", None, "attention", cached_bytes)
    yield timed(PackageChain, "__call__", None, "rest")
    for model in _models(llm):
        inside = isinstance(model, HuggingFaceTarget)
        yield timed(model, "score", None, "plan" if inside else "rest")
        if inside:
            yield timed(model, "_forward", None, "rest")
        network = getattr(model, "model", None)
        if isinstance(network, nn.Module):
            for linear, stage in linears_of(network):
                size = weight_bytes(linear)
                yield timed(linear, "forward", None, stage, lambda *_, size=size: size)


def _packages(llm: LLM) -> list[CompiledForward]:
    """The machine code that runs, which times its own calls: they pass no hook."""
    models = (model for model in _models(llm) if isinstance(model, HuggingFaceTarget))
    return [package for model in models for package in model.packages]


def _told(package: CompiledForward, times: Times, clock: Clock) -> Callable[..., list[Tensor]]:
    """A package's forward, whose calls are laid aside by their stages."""
    outputs = package.outputs
    stages = {id(linear): stage for linear, stage in linears_of(package.model)}

    def telling(inputs: list[Tensor]) -> list[Tensor]:
        found = outputs(inputs)
        *linears, (seconds, calls) = times.taken()
        for linear, (own_s, own_calls) in zip(package.linears, linears, strict=True):
            if own_calls:
                stage = clock.part, stages[id(linear)]
                clock.lay_aside(stage, own_s, own_calls, own_calls * weight_bytes(linear))
        if calls:
            # Layers that are not called directly pass a hook, and so does what they read.
            read = cached_bytes_of_all(current()) * calls // max(1, len(current().cache.pools))
            clock.lay_aside((clock.part, "attention"), seconds, calls, read)
        return found

    return telling


def _models(llm: LLM) -> list[Any]:
    """Target and draft models, each once."""
    found = (llm.target, *draft_models(llm.drafter))
    return list({id(model): model for model in found}.values())


def linears_of(network: Any) -> list[tuple[nn.Module, str]]:
    """The linear layers that are called, each once, as `linears` or `head`."""
    head = network.get_output_embeddings()
    inner = head.inner if isinstance(head, SlabLinear) else head
    found: dict[int, tuple[nn.Module, str]] = {}
    for module in network.modules():
        layer = module._fusion.linear if isinstance(module, FusedLinear) else module
        if isinstance(layer, (OwnLinear, nn.Linear)):
            found[id(layer)] = layer, "head" if layer is inner else "linears"
    return list(found.values())


def weight_bytes(linear: Any) -> int:
    """Bytes of a linear layer's weight and bias as they are read."""
    bias = getattr(linear, "bias", None)
    numbers = linear.in_features * linear.out_features
    if isinstance(linear, Int8Linear):
        return numbers
    dtype = linear.dtype if isinstance(linear, PackedLinear) else linear.weight.dtype
    return numbers * dtype.itemsize + (bias.nbytes if isinstance(bias, torch.Tensor) else 0)


def cached_bytes(forward: Forward, layer: int, _: Any, keys: Any, values: Any, *__: Any) -> int:
    """Bytes of the keys and values that a layer's rows see, read once for all rows of a text."""
    of_token = sum(rows[0, :, 0].numel() * rows.element_size() for rows in (keys, values))
    reach = forward.reaches.get(layer)
    return of_token * sum(
        span.slots.count - span.visible(reach, keys.device).first for span in forward.plan.spans
    )


def cached_bytes_of_all(forward: Forward) -> int:
    """The same of all layers of a forward."""
    return sum(
        cached_bytes(forward, layer, None, pool.keys[None], pool.values[None])
        for layer, pool in forward.cache.pools.items()
    )


def _notes(llm: LLM) -> tuple[str, ...]:
    found: list[str] = []
    for model in _models(llm):
        if not isinstance(model, HuggingFaceTarget):
            continue
        name = model.model.config.model_type
        if model._door.name != "outrider":
            found.append(f"the {name} model computes attention itself: it is in the rest")
        plain = any(type(m) is nn.Linear for m in model.model.modules())
        if plain and model.info()["compiled"]:
            found.append(f"plain linear layers of the compiled {name} model are in the rest")
    return tuple(dict.fromkeys(found))


def _profile(
    bare: Clock, full: Clock, tokens: int, repeats: int, bandwidth: float, notes: tuple[str, ...]
) -> Profile:
    book = full.decoding
    if not book.steps:
        raise InvalidConfig("no step but those that read prompts; ask for more tokens a text")

    def stage(key: tuple[str, str], spent: Spent) -> Stages:
        rate = spent.num_bytes / spent.seconds if spent.num_bytes else None
        return Stages(
            part=key[0],
            stage=key[1],
            ms=1e3 * spent.seconds / book.steps,
            share=spent.seconds / book.wall_s,
            calls=spent.calls / book.steps,
            num_bytes=spent.num_bytes / book.steps,
            gb_per_s=None if rate is None else rate / 1e9,
            of_bandwidth=None if rate is None else rate / bandwidth,
        )

    return Profile(
        stages=tuple(stage(key, spent) for key, spent in book.stages.items() if spent.seconds),
        ms_per_step=1e3 * book.wall_s / book.steps,
        ms_without_hooks=1e3 * bare.decoding.wall_s / bare.decoding.steps,
        steps=book.steps // repeats,
        tokens=tokens,
        reading_ms=1e3 * bare.reading.wall_s / repeats,
        bandwidth_gb_s=bandwidth / 1e9,
        notes=notes,
    )
