"""LLM: text in, text out. The engine with a tokenizer around it."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch

from outrider.config import (
    SAMPLING,
    SAMPLING_ALIASES,
    SamplingParams,
    as_tokens,
    check_flag,
    check_rule,
    check_whole,
    counted,
    known_options,
    nearest,
    shown,
)
from outrider.control import Controller, ControlSettings, Costs
from outrider.control.measure import facts_of, measure_costs
from outrider.control.stored import place_of, store
from outrider.cores import spinning
from outrider.decoding import rule_named
from outrider.drafters import Drafter, NoDrafter, alternatives, names_alternatives
from outrider.engine import Emitter, Engine, Requests
from outrider.engine.decoder import as_drafter
from outrider.engine.settings import tree_budget
from outrider.errors import EmptyPrompt, InvalidConfig, UnsupportedModel, standing_at, warn
from outrider.llm.first_load import refusal
from outrider.llm.load import (
    Loaded,
    Placement,
    as_dtype,
    folder_of,
    load_drafter,
    plan_cache,
    share_cache,
    tokenizer_of,
)
from outrider.llm.options import Speculation
from outrider.llm.profile import read_profile
from outrider.models.grammar import Grammars
from outrider.models.hf import HuggingFaceTarget
from outrider.models.libllama import LibllamaTarget
from outrider.models.protocol import DraftModel
from outrider.models.text import Tokenizer
from outrider.tree import TreeBudget
from outrider.types import Completion, Delta, Request, SpeculativeMetrics

Prompt = str | Sequence[int]
OPTIONS = (
    "cache_bytes",
    "compile",
    "exit_threshold",
    "fallback",
    "k",
    "lossless",
    "max_depth",
    "max_texts",
    "min_acceptance_rate",
    "nodes",
    "pack",
    "prefill_chunk",
    "profile",
    "rule",
    "shape",
    "share_prefixes",
    "width",
)
BOUNDS = ("min_acceptance_rate", "max_depth", "fallback")
NAMED = ("model", "drafter", "device", "dtype", "strict", "speculative_config")
ALIASES = {
    "assistant_model": "drafter",
    "depth": "k",
    "draft_model": "drafter",
    "max_num_seqs": "max_texts",
    "num_assistant_tokens": "k",
    "num_speculative_tokens": "k",
    "torch_dtype": "dtype",
}
"""What others call the parameters of `LLM.load`."""

CALL_ALIASES = SAMPLING_ALIASES | {
    "k": "depth",
    "num_assistant_tokens": "depth",
    "num_speculative_tokens": "depth",
}
"""What others call the parameters of a call, and those of SamplingParams."""


NOTE = "; SamplingParams(...) has those of the law and of the end of a text"


@dataclass(frozen=True, slots=True)
class How:
    """What a call says of one prompt's speculation; None is the LLM's own."""

    depth: int | None
    rule: str | None
    drafter: str | None
    tenant: str | None
    trace: bool


class LLM:
    """A language model that decodes speculatively; `LLM.load` is the way to get one.

    One LLM may be used from several threads: their texts share rounds.

    Attributes:
        tokenizer: between text and tokens.
        rule: the verification rule where a request names none; None = what the request asks for.
    """

    def __init__(
        self,
        target: Loaded,
        tokenizer: Tokenizer,
        drafter: Drafter,
        *,
        k: int = 4,
        rule: str | None = None,
        width: int = 1,
        nodes: int | None = None,
        shape: Sequence[int] | None = None,
        lossless: bool = True,
        max_texts: int = 64,
        prefill_chunk: int = 512,
    ) -> None:
        for name, value in (("k", k), ("max_texts", max_texts), ("prefill_chunk", prefill_chunk)):
            check_whole(name, value, 1)
        check_flag("lossless", lossless)
        check_rule(rule)
        if rule is not None:
            rule_named(rule, lossless=lossless)
        self.tokenizer = tokenizer
        self.rule = rule
        self._target = target
        self._max_texts = max_texts
        self._refused: str | None = None
        self._grammars = Grammars.of(tokenizer, target.vocab_size)
        engine = Engine(
            target,
            drafter,
            Emitter(tokenizer),
            max_texts=max_texts,
            chunk=prefill_chunk,
            trees=tree_budget(k, width, nodes, shape),
        )
        self._requests = Requests(
            engine, depth=k, end_tokens=tokenizer.end_tokens(), lossless=lossless
        )

    @classmethod
    def load(
        cls,
        model: str | Path = "bundled",
        drafter: str | Drafter | DraftModel = "auto",
        *,
        device: str | None = None,
        dtype: str | torch.dtype | None = None,
        strict: bool | None = None,
        speculative_config: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> LLM:
        """Loads a model and who guesses for it.

        Args:
            model: a local folder, a GGUF file, or "bundled".
            drafter: a Drafter, a DraftModel, or a spec: none, draft, draft:PATH, bridge:PATH,
                ngram, suffix, recycle, grammar, int8, early-exit, early-exit:L, early-exit:PATH,
                eagle:PATH, medusa:PATH, mtp, mtp:PATH, auto; several together as a+b, or a,b to
                have the best of them in each round. auto and a,b draft nothing where that does not
                pay.
            device: where the models run; None = the CPU.
            dtype: "float32", "bfloat16", ...; None = bfloat16 where the processor has it.
            strict: one arithmetic class for everything, so that logits are equal bit for bit.
            speculative_config: vLLM's dictionary, instead of `drafter`, `k` and `rule`.
            **options: k, rule, width and nodes (of drafted trees; width=1 drafts chains), shape
                (the parent's row per node of the one shape of all trees, of which k levels are
                drafted, all by default), exit_threshold (early-exit stops drafting where its
                confidence is below), min_acceptance_rate, max_depth and fallback (bounds of what
                auto and a,b choose; with them one drafter alone is held to what it pays, too),
                profile (a file of `outrider plan --save`; what is given beside it counts instead),
                lossless (False lets rules through that change the law), max_texts, prefill_chunk,
                cache_bytes (of target and draft model together), pack (large weights laid out for
                the processor; on by default), compile (True makes machine code of the forwards and
                keeps it on disk, "auto", the default, takes what is there, False neither; on a GPU
                graphs with Triton's attention, that attention alone, neither), and
                share_prefixes (texts that begin alike read their beginning once; on by default).

        Raises:
            InvalidConfig: an unknown option, with the nearest known one; a value that cannot be
                meant; options that contradict each other.
            ModelError, UnsupportedModel, VocabularyMismatch, MissingExtra: what cannot be loaded.

        Under a new version of torch or transformers it is looked into once, in less than a second,
        whether noise, laws and rules decide as proved. Where they do not nobody guesses, which is
        warned of; `speculation_refused` has the reason. So is a machine whose cores others want
        while torch's threads spin.
        """
        for name in options:
            if name not in OPTIONS:
                raise InvalidConfig(
                    f"option {name!r} does not exist; options are {', '.join(OPTIONS)}"
                    + nearest(name, (*NAMED, *OPTIONS), ALIASES)
                )
        if "profile" in options:
            said = read_profile(options.pop("profile"))
            found = said.pop("drafter", drafter)
            drafter, options = found if drafter == "auto" else drafter, said | options
        if not isinstance(drafter, (str, Drafter)) and not isinstance(drafter, DraftModel):
            raise InvalidConfig(
                f"drafter={shown(drafter)}: a spec, a Drafter, or an object with vocab_size and "
                "propose(prefix, k, rng) is due; 'none' decodes plainly"
            )
        asked = Speculation(
            drafter if isinstance(drafter, str) else "none",
            options.pop("k", None),
            options.pop("rule", None),
            exit_threshold=options.pop("exit_threshold", None),
        )
        if speculative_config is not None:
            asked = _instead(asked, drafter, speculative_config)
        bounds = {name: options.pop(name) for name in BOUNDS if name in options}
        if asked.k is None and options.get("shape") is not None:
            asked = replace(asked, k=TreeBudget.of_shape(options["shape"]).levels or None)
        asked = replace(asked, control=_control(asked.drafter, drafter, bounds))
        cache_bytes = options.pop("cache_bytes", None)
        place = Placement(
            device,
            as_dtype(dtype),
            False if strict is None else strict,
            options.pop("pack", None),
            options.pop("share_prefixes", True),
            options.pop("compile", "auto"),
        )
        folder = folder_of(model)
        tokenizer = tokenizer_of(folder)
        target = cache(lambda: place.load(folder))
        if isinstance(drafter, str):
            drafter = load_drafter(asked, model, tokenizer, place, target)
        refused = refusal()
        drafter = NoDrafter() if refused is not None else as_drafter(drafter, target())
        share_cache(cache_bytes, target(), drafter)
        width = options.get("width", 1)
        k = asked.depth(width if isinstance(width, int) else 1)
        llm = cls(target(), tokenizer, drafter, k=k, rule=asked.rule, **options)
        spins = spinning(torch.get_num_threads()) if place.device in (None, "cpu") else None
        if spins is not None:
            warn(spins)
        if refused is not None:
            llm._refused = refused
            warn(refused)
        return llm

    def __repr__(self) -> str:
        """The model, what runs it, its arithmetic and place, and who guesses."""
        info = self._target.info()
        backend = "libllama" if isinstance(self._target, LibllamaTarget) else "transformers"
        return (
            f"LLM({str(self.tokenizer.folder)!r}, backend={backend!r}, dtype={info['dtype']!r}, "
            f"device={info['device']!r}, drafter={self.drafter.name!r}, k={self._requests.depth})"
        )

    @property
    def speculation_refused(self) -> str | None:
        """Why every text is decoded plainly, whatever was asked for; None where that is not so."""
        return self._refused

    @property
    def target(self) -> Loaded:
        """The model whose law every text has."""
        return self._target

    @property
    def drafter(self) -> Drafter:
        """Who guesses, where a request names nobody else."""
        return self._requests.engine.drafter

    @property
    def requests(self) -> Requests:
        """What its texts are asked of, for `outrider.control`."""
        return self._requests

    @property
    def metrics(self) -> SpeculativeMetrics:
        """Counts and stage times over everything made so far."""
        return self._requests.engine.metrics

    @known_options(*SAMPLING, aliases=CALL_ALIASES, note=NOTE)
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        depth: int | Sequence[int | None] | None = None,
        rule: str | Sequence[str | None] | None = None,
        drafter: str | Sequence[str | None] | None = None,
        tenant: str | Sequence[str | None] | None = None,
        trace: bool = False,
    ) -> list[Completion]:
        """Continues prompts, given as text or token ids.

        `sampling_params`, `depth`, `rule`, `drafter` and `tenant` are for all prompts, or a list of
        one per prompt; None is the LLM's own.

        Args:
            prompts: one prompt or several.
            sampling_params: the law and the end of texts; None = SamplingParams().
            depth: tokens drafted per round; 0 = plain decoding.
            rule: verification rule.
            drafter: who guesses: "none", a part of the LLM's own drafter, ngram, suffix, recycle,
                or several as a+b; nothing that a model would have to be loaded for.
            tenant: whose requests they are: `suffix` with a store drafts from earlier ones of the
                same tenant alone, unless the store is shared.
            trace: note every round in the completions' `trace`.

        Returns:
            One completion per prompt and sample, prompt-major.

        Raises:
            EmptyPrompt, PromptTooLong, TokenOutOfRange, InvalidConfig: before any work.
            NonFinite, OutOfMemory: one request failed; the others' completions are in the
                exception's attribute `completions`.
        """
        several = _several(prompts)
        each = _each(sampling_params, len(several))
        said = [
            _per_prompt(name, value, len(several))
            for name, value in (
                ("depth", depth),
                ("rule", rule),
                ("drafter", drafter),
                ("tenant", tenant),
            )
        ]
        how = [How(*one, trace=trace) for one in zip(*said, strict=True)]
        requests: list[Request] = []
        for i, one in enumerate(zip(several, each, how, strict=True)):
            with standing_at(f"prompts[{i}]" if len(several) > 1 else None):
                requests += self._of(*one)
        return self._requests.complete(requests)

    @known_options(*SAMPLING, aliases=CALL_ALIASES, note=NOTE)
    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        depth: int | None = None,
        rule: str | None = None,
        drafter: str | None = None,
        tenant: str | None = None,
        trace: bool = False,
    ) -> Iterator[Delta]:
        """Continues one prompt, round by round; `depth` and the others as in `generate`.

        Raises:
            InvalidConfig: more than one sample; and whatever `generate` raises.
        """
        several = _several(prompt)
        if len(several) > 1 and isinstance(prompt, (list, tuple)):
            raise InvalidConfig(
                f"prompt={reprlib.repr(prompt)}: a stream carries one prompt; use generate(...)"
            )
        (params,) = _each(sampling_params, 1)
        if params.n > 1:
            raise InvalidConfig(f"n={params.n}: a stream carries one text; use generate(...)")
        (request,) = self._of(prompt, params, How(depth, rule, drafter, tenant, trace))
        return self._requests.stream(request)

    def chat(
        self,
        messages: Sequence[Mapping[str, str]],
        sampling_params: SamplingParams | None = None,
        **how: Any,
    ) -> list[Completion]:
        """Answers a conversation through the model's chat template.

        `how` is `depth`, `rule`, `drafter`, `tenant` and `trace`, as in `generate`.

        Raises:
            InvalidConfig: a tokenizer without a chat template; and whatever `generate` raises.
        """
        return self.generate([self.tokenizer.chat(messages)], sampling_params, **how)

    def _of(self, prompt: Prompt, params: SamplingParams, how: How) -> list[Request]:
        """The checked requests of one prompt."""
        if isinstance(prompt, str):
            tokens = tuple(self.tokenizer.encode(prompt)) if prompt else ()
        else:
            tokens = as_tokens("prompt", prompt)
        if not tokens:
            raise EmptyPrompt("the prompt is empty; give at least one character to continue from")
        params = self._spelled(params)
        grammar = self._grammars.compiled(params)
        rule = self.rule if how.rule is None else how.rule
        if self._refused is not None:
            how = replace(how, depth=0, drafter=None)
        requests = [
            Request(
                tokens,
                params,
                sample,
                rule,
                how.depth,
                how.drafter,
                how.trace,
                grammar,
                how.tenant,
            )
            for sample in range(params.n)
        ]
        for request in requests:
            self._requests.check(request)
        return requests

    def measure_costs(self, prompts: Prompt | Sequence[Prompt], *, limit_s: float = 25.0) -> Costs:
        """Measures what rounds cost on this machine, and keeps it: `auto` begins with it next time.

        Args:
            prompts: of the lengths that matter.
            limit_s: seconds after which nothing new is measured.

        Raises:
            InvalidConfig: a drafter that chooses nothing; a folder that cannot be written.
        """
        drafters = self._chosen_among()
        several = [
            self.tokenizer.encode(one) if isinstance(one, str) else list(one)
            for one in _several(prompts)
        ]
        target = self._requests.engine.target
        costs = measure_costs(target, drafters, several, limit_s=limit_s)
        store(costs, self._facts(drafters))
        return costs

    @property
    def costs_file(self) -> Path:
        """The file in which `measure_costs` keeps what it measured, whether it is there or not.

        Raises:
            InvalidConfig: a drafter that chooses nothing.
        """
        return place_of(self._facts(self._chosen_among()))

    def _chosen_among(self) -> Sequence[Drafter]:
        drafter = self.drafter
        if not isinstance(drafter, Controller):
            raise InvalidConfig(
                f"drafter={drafter.name!r} chooses nothing, and needs no costs; load with "
                "drafter='auto', or with alternatives as a,b"
            )
        return drafter.drafters

    def _facts(self, drafters: Sequence[Drafter]) -> Mapping[str, Any]:
        """What measured costs belong to."""
        return facts_of(str(self.tokenizer.folder), self._target.info(), drafters)

    def update_weights(self, state: Mapping[str, torch.Tensor]) -> None:
        """Goes on with new weights of the target; texts under way build their caches anew.

        Args:
            state: some or all entries of the model's `state_dict()`, of any floating dtype.

        Raises:
            InvalidConfig: names or shapes that are not the model's; nothing has changed then.
            UnsupportedModel: a model with recurrent state.
        """
        target = self._target
        if not isinstance(target, HuggingFaceTarget):
            raise UnsupportedModel(
                f"the weights of {type(target).__name__} cannot be updated; load the model anew"
            )
        target.check_weights(state)
        with self._requests.engine.without_caches():
            target.update_weights(state)

    def _spelled(self, params: SamplingParams) -> SamplingParams:
        """The parameters with every bad word as token ids."""
        if not any(isinstance(word, str) for word in params.bad_words):
            return params
        words = [
            ids
            for word in params.bad_words
            for ids in (self.tokenizer.spellings(word) if isinstance(word, str) else [word])
        ]
        return replace(params, bad_words=tuple(words))

    def info(self) -> dict[str, Any]:
        """What runs, and how, for reports."""
        engine = self._requests.engine
        drafter = engine.drafter
        return {
            **self._target.info(),
            "cache": plan_cache(self._target, engine.drafter, self._max_texts),
            "model": str(self.tokenizer.folder),
            "drafter": {"name": engine.drafter.name, "trusted": engine.drafter.trusted},
            "k": self._requests.depth,
            "trees": None if engine.trees is None else asdict(engine.trees),
            "rule": self.rule,
            "lossless": self._requests.lossless,
            "speculation_refused": self._refused or "no",
        } | ({"control": drafter.report()} if isinstance(drafter, Controller) else {})


def _control(
    spec: str, drafter: str | Drafter | DraftModel, bounds: Mapping[str, Any]
) -> ControlSettings | None:
    """What a controller may choose; None where none is asked for.

    Raises:
        InvalidConfig: bounds of a choice that there is not.
    """
    if not isinstance(drafter, str):
        if bounds:
            raise InvalidConfig(
                f"{next(iter(bounds))} bounds what is chosen among specs, and drafter is an "
                "object; give outrider.control.Controller([...], ControlSettings(...)) as drafter"
            )
        return None
    if spec == "none" and bounds:
        raise InvalidConfig(
            f"drafter='none' and {next(iter(bounds))}={next(iter(bounds.values()))!r} contradict "
            "each other; give one"
        )
    chosen = names_alternatives(spec)
    if chosen and not alternatives(spec, ("auto",)):
        raise InvalidConfig(f"drafter={spec!r} names nobody to choose; 'none' decodes plainly")
    return ControlSettings(**bounds) if chosen or bounds else None


def _instead(
    asked: Speculation, drafter: str | Drafter | DraftModel, config: Mapping[str, Any]
) -> Speculation:
    """What a `speculative_config` says, where nothing else says otherwise."""
    meant = asked.updated(config)
    names_one = any(config.get(key) is not None for key in ("method", "model"))
    other_drafter = drafter != "auto" and meant.drafter != asked.drafter
    clashes = {
        "drafter": other_drafter or (names_one and not isinstance(drafter, str)),
        "k": asked.k is not None and meant.k != asked.k,
        "rule": asked.rule is not None and meant.rule != asked.rule,
    }
    for name, clash in clashes.items():
        if clash:
            raise InvalidConfig(
                f"{name} and speculative_config={dict(config)!r} contradict each other; give one"
            )
    return meant


def _per_prompt(name: str, value: Any, num_prompts: int) -> list[Any]:
    """One value of `name` for each prompt."""
    if not isinstance(value, (list, tuple)):
        return [value] * num_prompts
    each = list(cast("Sequence[Any]", value))
    if len(each) != num_prompts:
        raise InvalidConfig(
            f"{counted(num_prompts, 'prompt')} came with {counted(len(each), 'value')} of {name}; "
            "give one for all, or one per prompt"
        )
    return each


def _several(prompts: Any) -> list[Any]:
    """One prompt or several, as several; whole numbers, whatever holds them, are one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, (bytes, Mapping, Set)) or not isinstance(prompts, Iterable):
        raise InvalidConfig(
            f"prompts={prompts!r}: text, token ids, or a list of prompts of either kind is due"
        )
    several = list(cast("Iterable[Any]", prompts))
    # A prompt is text or has a length; a number, also one of an array, has none.
    tokens = several and not any(isinstance(item, str) or _ndim(item) for item in several)
    return [several] if tokens else several


def _ndim(item: Any) -> bool:
    """Whether an item holds others."""
    ndim = getattr(item, "ndim", None)
    return isinstance(item, Iterable) if ndim is None else ndim > 0


def _each(params: Any, num_prompts: int) -> list[SamplingParams]:
    """Sampling parameters of each prompt."""
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    each: list[Any] = list(params) if isinstance(params, (list, tuple)) else [params]
    for one in each:
        if not isinstance(one, SamplingParams):
            raise InvalidConfig(f"sampling_params={one!r}: SamplingParams(...) is due")
    if len(each) != num_prompts:
        raise InvalidConfig(
            f"{counted(num_prompts, 'prompt')} came with {len(each)} sampling params; give one for "
            "all, or one per prompt"
        )
    return each
