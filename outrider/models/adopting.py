"""What adopting a model exchanges in it, taken back when the model is refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import PreTrainedModel

from outrider.models.packing import restore_linears
from outrider.models.strict import unslab_linears


@contextmanager
def as_it_was_if_refused(model: PreTrainedModel) -> Iterator[None]:
    """Undo what adopting a model exchanges, when it fails."""
    attention = model.config._attn_implementation or "eager"
    training = {name for name, module in model.named_modules() if module.training}
    try:
        yield
    except BaseException:
        restore_layers(model)
        if model.config._attn_implementation != attention:
            model.set_attn_implementation(attention)
        for name, module in model.named_modules():
            module.training = name in training
        raise


def restore_layers(model: PreTrainedModel) -> None:
    """Give the model its own linear layers back."""
    unslab_linears(model)
    restore_linears(model)
    # An output layer that was the embedding is one with it again.
    model.tie_weights()
