"""One arithmetic class for every row: the self-test, and slabs where it must be forced.

oneDNN's packed product gives a row the same bits beside any number of other rows, as long as there
are at least two; torch's plain product does not. The self-test decides on the real layers, not by
assumption.
"""

import torch
from torch import Tensor, nn

from outrider.models.base import Rows, Target
from outrider.models.packing import FewRowsLinear, FusedLinear, PackedLinear

STRICT_ROWS = 8
"""The canonical width: forwards are padded to a multiple, slabs have exactly as many."""


AnyLinear = nn.Linear | FewRowsLinear | PackedLinear | FusedLinear


class SlabLinear(nn.Module):
    """A linear layer computed eight rows at a time, so that every product has the same form."""

    def __init__(self, inner: AnyLinear, rows: int) -> None:
        super().__init__()
        self.inner: AnyLinear = inner
        self._rows = rows

    @property
    def weight(self) -> Tensor:
        """The wrapped layer's weight."""
        return self.inner.weight

    @property
    def bias(self) -> Tensor | None:
        """The wrapped layer's bias."""
        return self.inner.bias

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the wrapped layer's output, from slabs of equal width."""
        flat = inputs.reshape(-1, inputs.shape[-1])
        rows = flat.shape[0]
        flat = nn.functional.pad(flat, (0, 0, 0, -rows % self._rows))
        out = torch.cat([self.inner(slab) for slab in flat.split(self._rows)])
        return out[:rows].view(*inputs.shape[:-1], -1)


def slab_linears(model: nn.Module, rows: int) -> None:
    """Wrap every linear layer of the model, in place."""
    for parent in list(model.modules()):
        if isinstance(parent, SlabLinear):
            continue
        for name, child in list(parent.named_children()):
            if isinstance(child, AnyLinear):
                setattr(parent, name, SlabLinear(child, rows))


def unslab_linears(model: nn.Module) -> None:
    """Take the wraps off again, in place."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, SlabLinear):
                setattr(parent, name, child.inner)


def rows_keep_their_bits(target: Target) -> bool:
    """Return whether rows have the same bits read at once, in parts, and in a batch."""
    tokens = (torch.arange(1, 13) * 7919) % target.vocab_size
    wanted = _read(target, tokens, (12,))
    if not torch.equal(_read(target, tokens, (4, 1, 5, 1, 1)), wanted):
        return False
    first, second = target.open(12), target.open(12)
    both = target.score(Rows((first, second), (3, 12), torch.cat((tokens.flip(0)[:3], tokens))))
    target.close(first)
    target.close(second)
    return torch.equal(both[3:], wanted)


def _read(target: Target, tokens: Tensor, counts: tuple[int, ...]) -> Tensor:
    seq = target.open(len(tokens))
    rows = [target.score(Rows((seq,), (len(part),), part)) for part in tokens.split(counts)]
    target.close(seq)
    return torch.cat(rows)
