"""A suffix automaton that grows token by token and knows how often everything was followed by what.

States are the classes of substrings that end at the same places (Blumer et al. 1985): at most two a
token, however long the text. Occurrences are counted, and the commonest successors kept in order,
for substrings of at most `longest` tokens and one more: a token moves those of its own suffixes
alone, so that a question is answered without a walk through what follows.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

RANKED = 4
"""Successors of a state that are kept in order, the commonest first."""

NONE, SEVERAL = -1, -2


class SuffixAutomaton:
    """All substrings of one growing row of tokens.

    A place in it is a pair: a state, and the length of the substring that is meant. Places stay
    valid while the automaton grows.

    Args:
        longest: tokens of the longest substring that is counted and matched.
    """

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self.num_tokens = 0
        # By state: length of its longest substring; the state of the longest suffix that occurs
        # elsewhere too; occurrences; its only successor, and where that leads.
        self._size, self._link = array("q", [0]), array("q", [-1])
        self._count = array("q", [0])
        self._only, self._to = array("q", [NONE]), array("q", [NONE])
        # Successors of states with several; up to RANKED stand with the latest last, of more
        # `_ranked` has the commonest.
        self._more: dict[int, dict[int, int]] = {}
        self._ranked: dict[int, list[int]] = {}
        self._whole = 0
        self._end, self._matched = 0, 0

    def extend(self, tokens: Iterable[int]) -> None:
        """Appends tokens, each in amortised constant time."""
        for token in tokens:
            self._grow(token)
            self._record(token)

    def _grow(self, token: int) -> None:
        """The states and transitions of the text with one token more (Blumer et al.)."""
        size, link, only, to, more = self._size, self._link, self._only, self._to, self._more
        new = len(size)
        at = self._whole
        self.num_tokens += 1
        self._add(self.num_tokens)
        self._whole = new
        found = NONE
        while at >= 0:
            own = only[at]
            if own == token:
                found = to[at]
                break
            if own == NONE:
                only[at], to[at] = token, new
            elif own == SEVERAL:
                found = more[at].get(token, NONE)
                if found >= 0:
                    break
                more[at][token] = new
            else:
                more[at] = {own: to[at], token: new}
                only[at] = SEVERAL
            at = link[at]
        if found < 0:
            link[new] = 0
        elif size[found] == size[at] + 1:
            link[new] = found
        else:
            link[new] = self._split(found, at, token)

    def _split(self, state: int, at: int, token: int) -> int:
        """Gives the substrings of `state` no longer than one more than `at`'s a state of theirs."""
        size, link, only, to, more = self._size, self._link, self._only, self._to, self._more
        new = len(size)
        self._add(size[at] + 1)
        link[new], link[state] = link[state], new
        self._count[new] = self._count[state]
        only[new], to[new] = only[state], to[state]
        if only[state] == SEVERAL:
            more[new] = more[state].copy()
            if state in self._ranked:
                self._ranked[new] = self._ranked[state].copy()
        while at >= 0:
            if only[at] == token:
                if to[at] != state:
                    break
                to[at] = new
            else:
                if more[at][token] != state:
                    break
                more[at][token] = new
            at = link[at]
        return new

    def _add(self, size: int) -> None:
        self._size.append(size)
        self._link.append(0)
        self._count.append(0)
        self._only.append(NONE)
        self._to.append(NONE)

    def _record(self, token: int) -> None:
        """Counts the occurrences that end with the newest token."""
        link, count, only, to = self._link, self._count, self._only, self._to
        at = first = self._shortened(self._end, self._matched)
        before = NONE
        while at >= 0:
            if only[at] >= 0:
                # A suffix of the text before is followed by the newest token at least.
                child = to[at]
            else:
                after = self._more[at]
                child = after[token]
                if len(after) <= RANKED:
                    after[token] = after.pop(token)
            # Successive suffixes often end in one state.
            if child != before:
                count[child] += 1
                before = child
            if only[at] < 0 and len(self._more[at]) > RANKED:
                self._rank(at, token)
            at = link[at]
        self._end, self._matched = self.step(first, self._matched, token) or (0, 0)

    def _rank(self, state: int, token: int) -> None:
        """Moves a successor whose count has grown by one to its place; of equals it is first."""
        after, count = self._more[state], self._count
        ranked = self._ranked.get(state)
        if ranked is None:
            latest = reversed(after)
            ranked = sorted(latest, key=lambda one: -count[after[one]])[:RANKED]
            self._ranked[state] = ranked
        own = count[after[token]]
        if token not in ranked:
            if own < count[after[ranked[-1]]]:
                return
            ranked[-1] = token
        place = ranked.index(token)
        while place and count[after[ranked[place - 1]]] <= own:
            ranked[place] = ranked[place - 1]
            place -= 1
        ranked[place] = token

    def _shortened(self, state: int, length: int) -> int:
        """The state of the suffix of `length` tokens of a state's substrings."""
        size, link = self._size, self._link
        while state and length <= size[link[state]]:
            state = link[state]
        return state

    def step(self, state: int, length: int, token: int) -> tuple[int, int] | None:
        """The place one token on; of more than `longest` tokens the first is dropped.

        None where the token never followed.
        """
        own = self._only[state]
        if own >= 0:
            if own != token:
                return None
            child = self._to[state]
        elif own == NONE:
            return None
        else:
            child = self._more[state].get(token, NONE)
            if child < 0:
                return None
        if length < self.longest:
            return child, length + 1
        return self._shortened(child, length), length

    def follow(self, state: int, length: int, token: int) -> tuple[int, int]:
        """The place of the longest suffix, `token` being its last, that occurs; (0, 0) for none."""
        state = self._shortened(state, length)
        while True:
            place = self.step(state, length, token)
            if place is not None:
                return place
            if not state:
                return 0, 0
            state = self._link[state]
            length = self._size[state]

    def last(self) -> tuple[int, int]:
        """The place of the longest suffix of the text, within `longest`, that occurred before."""
        state, length = self._end, self._matched
        if self._count[state] < 2:
            state = self._link[state] if state else 0
            length = self._size[state]
        return state, length

    def count(self, state: int, length: int) -> int:
        """Occurrences of a place's substring."""
        return self._count[self._shortened(state, length)]

    def successors(self, state: int, length: int) -> tuple[int, list[tuple[int, int]]]:
        """How often a place's substring was followed, and by what: (token, times), commonest first.

        Of equals the latest is first; there are RANKED at most.
        """
        state = self._shortened(state, length)
        own, count = self._only[state], self._count
        if own == NONE:
            return 0, []
        if own >= 0:
            times = count[self._to[state]]
            return times, [(own, times)]
        after = self._more[state]
        ranked = self._ranked.get(state)
        if ranked is not None:
            # One occurrence may be the end of the text, which nothing follows.
            return count[state], [(token, count[after[token]]) for token in ranked]
        found = [(token, count[child]) for token, child in reversed(after.items())]
        found.sort(key=_times, reverse=True)
        return sum(times for _, times in found), found

    def commonest(self, state: int, length: int) -> tuple[int, float, int, int] | None:
        """The commonest successor, its share of all, and the place behind it; None where none is.

        It is `successors` and `follow` in one, for a place found since the automaton last grew.
        """
        token, share = self._only[state], 1.0
        if token >= 0:
            child = self._to[state]
        elif token == NONE:
            return None
        else:
            times, found = self.successors(state, length)
            token, count = found[0]
            share = count / times
            child = self._more[state][token]
        if length < self.longest:
            return token, share, child, length + 1
        return token, share, self._shortened(child, length), length

    def shorter(self, state: int, length: int) -> tuple[int, int]:
        """The place of the longest suffix of a place's substring that occurs elsewhere too."""
        state = self._shortened(state, length)
        state = self._link[state] if state else 0
        return state, self._size[state]


def _times(successor: tuple[int, int]) -> int:
    return successor[1]
