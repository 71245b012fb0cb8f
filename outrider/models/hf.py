"""A Hugging Face causal language model as a target: its own forward, our attention inside.

The model's code stays its own; only its attention implementation is set to "outrider", which keeps
keys and values in block pools. What cannot be rolled back or does not go through that door is
refused by name.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from outrider.cache import CacheManager
from outrider.errors import InvalidConfig, ModelError, TokenOutOfRange, UnsupportedModel
from outrider.models.attention_cpu import attend_cpu
from outrider.models.attention_op import Body, Forward, running
from outrider.models.attention_strict import STRICT_BLOCK, StrictBody
from outrider.models.base import Rows, Target
from outrider.models.capability import (
    check_by_looking,
    check_logits,
    refuse_experts,
    trial_tokens,
    try_out,
)
from outrider.models.device import pick_device
from outrider.models.packing import PackedLinear, arrange_linears, restore_linears
from outrider.models.plan import Plan, make_plan
from outrider.models.registration import register
from outrider.models.strict import (
    STRICT_ROWS,
    rows_keep_their_bits,
    slab_linears,
    unslab_linears,
)

if TYPE_CHECKING:
    from jaxtyping import Float


class HuggingFaceTarget(Target):
    """A causal language model of transformers behind `score`, `commit` and `discard`.

    The wrapped model's attention implementation is changed to "outrider" for good; its own forward
    and `generate` still work. A model that is refused is left as it was. `cache_bytes` bounds the
    block pools, None is no bound. `arrange=False` leaves the linear layers the model's own.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        strict: bool = False,
        pack: bool = True,
        arrange: bool = True,
        cache_bytes: int | None = None,
    ) -> None:
        register()
        check_by_looking(model)
        if strict:
            refuse_experts(model)
        self.model = model
        self.strict = strict
        config = model.config.get_text_config()
        self.vocab_size = int(config.vocab_size)
        self.max_length = getattr(config, "max_position_embeddings", None)
        self.device = model.device
        self.dtype = model.dtype
        self._cache = CacheManager()
        # Families hand a 4-D mask through unread, which saves making one in each forward.
        self._no_mask = torch.empty(1, 1, 1, 1, dtype=torch.bool, device=self.device)
        self._picks_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._body: Body = attend_cpu
        self._align, self._row_multiple = 1, 1
        self.num_parameters = model.num_parameters()
        with _as_it_was_if_refused(model):
            model.eval()
            self._adopt(pack, arrange)
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
    ) -> HuggingFaceTarget:
        """Load a local model folder.

        `dtype` None is bfloat16 where the device computes in it, else float32; `device` None is the
        CPU.

        Raises:
            InvalidConfig: a device this machine has not.
            ModelError: the folder is no model, or its files cannot be read.
            UnsupportedModel: the architecture cannot be used.
        """
        folder = model_folder(path)
        device = pick_device("cpu" if device is None else device)
        try:
            with _no_progress_bar():
                model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
                    folder, dtype=dtype or default_dtype(device), local_files_only=True
                )
            model.to(device=device)  # pyright: ignore[reportCallIssue]
        except Exception as error:
            raise unreadable(folder, error) from error
        return cls(model, strict=strict, pack=pack, cache_bytes=cache_bytes)

    def _adopt(self, pack: bool, arrange: bool) -> None:
        tokens = trial_tokens(self.vocab_size, self.device)
        own = try_out(self.model, tokens)
        if arrange and self.device.type == "cpu":
            arrange_linears(self.model, pack_all=self.strict and pack, pack=pack)
        if self.strict:
            self._make_strict()
        seq = self.open(len(tokens))
        check_logits(self.model, self.score(Rows((seq,), (len(tokens),), tokens)), own)
        self.close(seq)

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

    def open(self, reserve: int) -> int:
        """Return the handle of a new empty sequence."""
        return self._cache.open(reserve)

    def length(self, seq: int) -> int:
        """Return the number of committed tokens."""
        return self._cache.length(seq)

    def num_staged(self, seq: int) -> int:
        """Return the number of rows staged since the last commit or discard."""
        return self._cache.num_staged(seq)

    def info(self) -> dict[str, Any]:
        """What runs, and in which arithmetic, for reports."""
        linears = "packed" if self._is_packed else "plain"
        return {
            "architecture": type(self.model).__name__,
            "parameters": self.num_parameters,
            "dtype": str(self.dtype).removeprefix("torch."),
            "device": str(self.device),
            "attention": "outrider, canonical order" if self.strict else "outrider",
            "linears": linears,
            "strict": self.strict,
            "vocab_size": self.vocab_size,
            "max_length": self.max_length,
        }

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
        self._check_tokens(rows.tokens_R)
        pad = -len(rows.tokens_R) % self._row_multiple
        plan = make_plan(self._cache, rows, self.device, align=self._align, pad=pad)
        self._check_length(plan)
        with running(Forward(self._cache, plan, self._body)):
            logits = self._forward(rows, plan, pad)
        for seq, span in zip(rows.seqs, plan.spans, strict=True):
            self._cache.stage(seq, span.num_rows, span.ancestors)
        return logits

    def commit(self, seq: int, path: int | Sequence[int]) -> None:
        """Keep the first `path` staged rows, or those it names; forget the others."""
        self._cache.commit(seq, path)

    def discard(self, seq: int) -> None:
        """Forget every staged row of the sequence."""
        self._cache.discard(seq)

    def close(self, seq: int) -> None:
        """Give back the sequence's blocks."""
        self._cache.close(seq)

    def _forward(self, rows: Rows, plan: Plan, pad: int) -> Tensor:
        tokens = rows.tokens_R.to(self.device)
        inputs: dict[str, Any] = {
            "input_ids": (nn.functional.pad(tokens, (0, pad)) if pad else tokens)[None],
            "position_ids": plan.positions[None],
            "attention_mask": self._no_mask,
            "use_cache": False,
        }
        wanted = rows.logits_rows
        if wanted is None:
            return self.model(**inputs).logits[0, : len(tokens)]
        if wanted.numel() == 0:
            self.model.base_model(**inputs)
            return torch.empty(0, self.vocab_size, dtype=self.dtype, device=self.device)
        wanted = wanted.to(self.device)
        if not self._picks_rows:
            return self.model(**inputs).logits[0, wanted]
        # The output layer, too, keeps to the canonical row count.
        missing = -len(wanted) % self._row_multiple
        kept = torch.cat((wanted, wanted[-1:].expand(missing))) if missing else wanted
        return self.model(**inputs, logits_to_keep=kept).logits[0, : len(wanted)]

    def _check_tokens(self, tokens_R: Tensor) -> None:
        low, high = tokens_R.aminmax() if tokens_R.numel() else (torch.zeros(()), torch.zeros(()))
        if low < 0 or high >= self.vocab_size:
            raise TokenOutOfRange(
                f"token {int(low if low < 0 else high)} with a vocabulary of {self.vocab_size}; "
                f"give ids from 0 to {self.vocab_size - 1}"
            )

    def _check_length(self, plan: Plan) -> None:
        longest = int(plan.positions.max()) + 1
        if self.max_length is not None and longest > self.max_length:
            raise InvalidConfig(
                f"a sequence of {longest} tokens passes the model's context of {self.max_length}; "
                "ask for fewer tokens"
            )


