"""A causal language model with recurrent state as a target: chains, by going back to a copy.

State-space, linear-attention and convolution layers, alone or among attention layers. The model's
forward, attention and cache object stay its own. Their state cannot be cut at a token, so a commit
of fewer rows than were staged goes back to a mark, and the accepted rows behind it are *pending*
again: `length` stays where the mark is, and they are read with the next pass, which reads pending
tokens anyway. Nothing is replayed.

How long that goes on is bounded. A pass that finds more than `PENDING_LIMIT` pending rows in front
of drafted ones is split between the two, with a mark there. Splitting every time would cost a pass
c per round; never splitting reads ever more rows again, each at a row's cost r. With a rows
accepted per round and a split whenever n are pending the sum is least at n = sqrt(2 (a + 1) c / r).
On a processor c is some 40 (LFM2, Qwen3.5) to 120 r (Mamba-2, Bamba), which makes it 15 to 27 at
two accepted rows; the minimum is flat.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from outrider.errors import InvalidConfig, UnsupportedModel, not_open
from outrider.models.adopting import as_it_was_if_refused
from outrider.models.base import Rows, Taps, Target, check_tokens
from outrider.models.capability import refuse_experts
from outrider.models.layer_gate import LayerGate
from outrider.models.packing import (
    PackedLinear,
    arrange_linears,
    restore_linears,
    restore_unpacked,
)
from outrider.models.reach import Reach
from outrider.models.recurrent_probe import check_bits, check_state, own_rows, refusal
from outrider.models.recurrent_rows import Piece, pieces_of
from outrider.models.recurrent_state import SequenceState

if TYPE_CHECKING:
    from jaxtyping import Float

PENDING_LIMIT = 16
"""Pending rows read together with drafted ones; more of them are read in a pass before."""

CACHE_ARGUMENTS = ("past_key_values", "cache_params")
"""What the forward of a family may call the cache object."""


class RecurrentTarget(Target):
    """A model with recurrent state behind `score`, `commit` and `discard`: chains only.

    Each sequence has a cache object of its own and each takes a forward of its own: rows of
    different lengths cannot share one without padding, and padding would enter the state.

    A trial at load compares chunked reads, with the state put back in between, with the model's
    plain forward; a model that fails it is refused by name and left as it was.
    """

    scores_trees = False

    def __init__(self, model: PreTrainedModel, *, strict: bool = False, pack: bool = True) -> None:
        if strict:
            refuse_experts(model)
        self._cache_name = _cache_argument(model)
        parameters = inspect.signature(model.forward).parameters
        self._takes_positions = "position_ids" in parameters
        self._picks_rows = "logits_to_keep" in parameters
        config = model.config.get_text_config(decoder=True)
        self.model = model
        self.strict = strict
        self.vocab_size = int(config.vocab_size)
        self.max_length = getattr(config, "max_position_embeddings", None)
        self.device = model.device
        self.dtype = model.dtype
        self.num_parameters = model.num_parameters()
        self._sequences: dict[int, SequenceState] = {}
        self._next = 0
        self._taps: Taps | None = None
        self._gate: LayerGate | None = None
        with as_it_was_if_refused(model):
            model.eval()
            self._adopt(pack)

    def _adopt(self, pack: bool) -> None:
        own = own_rows(self.model, self.vocab_size)
        if self.device.type == "cpu":
            arrange_linears(self.model, pack_all=self.strict and pack, pack=pack)
        try:
            check_state(self, own)
        except UnsupportedModel:
            # Arranged layers may have strides that a family's views do not allow: once more plain.
            restore_linears(self.model)
            self.model.tie_weights()
            check_state(self, own)
        # Mamba-2 asks its output layer for the weight's dtype in every pass.
        restore_unpacked(self.model)
        if self.strict:
            check_bits(self)

    def tapping(self, layers: tuple[int, ...]) -> AbstractContextManager[Taps]:
        """Note meanwhile the hidden states behind some numbers of layers, by rows scored.

        Rows that are read again, as their state was put back, are noted again.

        Raises:
            UnsupportedModel: layers that cannot be told apart.
            InvalidConfig: layers that the model does not have.
        """
        if not layers:
            return nullcontext(Taps(()))
        if self._gate is None:
            self._gate = LayerGate(self)
        self._gate.check(layers)
        return self._tapping(Taps(layers))

    @contextmanager
    def _tapping(self, taps: Taps) -> Iterator[Taps]:
        before, self._taps = self._taps, taps
        try:
            yield taps
        finally:
            self._taps = before

    def uncompiled(self) -> AbstractContextManager[None]:
        """Nothing here is compiled."""
        return nullcontext()

    def reach(self, layer: int) -> Reach | None:
        """How far back the rows of an attention layer see, counted from 0; None is everything.

        Raises:
            UnsupportedModel: a layer that does not see everything.
        """
        types = getattr(self.model.config.get_text_config(), "layer_types", None)
        own = types[layer] if types else None
        if own != "full_attention":
            raise UnsupportedModel(
                f"layer {layer} of the {self.model.config.model_type} model is of type {own}, and "
                "MTP modules behind recurrent state are read where they attend to everything; use "
                "drafter='ngram'"
            )
        return None

    def open(self, reserve: int, prefix: Sequence[int] = ()) -> int:
        """Return the handle of a new empty sequence; its cache grows as it is read."""
        self._next += 1
        self._sequences[self._next] = SequenceState(self.make_cache)
        return self._next

    def state(self, seq: int) -> SequenceState:
        """The sequence's cache object, lengths and marks.

        Raises:
            InvalidConfig: a handle that is not open.
        """
        found = self._sequences.get(seq)
        if found is None:
            raise not_open(seq)
        return found

    def length(self, seq: int) -> int:
        """Return the number of tokens committed and held; accepted ones behind it are pending."""
        return self.state(seq).length

    def num_staged(self, seq: int) -> int:
        """Return the number of rows staged since the last commit or discard."""
        return self.state(seq).num_staged

    def info(self) -> dict[str, Any]:
        """What runs, and in which arithmetic, for reports."""
        packed = any(isinstance(module, PackedLinear) for module in self.model.modules())
        return {
            "architecture": type(self.model).__name__,
            "parameters": self.num_parameters,
            "dtype": str(self.dtype).removeprefix("torch."),
            "device": str(self.device),
            "attention": "the model's own, with recurrent state",
            "linears": "packed" if packed else "plain",
            "strict": self.strict,
            "vocab_size": self.vocab_size,
            "max_length": self.max_length,
        }

    @torch.inference_mode()
    def score(self, rows: Rows) -> Float[Tensor, "wanted V"]:
        """Stage the rows and return the wanted logits `[number wanted, V]` in the model's dtype.

        Raises:
            UnsupportedModel: rows that are a tree and no chain.
            TokenOutOfRange: a token the model's vocabulary does not hold.
            InvalidConfig: rows that contradict each other, or pass the model's context.
        """
        pieces = pieces_of(rows, self.device)
        self._check(pieces)
        logits = [torch.empty(0, self.vocab_size, dtype=self.dtype, device=self.device)]
        begun: list[tuple[SequenceState, int]] = []
        try:
            for piece in pieces:
                state = self.state(piece.seq)
                begun.append((state, state.num_staged))
                logits += self._read(state, piece)
        except BaseException:
            for state, num_staged in begun:
                state.undo(num_staged)
            raise
        return torch.cat(logits)

    def commit(self, seq: int, path: int | Sequence[int]) -> None:
        """Keep the first `path` staged rows, or as many of them as have a mark behind them.

        What it does not keep of them is pending again: `length` says how far it went.

        Raises:
            UnsupportedModel: a path that leaves a row out.
        """
        if not isinstance(path, int):
            if list(path) != list(range(len(path))):
                raise self._no_trees()
            path = len(path)
        state = self.state(seq)
        if not 0 <= path <= state.num_staged:
            raise InvalidConfig(
                f"{path} rows to commit where {state.num_staged} are staged; name staged rows"
            )
        state.commit(path)

    def discard(self, seq: int) -> None:
        """Forget every staged row of the sequence."""
        self.state(seq).discard()

    def close(self, seq: int) -> None:
        """Forget the sequence and its cache."""
        self.state(seq)
        del self._sequences[seq]

    def _read(self, state: SequenceState, piece: Piece) -> list[Tensor]:
        """Logits of the wanted rows: one pass, or two where many rows are pending."""
        tokens_r, wanted = piece.tokens_r, piece.wanted
        pending = wanted[0] + 1 if wanted else len(tokens_r)
        if not PENDING_LIMIT < pending < len(tokens_r):
            return self._noted(state, piece.seq, tokens_r, wanted)
        first = self._noted(state, piece.seq, tokens_r[:pending], wanted[:1])
        rest = [row - pending for row in wanted[1:]]
        return first + self._noted(state, piece.seq, tokens_r[pending:], rest)

    def _noted(
        self, state: SequenceState, seq: int, tokens_r: Tensor, wanted: list[int]
    ) -> list[Tensor]:
        """A pass, its hidden states being noted where somebody asks."""
        taps = self._taps
        if taps is None:
            return self._pass(state, tokens_r, wanted)
        assert self._gate is not None
        with self._gate.noting([layer - 1 for layer in taps.layers]) as passed:
            logits = self._pass(state, tokens_r, wanted)
        hidden_rF = torch.cat(passed.hidden, -1).flatten(0, -2)
        taps.parts.setdefault(seq, []).append(hidden_rF)
        return logits

    def _pass(self, state: SequenceState, tokens_r: Tensor, wanted: list[int]) -> list[Tensor]:
        state.mark()
        inputs: dict[str, Any] = {
            "input_ids": tokens_r[None],
            self._cache_name: state.cache,
            "use_cache": True,
        }
        if self._takes_positions:
            place = torch.arange(len(tokens_r), device=self.device) + state.num_read
            inputs["position_ids"] = place[None]
        logits: list[Tensor] = []
        if not wanted:
            self.model.base_model(**inputs)
        elif self._picks_rows:
            kept = torch.tensor(wanted, device=self.device)
            logits = [self.model(**inputs, logits_to_keep=kept).logits[0]]
        else:
            logits = [self.model(**inputs).logits[0, wanted]]
        state.advance(len(tokens_r), wanted=bool(wanted))
        return logits

    def make_cache(self) -> Cache:
        """An empty cache object of the family, as the model's own `generate` makes it."""
        return DynamicCache(config=self.model.config.get_text_config(decoder=True))

    def _check(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            state = self.state(piece.seq)
            if not piece.continues(state.num_staged):
                raise self._no_trees()
            check_tokens(piece.tokens_r.tolist(), self.vocab_size)
            longest = state.num_read + len(piece.tokens_r)
            if self.max_length is not None and longest > self.max_length:
                raise InvalidConfig(
                    f"a sequence of {longest} tokens passes the model's context of "
                    f"{self.max_length}; ask for fewer tokens"
                )

    def _no_trees(self) -> UnsupportedModel:
        return UnsupportedModel(
            f"the {self.model.config.model_type} model {type(self.model).__name__} keeps recurrent "
            "state, which has one past and no branches: it reads chains, not trees; "
            "draft chains for it"
        )


def _cache_argument(model: PreTrainedModel) -> str:
    """The name under which the forward takes its cache."""
    parameters = inspect.signature(model.forward).parameters
    found = next((name for name in CACHE_ARGUMENTS if name in parameters), None)
    if found is None:
        raise refusal(model, "its forward takes no cache object, so its state cannot be put back")
    return found
