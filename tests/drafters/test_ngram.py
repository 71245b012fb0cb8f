"""Prompt lookup: what followed the last time the text ended like this, by an index that grows."""

from __future__ import annotations

import gc
import random

import pytest

from outrider.drafters.ngram import NgramIndex


def looked_up(tokens: list[int], shortest: int, longest: int, length: int) -> list[int]:
    """The same by looking through the text."""
    for size in range(longest, shortest - 1, -1):
        end = tokens[-size:]
        # What ends before the last token is followed by one.
        for start in range(len(tokens) - size - 1, -1, -1):
            if len(end) == size and tokens[start : start + size] == end:
                copy = tokens[start + size : start + size + length]
                while len(copy) < length:
                    copy += copy[: length - len(copy)]
                return copy
    return []


@pytest.mark.parametrize(("shortest", "longest"), [(1, 1), (2, 4), (3, 3), (1, 7)])
@pytest.mark.parametrize("first", [0, 2**32 - 4], ids=["small", "large"])
def test_it_is_the_last_place_of_the_longest_end(shortest: int, longest: int, first: int) -> None:
    chance = random.Random(longest)
    found = 0
    for num_kinds in (1, 2, 3):
        for _ in range(40):
            index, tokens = NgramIndex(shortest, longest), list[int]()
            for _ in range(12):
                tokens += [first + chance.randrange(num_kinds) for _ in range(chance.randrange(4))]
                index.extend(tokens)
                draft = index.follow(tokens, 5)
                assert draft == looked_up(tokens, shortest, longest, 5), tokens
                found += bool(draft)
    assert found > 300


def test_a_garbage_collection_has_nothing_to_look_at() -> None:
    index, tokens = NgramIndex(2, 4), list(range(5000))
    gc.collect()
    before = len(gc.get_objects())
    index.extend(tokens)
    assert len(gc.get_objects()) - before < 50
