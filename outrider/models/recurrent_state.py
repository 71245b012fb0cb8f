"""One sequence of a model with recurrent state: transformers' own cache, and marks to go back to.

A recurrent state is overwritten by every pass and comes out of it at its end alone, so the way back
is a copy from before the pass. What a layer only appends to (keys and values of full attention) is
cropped instead; a sliding window's keys are replaced, never written to, so holding them is enough.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)

if TYPE_CHECKING:
    from transformers.cache_utils import DummyLayer
else:
    # Before transformers 5.23 no layer was of that kind.
    DummyLayer = getattr(cache_utils, "DummyLayer", DynamicLayer)

Layer = CacheLayerMixin | LinearAttentionCacheLayerMixin | DummyLayer

States = dict[int, Tensor | None]


def known(cache: Cache) -> bool:
    """Return whether every layer of the cache is of a kind that can be put back.

    A family's own kind may keep more than its base does.
    """
    return all(
        isinstance(layer, (DynamicLayer, LinearAttentionCacheLayerMixin, DummyLayer))
        and type(layer).__module__ == DynamicLayer.__module__
        for layer in cache.layers
    )


@dataclass(frozen=True, slots=True)
class Window:
    """What a sliding-window layer held: its keys and values, and the tokens it has seen."""

    keys: Tensor | None
    values: Tensor | None
    num_seen: int


@dataclass(frozen=True, slots=True)
class SavedLayer:
    """What puts one layer back; None where it has no such part."""

    conv: States | None
    recurrent: States | None
    length: int | None
    window: Window | None

    @classmethod
    def of(cls, layer: Layer) -> SavedLayer:
        """Copy what the next pass overwrites, note what it replaces or appends to."""
        conv = recurrent = length = window = None
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            conv, recurrent = _copy(layer.conv_states), _copy(layer.recurrent_states)
        if isinstance(layer, DynamicSlidingWindowLayer):
            window = Window(layer.keys, layer.values, layer.cumulative_length)
        elif isinstance(layer, DynamicLayer):
            length = layer.get_seq_length()
        return cls(conv, recurrent, length, window)

    def put_back(self, layer: Layer) -> None:
        """Make the layer what it was; the copies become its own."""
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            assert self.conv is not None and self.recurrent is not None
            layer.conv_states, layer.recurrent_states = self.conv, self.recurrent
        if isinstance(layer, DynamicSlidingWindowLayer):
            assert self.window is not None
            layer.keys, layer.values = self.window.keys, self.window.values
            layer.cumulative_length = self.window.num_seen
        elif isinstance(layer, DynamicLayer):
            assert self.length is not None
            surplus = layer.get_seq_length() - self.length
            if isinstance(layer, LinearAttentionCacheLayerMixin):
                # Its own `crop` is for layers without recurrent state.
                DynamicLayer.crop(layer, -surplus)
            else:
                layer.crop(-surplus)


@dataclass(frozen=True, slots=True)
class Mark:
    """A point to go back to: the rows staged by then, and the layers; None: nothing was read."""

    num_staged: int
    layers: tuple[SavedLayer, ...] | None


class SequenceState:
    """The tokens a sequence has read: committed ones, and staged ones behind the first mark.

    Each pass is `mark`, the model's forward on `cache`, `advance`. A mark is kept for each pass
    since the last commit, except between rows whose logits nobody wanted: those are a prompt's, and
    nobody's guesses.
    """

    def __init__(self, make_cache: Callable[[], Cache]) -> None:
        self.length = 0
        self.num_staged = 0
        self.cache = make_cache()
        self._make_cache = make_cache
        self._marks: list[Mark] = []
        self._wanted = False

    @property
    def num_read(self) -> int:
        """Tokens read, staged ones included: the position of the next."""
        return self.length + self.num_staged

    def mark(self) -> None:
        """Remember the state as it is now."""
        layers = tuple(map(SavedLayer.of, self.cache.layers)) if self.num_read else None
        mark = Mark(self.num_staged, layers)
        if len(self._marks) > 1 and not self._wanted:
            self._marks[-1] = mark
        else:
            self._marks.append(mark)

    def advance(self, num_rows: int, *, wanted: bool) -> None:
        """Count the rows that were read, and whether logits of theirs were `wanted`."""
        self.num_staged += num_rows
        self._wanted = wanted

    def commit(self, num_rows: int) -> None:
        """Keep all staged rows, or go back to the last mark within the first `num_rows`."""
        if num_rows != self.num_staged:
            self.back_to(num_rows)
        self.length += self.num_staged
        self.num_staged = 0
        self._marks.clear()

    def discard(self) -> None:
        """Go back to where the last commit left it."""
        self.back_to(0)
        self._marks.clear()

    def undo(self, num_staged: int) -> None:
        """Take back what a call that failed has read behind `num_staged` rows, if it read any."""
        if any(mark.num_staged == num_staged for mark in self._marks):
            self.back_to(num_staged)

    def back_to(self, num_staged: int) -> None:
        """Restore the last mark at or before `num_staged` rows, whatever was read since."""
        while self._marks and self._marks[-1].num_staged > num_staged:
            self._marks.pop()
        if not self._marks:
            return
        mark = self._marks.pop()
        if mark.layers is None:
            self.cache = self._make_cache()
        else:
            for layer, saved in zip(self.cache.layers, mark.layers, strict=True):
                saved.put_back(layer)
        self.num_staged = mark.num_staged
        self._wanted = True


def _copy(states: States) -> States:
    return {index: None if state is None else state.clone() for index, state in states.items()}