def model_folder(path: str | Path) -> Path:
    """The folder at `path`, if it can be a model's.

    Raises:
        ModelError: no folder, or one without a configuration.
    """
    folder = Path(path).expanduser()
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"{str(path)!r} is no model folder: it has no config.json; "
            "give a folder saved by save_pretrained"
        )
    return folder


@contextmanager
def _as_it_was_if_refused(model: PreTrainedModel) -> Iterator[None]:
    """Undo what adopting a model exchanges, when it fails."""
    attention = model.config._attn_implementation or "eager"
    training = {name for name, module in model.named_modules() if module.training}
    try:
        yield
    except BaseException:
        unslab_linears(model)
        restore_linears(model)
        # An output layer that was the embedding is one with it again.
        model.tie_weights()
        if model.config._attn_implementation != attention:
            model.set_attn_implementation(attention)
        for name, module in model.named_modules():
            module.training = name in training
        raise


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Keep transformers from drawing its own bar on the terminal."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def unreadable(folder: Path, error: Exception) -> ModelError:
    """Return the typed error for a folder that transformers could not load."""
    try:
        family = json.loads((folder / "config.json").read_text()).get("model_type")
    except (OSError, ValueError, AttributeError):
        family = None
    if family is not None and family not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return UnsupportedModel(
            f"the model in {str(folder)!r} is of type {family!r}, which transformers does not know "
            "as a causal language model (a model's own code is not run); give a decoder-only model"
        )
    reason = str(error).strip().splitlines() or [type(error).__name__]
    return ModelError(
        f"the model in {str(folder)!r} cannot be loaded: {reason[0]}; "
        "save it again with save_pretrained"
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
