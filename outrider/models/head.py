"""What all heads are: modules that guess tokens from their target's own hidden states.

A head brings its own weights and borrows the rest from its target: embeddings, the norm behind the
last layer, the output layer. It says what it computes; who calls it says what its rows attend to.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar, cast, runtime_checkable

import torch
from torch import Tensor, nn

from outrider.errors import UnsupportedModel
from outrider.models.attention_cpu import attend_cpu
from outrider.models.attention_op import Body, Forward, Options, running
from outrider.models.base import Rows, Target
from outrider.models.capability import is_close, row_errors
from outrider.models.head_files import check_sizes
from outrider.models.hf import HuggingFaceTarget, LoadedTarget
from outrider.models.packing import arrange_linears, use_product
from outrider.models.reach import Reach

if TYPE_CHECKING:
    from jaxtyping import Float, Int64


@runtime_checkable
class Attend(Protocol):
    """Queries `[B, H, T, E]`, keys and values `[B, G, T, E]` of new rows to `[B, T, H, E]`.

    `options` None: scores are divided by the root of E. A module of several layers counts them.
    """

    def __call__(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        options: Options | None = None,
        layer: int = 0,
    ) -> Tensor:
        """The rows' attention."""
        ...


@dataclass(frozen=True, slots=True)
class TargetParts:
    """What heads borrow: embeddings, the norm behind the last layer, hidden states to logits."""

    embeddings: nn.Module
    norm: Callable[[Tensor], Tensor]
    output: Callable[[Tensor], Tensor]

    @classmethod
    def of(cls, target: LoadedTarget, *, norm: bool = True) -> TargetParts:
        """The parts of a target; its `norm`, where it is wanted, is found by what a forward does.

        Raises:
            UnsupportedModel: no norm stands between last layer and output layer.
        """
        model: Any = target.model

        def output(h: Tensor) -> Tensor:
            # Asked for anew, as new weights may come with another layer.
            return scaled(model.get_output_embeddings()(h), model.config.get_text_config())

        if not norm:
            return cls(model.get_input_embeddings(), nn.Identity(), output)
        ending = _Ending.of(target)
        parts = cls(model.get_input_embeddings(), ending.norm(), output)
        ending.check(parts)
        return parts


def scaled(logits: Tensor, config: Any) -> Tensor:
    """What families make of their output layer's logits: a factor (Cohere, Granite), a soft cap."""
    if factor := getattr(config, "logit_scale", None):
        logits = logits * factor
    if divisor := getattr(config, "logits_scaling", None):
        logits = logits / divisor
    if cap := getattr(config, "final_logit_softcapping", None):
        logits = cap * torch.tanh(logits / cap)
    return logits


@dataclass(frozen=True, slots=True)
class _Ending:
    """What a forward of two tokens does behind the last layer.

    `ran` are the modules that made rows of one argument, in the order in which they were done.
    """

    model: Any
    left_RD: Tensor
    entered_RD: Tensor
    logits_RV: Tensor
    ran: tuple[tuple[nn.Module, Tensor], ...]

    @classmethod
    def of(cls, target: LoadedTarget) -> _Ending:
        """Runs the model, and notes what leaves its last and enters its output layer."""
        model: Any = target.model
        depth = int(model.config.get_text_config().num_hidden_layers)
        entered: list[Tensor] = []
        ran: list[tuple[nn.Module, Tensor]] = []

        def note(module: nn.Module, args: Any, named: Any, given: Any) -> None:
            if isinstance(given, Tensor) and given.dim() > 1 and len(args) + len(named) == 1:
                ran.append((module, given))

        hooks = [m.register_forward_hook(note, with_kwargs=True) for m in model.modules()]
        hooks.append(
            model.get_output_embeddings().register_forward_pre_hook(
                lambda _, args: entered.append(args[0])
            )
        )
        seq = target.open(2)
        try:
            with target.uncompiled(), target.tapping((depth,)) as taps, torch.inference_mode():
                tokens = torch.tensor([1, 2]) % target.vocab_size
                logits_RV = target.score(Rows((seq,), (2,), tokens))
        finally:
            for hook in hooks:
                hook.remove()
            target.close(seq)
        left_RD = taps.of(seq)
        entered_RD = entered[0].flatten(0, -2)[: len(left_RD)]
        return cls(model, left_RD, entered_RD, logits_RV, tuple(ran))

    def norm(self) -> nn.Module:
        """What makes of the last layer's output what the output layer gets, whatever its name.

        Raises:
            UnsupportedModel: there is none.
        """
        for module, given in self.ran:
            # What changes the width, as OPT's last projection does, is no norm.
            if given.shape[-1] == self.left_RD.shape[-1] and self._is_entered(given):
                with torch.inference_mode():
                    if self._is_entered(module(self.left_RD)):
                        return module
        raise UnsupportedModel(
            f"no norm of the {self.model.config.model_type} model makes of its last layer's "
            "hidden states what its output layer gets, so that heads cannot use that layer; use "
            "drafter='ngram'"
        )

    def _is_entered(self, given: Tensor) -> bool:
        rows_RD = given.flatten(0, -2)[: len(self.entered_RD)]
        return rows_RD.shape == self.entered_RD.shape and torch.allclose(rows_RD, self.entered_RD)

    def check(self, parts: TargetParts) -> None:
        """Refuse a model whose logits are not what norm and output make of its last states.

        Raises:
            UnsupportedModel: naming it.
        """
        with torch.inference_mode():
            own_RV = parts.output(parts.norm(self.left_RD))
        if not is_close(self.model, float(row_errors(own_RV, self.logits_RV).max())):
            raise UnsupportedModel(
                f"the {self.model.config.model_type} model makes more of its output layer's "
                "logits than is known here, so that heads cannot use that layer; use "
                "drafter='ngram'"
            )


