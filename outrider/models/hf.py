"""A Hugging Face causal language model as a target: its own forward, our attention inside.

The model's code stays its own; only its attention implementation is set to "outrider", which keeps
keys and values in block pools. A model whose attention does not go through that door keeps its own
over the same blocks; what cannot be rolled back is refused by name.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from outrider import host
from outrider.cache import BLOCK_SLOTS, CacheManager
from outrider.errors import InvalidConfig, ModelError, OutOfMemory, UnsupportedModel, warn
from outrider.models.adopting import as_it_was_if_refused, restore_layers
from outrider.models.ahead import Ahead, Begun
from outrider.models.attention_cpu import attend_cpu
from outrider.models.attention_op import Body, PoolBody
from outrider.models.attention_strict import STRICT_BLOCK, StrictBody
from outrider.models.base import Rows, Taps, Target, check_tokens
from outrider.models.capability import (
    check_by_looking,
    check_logits,
    failed_trial,
    has_experts,
    is_close,
    keeps_recurrent_state,
    own_logits,
    refuse_experts,
    refuse_slab,
    row_errors,
    through_interface,
    through_slab,
)
from outrider.models.chain import CPU, GraphChain, PackageChain
from outrider.models.compiled import CompiledForward, Part, Tapped, compiled_forward
from outrider.models.context import context_of
from outrider.models.device import device_of, give_back_memory, pick_device
from outrider.models.doors import Door, InterfaceDoor
from outrider.models.folder import auto_class, model_folder, no_progress_bar, unreadable
from outrider.models.graphs import BodyMaker, GraphedForward, graphed_forward, triton_body
from outrider.models.layer_gate import LayerGate, Passed
from outrider.models.layer_parts import RunningPart
from outrider.models.packages import first_line
from outrider.models.packing import (
    PackedLinear,
    arrange_linears,
    join_linears,
    restore_linears,
    use_product,
    uses_product,
)
from outrider.models.plan import Plan, chains_behind, make_plan
from outrider.models.product import Product, product
from outrider.models.reach import Reach
from outrider.models.recurrent import RecurrentTarget
from outrider.models.regimes import TwoRegimes
from outrider.models.registration import register
from outrider.models.strict import (
    STRICT_ROWS,
    SlabLinear,
    rows_keep_their_bits,
    slab_linears,
)
from outrider.models.trial import TrialTexts, trial_rows, trial_texts, trial_wanted
from outrider.models.weights import WeightNames

if TYPE_CHECKING:
    from jaxtyping import Float, Int64

log = logging.getLogger(__name__)

NOT_STRICT = (
    "compile=True and strict=True exclude each other: the same bits for any number of rows are "
    "kept by the model's own forward alone; leave one out"
)

EXPERT_TRIALS = 8
"""Texts a mixture of experts is tried on before it is refused."""

Faster = CompiledForward | GraphedForward
"""A forward kept for use again: machine code of a processor, graphs of a GPU."""


class HuggingFaceTarget(Target):
    """A causal language model of transformers behind `score`, `commit` and `discard`.

    The wrapped model's attention implementation is changed to "outrider" for good; its own forward
    and `generate` still work. A model that is refused is left as it was. `cache_bytes` bounds the
    block pools, None is no bound; `share_prefixes` lets texts that begin with the same tokens share
    their blocks. `arrange=False` leaves the linear layers the model's own.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        strict: bool = False,
        pack: bool = True,
        arrange: bool = True,
        cache_bytes: int | None = None,
        share_prefixes: bool = True,
    ) -> None:
        register()
        check_by_looking(model)
        if strict:
            refuse_experts(model)
        self.model = model
        self.strict = strict
        config = model.config.get_text_config()
        self.vocab_size = int(config.vocab_size)
        context = context_of(config)
        self.max_length = context.max_length
        self.device = device_of(model)
        self.dtype = model.dtype
        # Keys of one text under short and under long frequencies are not each other's.
        share_prefixes = share_prefixes and context.switch is None
        self._cache = CacheManager(share_prefixes=share_prefixes)
        self.prefix_block = BLOCK_SLOTS if share_prefixes else None
        self._texts = (
            self._cache
            if context.switch is None
            else TwoRegimes(self._cache, self._read, context.switch)
        )
        self._long_position = context.switch or 0
        self._picks_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._door: Door
        self._body: Body = attend_cpu
        self._pack = pack
        self._arranges = arrange and not (strict and host.on_gpu(self.device))
        self._align, self._row_multiple = 1, 1
        self._ahead: Ahead | None = None
        self._begun: Begun | None = None
        self._compiled: Faster | None = None
        self._product: Product | None = None
        self._gpu_body: BodyMaker | None = None
        self._builds = False
        # Compiled forwards that give hidden states too, by their layers; None where there is none.
        self._compiled_taps: dict[tuple[int, ...], Faster | None] = {}
        self._compiled_parts: list[CompiledForward] = []
        self._part: RunningPart | None = None
        self.compilations = 0
        self._taps: Taps | None = None
        self._gate: LayerGate | None = None
        self.num_parameters = model.num_parameters()
        with as_it_was_if_refused(model):
            model.eval()
            self._adopt()
            self.limit_cache(cache_bytes)

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        strict: bool = False,
        pack: bool = True,
        cache_bytes: int | None = None,
        share_prefixes: bool = True,
    ) -> HuggingFaceTarget | RecurrentTarget:
        """Load a local model folder; a model with recurrent state becomes a `RecurrentTarget`.

        `dtype` None is bfloat16 where the device computes in it, else float32; `device` None is the
        CPU.

        Raises:
            InvalidConfig: a device this machine has not; `cache_bytes` for recurrent state.
            ModelError: the folder is no model, or its files cannot be read.
            UnsupportedModel: the architecture cannot be used.
        """
        folder = model_folder(path)
        device = pick_device("cpu" if device is None else device)
        known_as = auto_class(folder)
        try:
            with no_progress_bar():
                model: PreTrainedModel = known_as.from_pretrained(
                    folder, dtype=dtype or default_dtype(device), local_files_only=True
                )
            model.to(device=device)  # pyright: ignore[reportCallIssue]
        except Exception as error:
            raise unreadable(folder, error) from error
        if keeps_recurrent_state(model):
            refuse_cache_bytes(cache_bytes, model.config.model_type)
            return RecurrentTarget(model, strict=strict, pack=pack)
        made = cls(
            model,
            strict=strict,
            pack=pack,
            cache_bytes=cache_bytes,
            share_prefixes=share_prefixes,
        )
        give_back_memory()
        return made

    def _adopt(self) -> None:
        texts = trial_texts(self.vocab_size, self.device)
        wanted = self._own_rows(texts)
        self._door = self._choose_door(texts)
        self._weights = WeightNames.of(self.model)
        self._arrange_linears()
        errors = row_errors(self._try_out(texts), wanted)
        if has_experts(self.model):
            errors = self._try_again(errors)
        check_logits(self.model, errors)
        if self.strict:
            self._make_strict()
            check_logits(self.model, row_errors(trial_rows(self, texts), wanted))

    def _own_rows(self, texts: TrialTexts) -> Tensor:
        own = [own_logits(self.model, text) for text in (texts.main, texts.other)]
        return trial_wanted(*own)

    def _try_again(self, errors: Tensor) -> Tensor:
        """Return each row's smallest error over other texts, until all are small.

        A last bit may send a row to another expert. That hits a row here and there; a key that is
        hidden or a position that is wrong hits the same rows in every text.
        """
        for attempt in range(1, EXPERT_TRIALS):
            if is_close(self.model, float(errors.max())):
                break
            texts = trial_texts(self.vocab_size, self.device, attempt)
            again = row_errors(trial_rows(self, texts), self._own_rows(texts))
            errors = torch.minimum(errors, again)
        return errors

    def _choose_door(self, texts: TrialTexts) -> Door:
        attention = self.model.config._attn_implementation
        found = through_interface(self.model, texts.main)
        if isinstance(found, Door):
            return found
        if self.model.config._attn_implementation != attention:
            self.model.set_attn_implementation(attention or "eager")
        door = through_slab(self.model, found)
        if self.strict:
            refuse_slab(self.model)
        return door

    def _try_out(self, texts: TrialTexts) -> Tensor:
        try:
            return trial_rows(self, texts)
        except RuntimeError:
            # Some families view rows in ways (as complex numbers) that the strides of arranged
            # layers do not allow: those keep plain ones.
            self._arranges = False
            restore_linears(self.model)
            self.model.tie_weights()
        try:
            return trial_rows(self, texts)
        except Exception as error:
            raise failed_trial(self.model, error) from error

    def _arrange_linears(self) -> None:
        if not self._arranges:
            return
        if host.on_gpu(self.device):
            join_linears(self.model)
        else:
            arrange_linears(self.model, pack_all=self.strict and self._pack, pack=self._pack)
        if self._product is not None:
            use_product(self.model, self._product)

    def compile(self, *, build: bool = True) -> bool:
        """Run forwards that are asked for logits as machine code from here on; whether they do.

        `build=False` takes what an earlier call left on disk, and where that is the products alone,
        which are all models', linear layers compute by those. On a GPU attention is Triton's,
        where that is installed, and forwards of few rows are graphs, captured when they are first
        asked for; `build=False` takes the attention alone. Greedy and seeded texts may differ from
        those of the model's own forward where two tokens are as likely to the last bits.

        Raises:
            InvalidConfig: a strict target: its rows keep their bits in the model's own forward.
            UnsupportedModel: a model that cannot be compiled, with the reason.
            ModelError: packages that cannot be trusted or read.
        """
        if self.strict:
            raise InvalidConfig(NOT_STRICT)
        self._forget_compiled()
        self._builds = build
        own = self._arranges and not host.on_gpu(self.device)
        self._use_product(product(build=build) if own else None, self._tried_body())
        try:
            found = self._faster()
            if found is not None:
                self._check_compiled(found, ())
                self._compiled = found
                self._cache.gives_back = not isinstance(found, GraphedForward)
        except BaseException:
            if build:
                self._use_product(None)
            raise
        return found is not None

    @contextmanager
    def compiled(self, *, build: bool) -> Iterator[None]:
        """Within, forwards run as after `compile`; behind it the model's own do again."""
        try:
            # What a compilation that fails has put in place goes too.
            self.compile(build=build)
            yield
        finally:
            self._forget_compiled()
            self._use_product(None)

    def _forget_compiled(self) -> None:
        for package in self.packages:
            package.forget()
        self._compiled, self._builds, self._ahead, self._begun = None, False, None, None
        self._cache.gives_back = True
        self._compiled_taps.clear()
        self._compiled_parts.clear()
        self.compilations += 1

    def _use_product(self, own: Product | None, gpu_body: BodyMaker | None = None) -> None:
        use_product(self.model, own)
        self._product, self._gpu_body = own, gpu_body
        self._body = self.new_body()
        give_back_memory()

    def _tried_body(self) -> BodyMaker | None:
        """What makes a GPU's attention, if there is any, and the model's rows come out by it."""
        if not (host.on_gpu(self.device) and isinstance(self._door, InterfaceDoor)):
            return None
        made = triton_body(self.device, self.dtype)
        if made is None:
            return None
        try:
            error = self._error_of(None, (), made())
            reason = f"rows differ from its own by {error:.1e} of the largest logit"
        except Exception as failure:
            error, reason = float("inf"), first_line(failure)
        if is_close(self.model, error):
            return made
        name = self.model.config.model_type
        warn(f"Triton's attention is not used for the {name} model: {reason}")
        return None

    def _faster(self, shown: Tapped | Part | None = None) -> Faster | None:
        """The model's forwards, or some of its layers, as this device keeps them."""
        if not host.on_gpu(self.device):
            return compiled_forward(self.model, self._door, build=self._builds, tapped=shown)
        assert not isinstance(shown, Part)
        if not self._builds:
            return None
        return graphed_forward(self.model, self._door, self._gpu_body, shown)

    def _check_compiled(self, found: Faster, layers: tuple[int, ...]) -> None:
        """Refuses a forward whose rows, or hidden states, are not the model's own."""
        error = self._error_of(found, layers, self._body)
        if not is_close(self.model, error):
            raise UnsupportedModel(
                f"compile=True: the compiled {self.model.config.model_type} model gives rows that "
                f"differ from its own by {error:.1e} of the largest number; {found.remedy}"
            )

    def _error_of(self, found: Faster | None, layers: tuple[int, ...], body: Body) -> float:
        """How far rows are from those of the model's own forward with plain attention."""
        error = 0.0
        for attempt in range(EXPERT_TRIALS if has_experts(self.model) else 1):
            texts = trial_texts(self.vocab_size, self.device, attempt)
            with self.uncompiled(), self._attending(attend_cpu):
                own = self._all_tried(texts, layers)
            with self._running(found, layers), self._attending(body):
                compiled = self._all_tried(texts, layers)
            pairs = zip(compiled, own, strict=True)
            error = max(float(row_errors(ours, due).max()) for ours, due in pairs)
            if is_close(self.model, error):
                break
        return error

    def _all_tried(self, texts: TrialTexts, layers: tuple[int, ...]) -> list[Tensor]:
        """Logits of texts read row by row and in every other way; hidden states, if any."""
        with self.tapping(layers) as taps:
            found = [torch.cat((self._one_by_one(texts), trial_rows(self, texts)))]
        if layers:
            found.append(torch.cat([part for own in taps.parts.values() for part in own]))
        return found

    def _one_by_one(self, texts: TrialTexts) -> Tensor:
        """The logits of a text read row by row."""
        seq = self.open(len(texts.main))
        try:
            rows = [self.score(Rows((seq,), (1,), token[None])) for token in texts.main.cpu()]
        finally:
            self.close(seq)
        return torch.cat(rows)

    def uncompiled(self) -> AbstractContextManager[None]:
        """Run the model's own forward meanwhile, as who changes its layers must."""
        return self._running(None)

    @contextmanager
    def _attending(self, body: Body) -> Iterator[None]:
        before, self._body = self._body, body
        try:
            yield
        finally:
            self._body = before

    @contextmanager
    def _running(self, compiled: Faster | None, layers: tuple[int, ...] = ()) -> Iterator[None]:
        before, taps, part = self._compiled, dict(self._compiled_taps), self._part
        self._compiled, self._part = compiled, None
        if layers:
            self._compiled_taps[layers] = compiled
        try:
            yield
        finally:
            self._compiled, self._compiled_taps, self._part = before, taps, part

    def tapping(self, layers: tuple[int, ...]) -> AbstractContextManager[Taps]:
        """Note meanwhile the hidden states behind some numbers of layers, by rows scored.

        Where forwards are compiled and no package that gives these states is to be had, the model's
        own forward runs meanwhile.

        Raises:
            UnsupportedModel: layers that cannot be told apart; a text that is cached anew when it
                passes a length.
            InvalidConfig: layers that the model does not have.
        """
        if not layers:
            return nullcontext(Taps(()))
        if self._gate is None:
            if self.switches_regime:
                raise UnsupportedModel(
                    f"hidden states of the {self.model.config.model_type} model cannot be noted: "
                    "its rotary frequencies change with a text's length, and its cache with them; "
                    "use a drafter that needs none, such as drafter='ngram'"
                )
            self._gate = LayerGate(self)
        self._gate.check(layers)
        if self._compiled is not None and layers not in self._compiled_taps:
            self._compile_tapped(self._gate, layers)
        return self._tapping(Taps(layers))

    @contextmanager
    def _tapping(self, taps: Taps) -> Iterator[Taps]:
        before, self._taps = self._taps, taps
        try:
            yield taps
        finally:
            self._taps = before

    def _compile_tapped(self, gate: LayerGate, layers: tuple[int, ...]) -> None:
        self._compiled_taps[layers] = self._compiled_with(
            Tapped(layers, lambda: gate.noting([layer - 1 for layer in layers]))
        )

    def _compiled_with(self, shown: Tapped | Part) -> Faster | None:
        """What is kept of some hidden states or layers; None: the model's own forward runs."""
        try:
            found = self._faster(shown)
            if found is not None and isinstance(shown, Tapped):
                self._check_compiled(found, shown.layers)
        except ModelError as error:
            # Of layers that cannot be traced by themselves the model's own run.
            if self._builds and isinstance(shown, Tapped):
                raise
            warn(f"the model's own forward is used: {error}")
            return None
        if found is None:
            log.info("no compiled forward is there for %s; compile=True makes one", shown.facts)
        return found

    @property
    def runs_compiled(self) -> bool:
        """Whether forwards that are asked for logits run as machine code, or as graphs, now."""
        return self._compiled is not None

    @property
    def packages(self) -> list[CompiledForward]:
        """The machine code there is of its forwards and of their parts."""
        made = self._compiled, *self._compiled_taps.values(), *self._compiled_parts
        return [one for one in made if isinstance(one, CompiledForward)]

    def compiled_part(self, part: Part) -> CompiledForward | None:
        """A package of some of the layers; None where forwards are not compiled, or it is not.

        Whoever asks holds what it makes against the model's own layers.
        """
        if not isinstance(self._compiled, CompiledForward):
            return None
        found = self._compiled_with(part)
        if not isinstance(found, CompiledForward):
            return None
        self._compiled_parts.append(found)
        return found

    @contextmanager
    def running_part(self, part: RunningPart) -> Iterator[Passed]:
        """Score by a package of some of the layers meanwhile."""
        before, self._part = self._part, part
        try:
            yield part.passed
        finally:
            self._part = before

    def reach(self, layer: int) -> Reach | None:
        """How far back the rows of a layer see, counted from 0; None is everything.

        Raises:
            UnsupportedModel: attention is the model's own.
        """
        if not isinstance(self._door, InterfaceDoor):
            raise UnsupportedModel(
                f"layers like those of the {self.model.config.model_type} model cannot be read by "
                "themselves, as its attention is its own; use drafter='ngram'"
            )
        return self._door.reaches.get(layer)

    def _make_strict(self) -> None:
        self._align, self._row_multiple = STRICT_BLOCK, STRICT_ROWS
        self._body = StrictBody()
        if rows_keep_their_bits(self):
            return
        slab_linears(self.model, STRICT_ROWS)
        self._body = StrictBody(rows_at_once=STRICT_ROWS, whole=True)
        if not rows_keep_their_bits(self):
            raise UnsupportedModel(
                f"strict=True cannot be kept by the {self.model.config.model_type} model in "
                f"{self.dtype} here: a row's "
                "logits depend on the rows beside it even in slabs of equal width; use strict=False"
            )

    def new_body(self) -> Body:
        """The fastest attention that the target has, for forwards of another cache."""
        if self._gpu_body is not None:
            return self._gpu_body()
        own = None if self._product is None else self._product.attention()
        return attend_cpu if own is None else own

    @property
    def product(self) -> Product | None:
        """What its linear layers may compute by; None: by torch and oneDNN alone."""
        return self._product

    @property
    def switches_regime(self) -> bool:
        """Whether a text is cached anew when it passes a length (`longrope`)."""
        return isinstance(self._texts, TwoRegimes)

    @property
    def block_bytes(self) -> int:
        """Bytes that one block of cached tokens takes."""
        return self._cache.block_bytes

    def limit_cache(self, cache_bytes: int | None) -> None:
        """Bound what the cache may take; None is no bound.

        Raises:
            InvalidConfig: less than one block takes.
        """
        self._cache.limit(cache_bytes)

    def check_weights(self, state: Mapping[str, Tensor]) -> None:
        """Refuse weights that are not this model's; changes nothing.

        Raises:
            InvalidConfig: an unknown name, another shape, or no tensor of numbers.
        """
        self._weights.check(state)

    def update_weights(self, state: Mapping[str, Tensor]) -> None:
        """Take new weights in place of those of the same names; what is cached of prefixes goes.

        `state` are some or all entries of the model's `state_dict()`, of any floating dtype.

        Raises:
            InvalidConfig: what `check_weights` refuses, or a sequence is open; nothing has changed.
        """
        self.check_weights(state)
        self._cache.forget_prefixes()
        slabs = any(isinstance(module, SlabLinear) for module in self.model.modules())
        restore_layers(self.model)
        try:
            self.model.load_state_dict(state, strict=False)
        finally:
            self._arrange_linears()
            if slabs:
                slab_linears(self.model, STRICT_ROWS)
            for compiled in (
                self._compiled,
                *self._compiled_taps.values(),
                *self._compiled_parts,
            ):
                if compiled is not None:
                    compiled.bind()

    def open(self, reserve: int, prefix: Sequence[int] = ()) -> int:
        """Return the handle of a new sequence, which holds what is cached of its prefix."""
        if isinstance(self._texts, TwoRegimes):
            return self._texts.open(reserve)
        return self._texts.open(reserve, prefix)

    def length(self, seq: int) -> int:
        """Return the number of committed tokens."""
        return self._texts.length(seq)

    def num_staged(self, seq: int) -> int:
        """Return the number of rows staged since the last commit or discard."""
        return self._texts.num_staged(seq)

    def info(self) -> dict[str, Any]:
        """What runs, and in which arithmetic, for reports."""
        linears = "packed" if self._is_packed else "plain"
        return {
            "architecture": type(self.model).__name__,
            "parameters": self.num_parameters,
            "dtype": str(self.dtype).removeprefix("torch."),
            "device": str(self.device),
            "attention": f"{self._door.name}, canonical order" if self.strict else self._door.name,
            "path": self._door.path,
            "linears": linears,
            "own_products": uses_product(self.model),
            "own_attention": isinstance(self._door, InterfaceDoor)
            and isinstance(self._body, PoolBody)
            and self._body.takes_all
            and self.dtype in self._body.dtypes,
            "strict": self.strict,
            "compiled": self._compiled is not None,
            "vocab_size": self.vocab_size,
            "max_length": self.max_length,
            "cache": self.cache_plan(),
        }

    def cache_plan(self) -> dict[str, Any]:
        """What cached tokens take: in blocks, as texts need them, never above `max_bytes`."""
        return {
            "bytes_per_token": self.block_bytes // BLOCK_SLOTS,
            "block_tokens": BLOCK_SLOTS,
            "held_bytes": self._cache.cache_bytes,
            "max_bytes": self._cache.max_bytes,
            "share_prefixes": self.prefix_block is not None,
        }

    @property
    def takes_unread(self) -> bool:
        """Where chains are replayed row by row."""
        return isinstance(self._compiled, GraphedForward)

    @property
    def _is_packed(self) -> bool:
        return any(isinstance(module, PackedLinear) for module in self.model.modules())

    @torch.inference_mode()
    def score(self, rows: Rows) -> Float[Tensor, "wanted V"]:
        """Stage the rows and return the wanted logits `[number wanted, V]` in the model's dtype.

        The result is an inference tensor: copy it before writing to it in place.

        Raises:
            TokenOutOfRange: a token the model's vocabulary does not hold.
            InvalidConfig: rows that contradict each other, or pass the model's context.
            OutOfMemory: the cache is full.
        """
        check_tokens(rows.tokens_R.tolist(), self.vocab_size)
        if not isinstance(self._texts, TwoRegimes):
            return self._read(rows)
        logits = self._texts.score(rows)
        return logits if len(logits) else self._no_logits()

    def _read(self, rows: Rows, long: bool = False) -> Tensor:
        """Run one forward over the cache's sequences; `long`: with the long rotary frequencies."""
        pad = -len(rows.tokens_R) % self._row_multiple
        if long:
            # The frequencies follow the forward's longest row: one more row beside makes sure.
            pad = pad or self._row_multiple
        faster = self._faster_for(rows)
        ahead, self._ahead, self._begun = self._ahead, None, None
        own = faster is not None and faster is self._compiled
        if ahead is not None and own and ahead.scored(rows, self._cache):
            plan, logits = ahead.plan, ahead.logits_RV
        else:
            # A graph takes what the host has, all of it with one copy.
            device = CPU if isinstance(faster, GraphedForward) else self.device
            plan = make_plan(self._cache, rows, device, align=self._align, pad=pad)
            self._check_length(plan)
            if long:
                plan.positions[-pad:] = self._long_position
            with self._door.entered(self._cache, plan, self._body):
                logits = self._forward(rows, plan, pad, faster)
        tokens = rows.tokens_R.tolist()
        for seq, span in zip(rows.seqs, plan.spans, strict=True):
            self._cache.stage(seq, span.num_rows, span.ancestors, tokens[span.first : span.last])
        return logits

    @torch.inference_mode()
    def expect(self, seqs: Sequence[int], counts: Sequence[int], tokens_R: Tensor) -> None:
        """Run such rows at once, where their graph is there; see `Target.expect`."""
        graphs, self._begun = self._compiled, None
        if not isinstance(graphs, GraphedForward) or sum(counts) > graphs.most_rows:
            return
        longest = max(
            self._cache.length(seq) + self._cache.num_staged(seq) + count
            for seq, count in zip(seqs, counts, strict=True)
        )
        simple = self._texts is self._cache and self._taps is None and self._part is None
        if not simple or (self.max_length is not None and longest > self.max_length):
            return
        try:
            plan = chains_behind(self._cache, seqs, counts, self._align)
            tokens = host.Reading((tokens_R,))
            logits = graphs.ahead(self._cache, plan, tokens_R)
        except (OutOfMemory, torch.OutOfMemoryError):
            # Who scores them will be told.
            return
        if logits is not None:
            self._ahead = Ahead(tuple(seqs), tuple(counts), plan, tokens, logits)

    @torch.inference_mode()
    def foresee(
        self, seq: int, places: range, at_1: Int64[Tensor, " 1"], token_1: Int64[Tensor, " 1"]
    ) -> bool:
        """Run a chain's first row at once, where its graph knows the places; `Target.foresee`."""
        self._begun = None
        graphs, limit = self._compiled, self.max_length
        if not isinstance(graphs, GraphedForward) or at_1.device != self.device:
            return False
        if self._is_simple(seq) and (limit is None or places.stop <= limit):
            try:
                self._begun = graphs.begun(self._cache, seq, places, at_1, token_1)
            except torch.OutOfMemoryError:
                # Who scores the row will be told.
                return False
        return self._begun is not None

    def _is_simple(self, seq: int) -> bool:
        """Whether a sequence's rows are a chain, and nothing but them is asked for."""
        plain = self._taps is None and self._part is None and self._texts is self._cache
        return plain and self._cache.ancestors(seq) is None

    def _no_logits(self) -> Tensor:
        return torch.empty(0, self.vocab_size, dtype=self.dtype, device=self.device)

    def chain(self, seq: int, most: int) -> PackageChain | GraphChain | None:
        """Rows of one sequence one after another, where forwards are machine code or graphs."""
        package, door = self._compiled, self._door
        if package is None or not isinstance(door, InterfaceDoor) or not self._is_simple(seq):
            return None
        begun, self._ahead, self._begun = self._begun, None, None
        longest = self._cache.length(seq) + self._cache.num_staged(seq) + most
        if self.max_length is not None and longest > self.max_length:
            return None
        try:
            if isinstance(package, GraphedForward):
                return GraphChain(package, self._cache, seq, most, begun)
            return PackageChain(package, door, self._cache, self._body, seq, most)
        except OutOfMemory:
            # There may be room for as many as come to be read.
            return None

    def commit(self, seq: int, path: int | Sequence[int]) -> None:
        """Keep the first `path` staged rows, or those it names; forget the others."""
        self._texts.commit(seq, path)

    def discard(self, seq: int) -> None:
        """Forget every staged row of the sequence."""
        self._texts.discard(seq)

    def close(self, seq: int) -> None:
        """Give back the sequence's blocks."""
        self._texts.close(seq)

    def _faster_for(self, rows: Rows) -> Faster | None:
        """What is kept of forwards that runs some rows; None: the model's own, or a part, does."""
        found, wanted = self._compiled, rows.logits_rows
        if found is not None and self._taps is not None:
            found = self._compiled_taps.get(self._taps.layers)
        some = wanted is None or wanted.numel() > 0
        if found is None or self._part is not None:
            return None
        if not some and not isinstance(found, GraphedForward):
            # There the head's product costs more than what machine code saves.
            return None
        return found if len(rows.tokens_R) <= found.most_rows else None

    def _forward(self, rows: Rows, plan: Plan, pad: int, faster: Faster | None) -> Tensor:
        wanted, taps = rows.logits_rows, self._taps
        if isinstance(faster, GraphedForward):
            logits, hidden = faster(rows.tokens_R, plan, wanted)
            if taps is not None and hidden is not None:
                taps.add(rows, hidden[0])
            return logits[0]
        tokens = host.send(rows.tokens_R, self.device)
        if self._part is not None:
            logits = self._part(tokens, plan.positions, wanted)
            return self._no_logits() if logits is None else logits
        if faster is not None:
            wanted = torch.arange(len(tokens)) if wanted is None else wanted
            logits, hidden = faster(tokens[None], plan.positions[None], wanted)
            if taps is not None and hidden is not None:
                taps.add(rows, hidden[0])
            return logits[0]
        if taps is None:
            return self._own_forward(tokens, wanted, plan, pad)
        assert self._gate is not None
        with self._gate.noting([layer - 1 for layer in taps.layers]) as passed:
            logits = self._own_forward(tokens, wanted, plan, pad)
        taps.add(rows, torch.cat(passed.hidden, -1).flatten(0, -2)[: len(tokens)])
        return logits

    def _own_forward(self, tokens: Tensor, wanted: Tensor | None, plan: Plan, pad: int) -> Tensor:
        inputs: dict[str, Any] = {
            "input_ids": (nn.functional.pad(tokens, (0, pad)) if pad else tokens)[None],
            "position_ids": plan.positions[None],
            **self._door.inputs(self._cache, plan),
        }
        if wanted is None:
            return self.model(**inputs).logits[0, : len(tokens)]
        if wanted.numel() == 0:
            self.model.base_model(**inputs)
            return self._no_logits()
        wanted = host.send(wanted, self.device)
        if not self._picks_rows:
            return self.model(**inputs).logits[0, wanted]
        # The output layer, too, keeps to the canonical row count.
        missing = -len(wanted) % self._row_multiple
        kept = torch.cat((wanted, wanted[-1:].expand(missing))) if missing else wanted
        return self.model(**inputs, logits_to_keep=kept).logits[0, : len(wanted)]

    def _check_length(self, plan: Plan) -> None:
        longest = 1 + max(span.highest_position for span in plan.spans)
        if self.max_length is not None and longest > self.max_length:
            raise InvalidConfig(
                f"a sequence of {longest} tokens passes the model's context of {self.max_length}; "
                "ask for fewer tokens"
            )


LoadedTarget = HuggingFaceTarget | RecurrentTarget
"""What a model folder becomes."""


def refuse_cache_bytes(cache_bytes: int | None, family: str) -> None:
    """Refuse a bound on block pools where there are none.

    Raises:
        InvalidConfig: naming the family.
    """
    if cache_bytes is not None:
        raise InvalidConfig(
            f"cache_bytes={cache_bytes} bounds blocks of cached tokens, and the {family} model "
            "keeps recurrent state in a cache of its own; bound it with max_texts"
        )


def default_dtype(device: torch.device) -> torch.dtype:
    """Return bfloat16 where the device computes in it, else float32."""
    if device.type == "cuda":
        return torch.bfloat16
    capable = getattr(torch.cpu, "get_capabilities", dict)()
    return (
        torch.bfloat16
        if capable.get("avx512_bf16") or capable.get("amx_bf16") or capable.get("bf16")
        else torch.float32
    )
