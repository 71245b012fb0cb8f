"""Every error Outrider raises on purpose, drawn as one tree.

OutriderError
├── InvalidConfig (ValueError)              an option, argument or request that cannot be meant
│   ├── EmptyPrompt                         a prompt without a token
│   ├── PromptTooLong                       a prompt that leaves no room in the context
│   ├── TokenOutOfRange                     a token id outside the vocabulary
│   ├── VocabularyMismatch                  draft and target do not share a vocabulary
│   ├── DraftShapeMismatch                  a proposal whose parts disagree in length or shape
│   ├── TargetShapeMismatch                 target rows that do not match the proposal
│   └── DistributionWidthMismatch           a law whose width is not the vocabulary's
├── DegenerateDistribution (ValueError)     a law without mass
├── NonFinite (ValueError)                  NaN or +inf where a law or logits were due
├── OutOfMemory (MemoryError)               cache blocks or tensors that do not fit
├── ModelError (RuntimeError)               a model that failed, or a folder that is no model
│   └── UnsupportedModel                    an architecture that cannot be used, with the reason
├── EndpointError (RuntimeError)            a server out of reach, or an answer that is none
│   └── EndpointRefused                     a request that a server will not take
└── MissingExtra (ImportError)              an optional dependency that is not installed

OutriderWarning (UserWarning) is no error: something asked for that will have no effect.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path


class OutriderError(Exception):
    """The root of the tree: catch it to catch all of them."""


class InvalidConfig(OutriderError, ValueError):
    """An option, argument or request that cannot be meant."""


class EmptyPrompt(InvalidConfig):
    """A prompt without a token: there is no row to predict from."""


class PromptTooLong(InvalidConfig):
    """A prompt that leaves no room for one new token in the context."""


class TokenOutOfRange(InvalidConfig):
    """A token id outside the vocabulary."""


class VocabularyMismatch(InvalidConfig):
    """Draft and target do not share a vocabulary."""


class DraftShapeMismatch(InvalidConfig):
    """A proposal whose tokens, log-probabilities and laws disagree in length or shape."""


class TargetShapeMismatch(InvalidConfig):
    """Target rows that do not match the proposal: one row more than drafted tokens is due."""


class DistributionWidthMismatch(InvalidConfig):
    """A law whose width is not the vocabulary's."""


class DegenerateDistribution(OutriderError, ValueError):
    """A law without mass: nothing can be drawn from it."""


class NonFinite(OutriderError, ValueError):
    """NaN or +inf where a law or logits were due."""


class OutOfMemory(OutriderError, MemoryError):
    """Cache blocks or tensors that do not fit in the memory at hand or allowed."""


class ModelError(OutriderError, RuntimeError):
    """A model that failed, or a folder that is no model."""


class UnsupportedModel(ModelError):
    """An architecture that cannot be used; the message names the reason."""


class EndpointError(OutriderError, RuntimeError):
    """A server that is out of reach, or whose answer is none; the message names its address."""


class EndpointRefused(EndpointError):
    """A request that a server will not take, with what it says about it."""


class MissingExtra(OutriderError, ImportError):
    """An optional dependency that is not installed; the message is the install line."""


class OutriderWarning(UserWarning):
    """Something asked for that has no effect, or ends sooner than asked; said once per object."""


def warn(message: str) -> None:
    """Warns at the nearest line outside of the package, which is the one that asked for it."""
    # Context managers stand between two of our own lines with a frame of the library's.
    inside = (f"{Path(__file__).parent}{os.sep}", contextlib.__file__)
    frames = [frame for frame, _ in traceback.walk_stack(inspect.currentframe())]
    level = 1
    while level < len(frames) and frames[level - 1].f_code.co_filename.startswith(inside):
        level += 1
    warnings.warn(message, OutriderWarning, stacklevel=level)


@contextlib.contextmanager
def standing_at(place: str | None) -> Iterator[None]:
    """A time in which what is refused is said to stand there; None where it stands alone."""
    try:
        yield
    except InvalidConfig as error:
        if place is not None:
            error.args = (f"{place}: {error}",)
        raise


def not_open(seq: int) -> InvalidConfig:
    """What a target says of a handle that names no sequence."""
    return InvalidConfig(
        f"sequence {seq} is not open; use a handle that open() returned and close() has not ended"
    )
