"""Runs: which whole numbers are in a set, kept as few runs of consecutive ones."""

from bisect import bisect_right


class Runs:
    """A set of whole numbers as disjoint runs `first..end-1`, in order, none next to another.

    What is asked of it costs as much as there are runs, however long they are.
    """

    def __init__(self) -> None:
        self._firsts: list[int] = []
        self._ends: list[int] = []

    def __contains__(self, number: int) -> bool:
        return self.holds(number, number + 1)

    def holds(self, first: int, end: int) -> bool:
        """Whether all of `first..end-1` are there."""
        at = bisect_right(self._firsts, first) - 1
        return at >= 0 and end <= self._ends[at]

    def lowest(self) -> int | None:
        """The smallest number; None where there is none."""
        return self._firsts[0] if self._firsts else None

    def highest(self) -> int | None:
        """The largest number; None where there is none."""
        return self._ends[-1] - 1 if self._ends else None

    def find(self, length: int) -> int | None:
        """Where the first `length` consecutive numbers begin; None where there are not as many."""
        runs = zip(self._firsts, self._ends, strict=True)
        return next((first for first, end in runs if end - first >= length), None)

    def add(self, first: int, end: int) -> None:
        """Put in `first..end-1`, none of which is there."""
        at = bisect_right(self._firsts, first)
        low, high = at, at
        if at and self._ends[at - 1] == first:
            low, first = at - 1, self._firsts[at - 1]
        if at < len(self._firsts) and self._firsts[at] == end:
            high, end = at + 1, self._ends[at]
        self._firsts[low:high], self._ends[low:high] = [first], [end]

    def remove(self, first: int, end: int) -> None:
        """Take out `first..end-1`, all of which are there."""
        at = bisect_right(self._firsts, first) - 1
        left = (self._firsts[at], first)
        right = (end, self._ends[at])
        rest = [run for run in (left, right) if run[0] < run[1]]
        self._firsts[at : at + 1] = [run[0] for run in rest]
        self._ends[at : at + 1] = [run[1] for run in rest]
