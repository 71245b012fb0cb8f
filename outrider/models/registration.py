"""The door to transformers' attention: registers the op under the name "outrider", with its mask.

Inside a forward of Outrider the plan knows who sees what and no mask is made. Outside, masks are
the family's own boolean ones; the trial forward at load looks at what the family asks for.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from outrider.models.attention_op import MaskRequest, attention, note_request

NAME = "outrider"
"""The name of the op in transformers' registries."""


_mask_observer: ContextVar[Callable[[MaskRequest], None] | None] = ContextVar(
    "outrider_masks", default=None
)


def register() -> None:
    """Make "outrider" an attention implementation of transformers; twice is once."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)


@contextmanager
def observing_masks(observer: Callable[[MaskRequest], None]) -> Iterator[None]:
    """Show `observer` every mask requested in this thread."""
    token = _mask_observer.set(observer)
    try:
        yield
    finally:
        _mask_observer.reset(token)


def mask(**request: Any) -> Tensor | None:
    """Return the boolean mask `[batch, 1, rows, keys]` a plain call asks for."""
    never: dict[str, Any] = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    made = sdpa_mask(**{**request, **never})
    if made is not None and (observer := _mask_observer.get()) is not None:
        asked = MaskRequest(request["mask_function"], request.get("local_size"))
        observer(asked)
        note_request(made, asked)
    return made