def final_norm(target: LoadedTarget) -> nn.Module:
    """The norm between a target's last layer and its output layer, found by what a forward does.

    Raises:
        UnsupportedModel: there is none.
    """
    return _Ending.of(target).norm()


class TargetHead(nn.Module):
    """What belongs to one target: it reads that one's hidden states and borrows its parts."""

    kind: str
    """What reports call it."""
    taps: tuple[int, ...]
    """Behind how many of the target's layers hidden states are read, ascending."""
    vocab_size: int
    """Tokens of the target."""
    target_size: int
    """Width of the target's hidden states."""
    needs_norm: bool = True
    """Whether it reads or gives what is behind the target's final norm."""

    def __init__(self) -> None:
        super().__init__()
        # In a tuple, so that they are not taken for a part.
        self._borrowed: tuple[TargetParts, ...] = ()

    def borrow(self, parts: TargetParts) -> None:
        """Use the target's parts where the head has none of its own."""
        self._borrowed = (parts,)

    @property
    def parts(self) -> TargetParts:
        """What is borrowed."""
        assert self._borrowed, "the head borrows parts of its target first"
        return self._borrowed[0]

    @property
    def dtype(self) -> torch.dtype:
        """In which it computes."""
        return next(self.parameters()).dtype

    def copied(self) -> Self:
        """The same with a copy of its weights, and nothing borrowed."""
        borrowed, self._borrowed = self._borrowed, ()
        try:
            return copy.deepcopy(self)
        finally:
            self._borrowed = borrowed


class Head(TargetHead):
    """A head of one or several modules that are read one after another, a step further each.

    Row i of the first module reads the feature behind token i, and token i + 1; it gives the
    feature behind token i + 1 as the head sees it. Row i of module m reads what module m - 1 gave
    for row i, and token i + m + 1. Behind the last module the head goes on with that one.
    """

    num_modules: int = 1
    reaches: Mapping[int, Reach | None]
    """How far back the rows of each layer see; a layer without one sees everything."""

    def __init__(self) -> None:
        super().__init__()
        self.reaches = {}

    @property
    def tokens(self) -> Int64[Tensor, " M"] | None:
        """The target's tokens that the columns of `logits` stand for; None: all of them."""
        return None

    def fused(self, features_RF: Float[Tensor, "*rows F"]) -> Float[Tensor, "*rows D"]:
        """The target's hidden states of some rows as one feature each: behind its final norm."""
        return self.parts.norm(features_RF)

    @abstractmethod
    def step(
        self,
        tokens_BT: Int64[Tensor, "B T"],
        h_BTD: Float[Tensor, "B T D"],
        positions_BT: Int64[Tensor, "B T"],
        attend: Attend,
        module: int = 0,
    ) -> Float[Tensor, "B T D"]:
        """The feature after each token, given the feature before it, by one of the modules."""

    def logits(self, h_BTD: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows M"]:
        """What follows after features, over the tokens that can be guessed: the target's own."""
        return self.parts.output(h_BTD)


HeadT = TypeVar("HeadT", bound=TargetHead)


@dataclass(frozen=True, slots=True)
class _Through:
    """A forward in progress, as the attention of stock layers asks for it."""

    given: Attend

    def attend(
        self, layer: int, query: Tensor, keys: Tensor, values: Tensor, options: Options
    ) -> Tensor:
        return self.given(query, keys, values, options, layer)


@contextmanager
def attending(attend: Attend) -> Iterator[None]:
    """Have stock layers of transformers attend to what `attend` says."""
    with running(cast(Forward, _Through(attend))):
        yield


def fitted(head: HeadT, target: Target) -> HeadT:
    """A copy of the head in its target's dtype, on its device, with its parts, ready to draft.

    Raises:
        UnsupportedModel: a target without hidden states to be had.
        VocabularyMismatch, TargetShapeMismatch: the target is another than the head's.
    """
    target = tapped_target(target)
    check_fits(head, target)
    with target.tapping(head.taps):
        pass
    parts = TargetParts.of(target, norm=head.needs_norm)
    head = head.copied()
    head.borrow(parts)
    head = head.to(target.device, target.dtype).eval().requires_grad_(False)
    arrange_linears(head)
    if isinstance(target, HuggingFaceTarget):
        use_product(head, target.product)
    return head


def body_of(target: Target) -> Body:
    """What a head's rows attend by: the fastest that its target has."""
    return target.new_body() if isinstance(target, HuggingFaceTarget) else attend_cpu


def tapped_target(target: Target) -> LoadedTarget:
    """The target, if it hands out hidden states.

    Raises:
        UnsupportedModel: it does not.
    """
    if not isinstance(target, LoadedTarget):
        raise UnsupportedModel(
            "heads read hidden states of a Hugging Face model, and the target is a "
            f"{type(target).__name__}; use drafter='ngram'"
        )
    return target


def check_fits(head: TargetHead, target: LoadedTarget) -> None:
    """Refuse a head of another target's shape.

    Raises:
        VocabularyMismatch: another vocabulary.
        TargetShapeMismatch: another width.
    """
    width = int(target.model.config.get_text_config().hidden_size)
    vocab = head.vocab_size, target.vocab_size
    check_sizes("the head", "the target", vocab, (head.target_size, width))
