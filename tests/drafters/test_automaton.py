"""The suffix automaton against plain search: matches, counts, what followed, in what order."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.drafters.automaton import RANKED, SuffixAutomaton
from outrider.drafters.suffix_store import END, StoreReader, SuffixStore

TEXTS = st.integers(1, 8).flatmap(lambda v: st.lists(st.integers(0, v - 1), max_size=60))
LONGEST = st.integers(1, 12)


def occurrences(text: list[int], part: list[int]) -> list[int]:
    """Where `part` begins in `text`."""
    return [i for i in range(len(text) - len(part) + 1) if text[i : i + len(part)] == part]


def longest_match(text: list[int], end: list[int], longest: int) -> int:
    """Tokens of the longest end of `end` that stands in `text`."""
    sizes = range(min(longest, len(end)), 0, -1)
    return next((n for n in sizes if occurrences(text, end[len(end) - n :])), 0)


def followers(text: list[int], part: list[int]) -> list[tuple[int, int]]:
    """What followed `part`: (token, times), commonest first, of equals the latest."""
    places = [i + len(part) for i in occurrences(text, part) if i + len(part) < len(text)]
    tokens = {text[i] for i in places}
    found = [
        (sum(text[i] == t for i in places), max(i for i in places if text[i] == t), t)
        for t in tokens
    ]
    return [(token, times) for times, _, token in sorted(found, reverse=True)]


@settings(max_examples=400, deadline=None)
@given(TEXTS, LONGEST)
def test_every_end_is_found_counted_and_followed_as_by_plain_search(text, longest) -> None:
    automaton = SuffixAutomaton(longest)
    for n, token in enumerate(text, start=1):
        automaton.extend([token])
        so_far = text[:n]
        state, length = automaton.last()
        # The end itself is no earlier occurrence: the text without its last token is searched,
        # for ends that may overlap with it.
        wanted = next(
            (m for m in range(min(longest, n), 0, -1) if len(occurrences(so_far, so_far[-m:])) > 1),
            0,
        )
        assert length == wanted
        if length:
            part = so_far[-length:]
            assert automaton.count(state, length) == len(occurrences(so_far, part))
            total, found = automaton.successors(state, length)
            follows = followers(so_far, part)
            assert found == follows[:RANKED]
            best = automaton.commonest(state, length)
            if follows:
                assert best is not None and best[0] == follows[0][0]
                assert best[1] == pytest.approx(found[0][1] / total)
                assert best[2:] == automaton.follow(state, length, best[0])
            else:
                assert best is None
            if len(follows) <= RANKED:
                assert total == sum(times for _, times in follows)


@settings(max_examples=200, deadline=None)
@given(TEXTS, TEXTS, LONGEST)
def test_another_text_is_followed_as_by_plain_search(text, other, longest) -> None:
    automaton = SuffixAutomaton(longest)
    automaton.extend(text)
    place = (0, 0)
    for n, token in enumerate(other, start=1):
        place = automaton.follow(*place, token)
        assert place[1] == longest_match(text, other[:n], longest)
        if place[1]:
            part = other[n - place[1] : n]
            assert automaton.successors(*place)[1] == followers(text, part)[:RANKED]


@settings(max_examples=100, deadline=None)
@given(TEXTS, TEXTS, LONGEST)
def test_places_stay_valid_while_the_automaton_grows(text, more, longest) -> None:
    automaton = SuffixAutomaton(longest)
    automaton.extend(text)
    places = []
    for i in range(len(text)):
        for n in range(1, min(longest, len(text) - i) + 1):
            place = (0, 0)
            for token in text[i : i + n]:
                place = automaton.follow(*place, token)
            places.append((text[i : i + n], place))
    automaton.extend(more)
    for part, place in places:
        assert automaton.count(*place) == len(occurrences(text + more, part))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(TEXTS, TEXTS), max_size=8), LONGEST, st.integers(1, 4))
def test_a_reader_finds_what_plain_search_finds_while_the_store_changes(
    rounds, longest, max_requests
) -> None:
    """Between rounds the text grows, requests come in and others are evicted."""
    store = SuffixStore(max_requests=max_requests, longest=longest)
    reader, text = StoreReader(store), []
    for new, request in rounds:
        text += new
        places = reader.places(text)
        held = [list(s.tokens) for s in reversed(store.segments)]
        for (automaton, (_, length)), segment in zip(places, store.segments[::-1], strict=True):
            apart, start = [], 0
            for size in segment.lengths:
                apart += [*segment.tokens[start : start + size], END]
                start += size
            assert length == longest_match(apart, text, longest), held
            assert automaton is segment.automaton
        store.add(request)


def test_plain_search_would_notice_a_miscount() -> None:
    """The check above can fail: an automaton that forgets to count is found."""

    class Forgets(SuffixAutomaton):
        def _record(self, token: int) -> None:
            if self.num_tokens % 7:
                super()._record(token)

    chance = random.Random(3)
    text = [chance.randrange(2) for _ in range(60)]
    automaton, wrong = Forgets(5), 0
    for n, token in enumerate(text, start=1):
        automaton.extend([token])
        state, length = automaton.last()
        part = text[n - length : n]
        wrong += automaton.count(state, length) != len(occurrences(text[:n], part))
    assert wrong


def test_a_text_of_one_token_stays_cheap() -> None:
    """States and successors are linear in the text whatever it holds."""
    chance = random.Random(4)
    for text in ([0] * 5000, list(range(5000)), [chance.randrange(3) for _ in range(5000)]):
        automaton = SuffixAutomaton(16)
        automaton.extend(text)
        assert len(automaton._size) <= 2 * len(text)
        edges = sum(len(after) for after in automaton._more.values())
        assert edges + sum(only >= 0 for only in automaton._only) <= 3 * len(text)
