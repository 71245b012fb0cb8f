"""A model's forward on a GPU in few kernels: what lies between its products and attention, fused.

The family's own forward is traced once, for any few rows, as for machine code (`compiled`), with
attention as an opaque operator; torch's Inductor makes kernels of norms, rotations and sums. They
are kept in a folder of the user's own. Weights are not in them: they are looked up at each call.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from outrider.errors import OutriderError, warn
from outrider.models import compiled
from outrider.models.attention_op import Forward, running
from outrider.models.doors import InterfaceDoor
from outrider.models.packages import cache_folder, check_owner, first_line, keeping

if TYPE_CHECKING:
    from jaxtyping import Float, Int64

KERNELS = "kernels"
"""The folder of what Inductor keeps, beside the packages."""


class FusedForward:
    """A model's forward of a few rows, compiled; with taps the hidden states side by side, too.

    Args:
        model: as it is; its attention is Outrider's.
        door: the way in.
        most_rows: of a forward.
        tapped: which hidden states are to come out too.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        door: InterfaceDoor,
        most_rows: int,
        tapped: compiled.Tapped | None = None,
    ) -> None:
        self._model = model
        traced = compiled.Traced(model, door, tapped)
        rows = torch.export.Dim("rows", min=1, max=most_rows)
        # Not of length 1 or 2: lengths of the example are never taken for a constant. And not one
        # tensor twice, which would be traced as one input.
        example = tuple(torch.arange(5, device=model.device)[None] for _ in range(2))
        shapes = ({1: rows}, {1: rows})
        with _compiling(), running(cast(Forward, compiled.Opaque())):
            program = torch.export.export(traced, example, dynamic_shapes=shapes, strict=False)
            self._names = [
                str(spec.target) for spec in program.graph_signature.input_specs if spec.target
            ]
            self._numbers = {
                name: value
                for name, value in program.constants.items()
                if isinstance(value, Tensor)
            }
            self._run: Any = torch._inductor.standalone_compile(
                program.graph_module, [*self._weights(), *example], dynamic_shapes="from_graph"
            )

    def __call__(
        self, tokens_1W: Int64[Tensor, "1 W"], positions_1W: Int64[Tensor, "1 W"]
    ) -> tuple[Float[Tensor, "1 W V"], Float[Tensor, "1 W F"] | None]:
        """Logits of all rows of a forward in progress, and their hidden states."""
        with compiled.raising():
            logits, *hidden = self._run(*self._weights(), tokens_1W, positions_1W)
        return logits, hidden[0] if hidden else None

    def fits(self) -> bool:
        """Whether the model's layers are those it was made of: somebody may take them apart."""
        return {*self._numbers, *named_weights(self._model)}.issuperset(self._names)

    def _weights(self) -> list[Tensor]:
        """What the model holds now, in the order of the compiled forward's inputs."""
        held = {**self._numbers, **named_weights(self._model)}
        return [held[name] for name in self._names]


def fused_forward(
    model: PreTrainedModel,
    door: InterfaceDoor,
    most_rows: int,
    tapped: compiled.Tapped | None = None,
) -> FusedForward | None:
    """The model's fused forward; None, with a warning, where there is none of it.

    Raises:
        ModelError: a folder for kernels that others may write to.
    """
    try:
        return FusedForward(model, door, most_rows, tapped)
    except (OutriderError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        warn(
            f"the {model.config.model_type} model runs kernel by kernel, as its forward cannot be "
            f"fused ({first_line(error)})"
        )
        return None


def named_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """All tensors of a model's, those of joined layers too, by the names that a trace gives."""
    return compiled.state_of(compiled.Traced(model, None))


@contextmanager
def _compiling() -> Iterator[None]:
    """Around tracing and compiling, which change what is global in torch."""
    folder = cache_folder() / KERNELS
    with keeping():
        # The mode is that of the last folder alone.
        folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder.mkdir(exist_ok=True, mode=0o700)
        for path in (folder.parent, folder):
            check_owner(path)
    with compiled.building:
        own = {"TORCHINDUCTOR_CACHE_DIR": str(folder), "TRITON_CACHE_DIR": str(folder / "triton")}
        with (
            warnings.catch_warnings(),
            _set(own),
            torch.no_grad(),
            compiled.quiet(),
        ):
            warnings.simplefilter("ignore")
            yield


@contextmanager
def _set(variables: dict[str, str]) -> Iterator[None]:
    """A time in which these variables of the environment are set; others are left alone."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
