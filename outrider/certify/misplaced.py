"""Where noise must not be found: each gives the addresses of one stream to the wrong questions."""

from __future__ import annotations

from outrider.certify.enumerate import Place


def taken_from(stream: int) -> Place:
    """The address that has the same index in another stream, where it already serves."""
    return lambda anchor, i: (stream, anchor, i)


def one_for_all(stream: int) -> Place:
    """One address for every index of a round."""
    return lambda anchor, i: (stream, anchor, 0)


def same_every_round(stream: int) -> Place:
    """The addresses of the first round, in every round."""
    return lambda anchor, i: (stream, 0, i)


def by_position(stream: int) -> Place:
    """The address of the token's position, which the next round asks again."""
    return lambda anchor, i: (stream, anchor + i, 0)
