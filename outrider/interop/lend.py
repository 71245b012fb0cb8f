"""Models of the user's, lent to the engine for the time of one call and given back as they were.

A model becomes a target once; its attention and its training mode are the engine's only while a
call runs. Nothing here keeps a model alive.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast
from weakref import WeakKeyDictionary, proxy

from torch import nn
from transformers import PreTrainedModel

from outrider.models.hf import HuggingFaceTarget
from outrider.models.registration import NAME


class Lent:
    """One model as a target, used by one call at a time.

    Args:
        model: a decoder-only language model; its layers are left alone unless `strict` or `pack`.
        lock: the model's, held by the call that uses it.
        strict: one arithmetic class for everything; its layers are laid out for good.
        pack: lay the layers out for the processor, for good: faster there, no longer trainable.

    Raises:
        UnsupportedModel: a model that cannot be a target, left as it was.
    """

    def __init__(
        self, model: PreTrainedModel, lock: AbstractContextManager[Any], *, strict: bool, pack: bool
    ) -> None:
        self.lock = lock
        self._made_for = _identity(model)
        with as_it_was(model):
            self.target = HuggingFaceTarget(
                model, strict=strict, pack=strict or pack, arrange=strict or pack
            )
        # The target lives as long as its model, which must not be kept alive by it.
        self.target.model = cast(PreTrainedModel, proxy(model))

    def fits(self, model: PreTrainedModel) -> bool:
        """Whether the model is still what it was: moved, cast or resized, it is another target."""
        return self._made_for == _identity(model)


@dataclass(slots=True)
class _Known:
    """What is kept beside a model: its lock, and its targets by (strict, pack)."""

    lock: AbstractContextManager[Any] = field(default_factory=threading.RLock)
    made: dict[tuple[bool, bool], Lent] = field(default_factory=dict[tuple[bool, bool], Lent])


# By weak reference, so that the same model is tried out once, whoever makes the callable.
_KNOWN: WeakKeyDictionary[PreTrainedModel, _Known] = WeakKeyDictionary()
_KNOWN_LOCK = threading.Lock()


def lent(model: PreTrainedModel, *, strict: bool = False, pack: bool = False) -> Lent:
    """The model as a target, made at the first call."""
    with _KNOWN_LOCK:
        known = _KNOWN.setdefault(model, _Known())
    with known.lock:
        one = known.made.get((strict, pack))
        if one is None or not one.fits(model):
            one = known.made[strict, pack] = Lent(model, known.lock, strict=strict, pack=pack)
        return one


@contextmanager
def at_work(*models: tuple[PreTrainedModel, Lent]) -> Iterator[None]:
    """The models as the engine wants them; what that changes is undone at the end."""
    with ExitStack() as stack:
        # In one order for all threads, so that two calls that share models cannot block each other.
        for model, one in sorted(models, key=lambda pair: id(pair[0])):
            stack.enter_context(one.lock)
            stack.enter_context(as_it_was(model))
            model.eval()
            if model.config._attn_implementation != NAME:
                model.set_attn_implementation(NAME)
        yield


@contextmanager
def as_it_was(model: PreTrainedModel) -> Iterator[None]:
    """Gives attention and training modes back at the end."""
    attention = model.config._attn_implementation or "eager"
    training = [module for module in model.modules() if module.training]
    try:
        yield
    finally:
        if model.config._attn_implementation != attention:
            model.set_attn_implementation(attention)
        _set_training(model, training)


def _set_training(model: nn.Module, training: list[nn.Module]) -> None:
    if training:
        kept = {id(module) for module in training}
        for module in model.modules():
            module.training = id(module) in kept


def _identity(model: PreTrainedModel) -> tuple[Any, ...]:
    return model.device, model.dtype, model.config.get_text_config().vocab_size
