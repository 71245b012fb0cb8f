"""Earlier requests' outputs to draft from: bounded, apart by tenant, saved for their owner alone.

Requests stand in a few segments, each with an automaton of its own; where the store is full the
oldest segment goes. A file holds tokens alone: automata are built again from them.
"""

from __future__ import annotations

import io
import os
import tempfile
import threading
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from outrider.config import check_flag, check_whole
from outrider.drafters.automaton import SuffixAutomaton
from outrider.errors import InvalidConfig

END = 1 << 40
"""Stands behind each request: no text holds it, so that no match crosses from one to the next."""

SEGMENTS = 4
"""A store's share that is forgotten at once is about one in so many."""

MAX_OTHERS = 100
"""Other tenants whose stores are kept beside one's own."""

VERSION = 1
FIELDS = ("version", "tenant", "shared", "limits", "lengths", "tokens")


@dataclass(slots=True)
class Segment:
    """Requests that came one after another, and where everything in them is."""

    automaton: SuffixAutomaton
    lengths: list[int] = field(default_factory=list[int])
    tokens: array[int] = field(default_factory=lambda: array("q"))

    def add(self, tokens: Sequence[int]) -> None:
        """Appends one request."""
        self.lengths.append(len(tokens))
        self.tokens.extend(tokens)
        self.automaton.extend(tokens)
        self.automaton.extend((END,))


class SuffixStore:
    """Outputs of earlier requests of one tenant.

    Threads may share a store. What a store holds shows in how fast drafts are accepted, so texts of
    different owners belong in different stores.

    Args:
        max_requests, max_tokens: what is held at most; the oldest requests go first, about a
            quarter of the store at a time.
        longest: tokens of the longest match.
        tenant: whose requests these are; drafters of another tenant are refused.
        shared: let drafters and requests of every tenant read and add.

    Raises:
        InvalidConfig: a value that cannot be meant.
    """

    def __init__(
        self,
        *,
        max_requests: int = 10_000,
        max_tokens: int = 1_000_000,
        longest: int = 24,
        tenant: str = "",
        shared: bool = False,
    ) -> None:
        for name, value in (
            ("max_requests", max_requests),
            ("max_tokens", max_tokens),
            ("longest", longest),
        ):
            check_whole(name, value, 1, 2**40)
        if not isinstance(tenant, str):
            raise InvalidConfig(f"tenant={tenant!r}: text is due")
        check_flag("shared", shared)
        self.max_requests, self.max_tokens, self.longest = max_requests, max_tokens, longest
        self.tenant, self.shared = tenant, shared
        self.lock = threading.RLock()
        self._segments: list[Segment] = []
        self._others: dict[str, SuffixStore] = {}

    def of(self, tenant: str) -> SuffixStore:
        """The store of a tenant's requests: this one where it is theirs, or shared.

        Another is made when it is first asked for, with the same bounds and lock; of more than
        `MAX_OTHERS` the one not asked for longest is forgotten.
        """
        if tenant == self.tenant or self.shared:
            return self
        with self.lock:
            store = self._others.pop(tenant, None)
            if store is None:
                store = SuffixStore(
                    max_requests=self.max_requests,
                    max_tokens=self.max_tokens,
                    longest=self.longest,
                    tenant=tenant,
                )
                store.lock = self.lock
            self._others[tenant] = store
            if len(self._others) > MAX_OTHERS:
                del self._others[next(iter(self._others))]
        return store

    def check_tenant(self, tenant: str) -> None:
        """Raises InvalidConfig where the store is another tenant's and not shared."""
        if tenant != self.tenant and not self.shared:
            raise InvalidConfig(
                f"tenant={tenant!r}: the store is of another tenant; give each its own, or build "
                "one with shared=True"
            )

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The segments, the oldest first; read them under `lock`."""
        return tuple(self._segments)

    @property
    def num_requests(self) -> int:
        """Requests held."""
        return sum(len(segment.lengths) for segment in self._segments)

    @property
    def num_tokens(self) -> int:
        """Tokens held."""
        return sum(len(segment.tokens) for segment in self._segments)

    def add(self, tokens: Sequence[int]) -> None:
        """Takes one request's output in; of one longer than the store its end."""
        tokens = tokens[-self.max_tokens :]
        if not tokens:
            return
        with self.lock:
            while self._segments and (
                self.num_requests + 1 > self.max_requests
                or self.num_tokens + len(tokens) > self.max_tokens
            ):
                del self._segments[0]
            if not self._segments or self._full(self._segments[-1]):
                self._segments.append(Segment(SuffixAutomaton(self.longest)))
            self._segments[-1].add(tokens)

    def _full(self, segment: Segment) -> bool:
        return (
            len(segment.lengths) * SEGMENTS >= self.max_requests
            or len(segment.tokens) * SEGMENTS >= self.max_tokens
        )

    def requests(self) -> Iterator[list[int]]:
        """The requests held, the oldest first."""
        for segment in self.segments:
            start = 0
            for length in segment.lengths:
                yield segment.tokens[start : start + length].tolist()
                start += length

    def clear(self) -> None:
        """Forgets everything, other tenants' requests too."""
        with self.lock:
            self._segments = []
            self._others = {}

    def save(self, path: str | Path) -> None:
        """Writes a file that its owner alone can read, whole or not at all."""
        path = Path(path).expanduser()
        with self.lock:
            held = list(self.requests())
        limits = [self.max_requests, self.max_tokens, self.longest]
        buffer = io.BytesIO()
        np.savez(
            buffer,
            version=np.int64(VERSION),
            tenant=np.frombuffer(self.tenant.encode(), dtype=np.uint8),
            shared=np.bool_(self.shared),
            limits=np.array(limits, dtype=np.int64),
            lengths=np.array([len(tokens) for tokens in held], dtype=np.int64),
            tokens=np.array([token for tokens in held for token in tokens], dtype=np.int64),
        )
        # mkstemp makes it readable and writable by its owner, whatever the umask.
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(buffer.getbuffer())
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise

    @classmethod
    def load(cls, path: str | Path, *, tenant: str = "") -> SuffixStore:
        """A store from its file, with the bounds it was saved with.

        Raises:
            InvalidConfig: no such file, one that is damaged or of another version or tenant.
        """
        path = Path(path).expanduser()
        parts = _read(path)
        max_requests, max_tokens, longest = parts["limits"].tolist()
        store = cls(
            max_requests=max_requests,
            max_tokens=max_tokens,
            longest=longest,
            tenant=parts["tenant"].tobytes().decode(errors="replace"),
            shared=bool(parts["shared"]),
        )
        store.check_tenant(tenant)
        tokens, start = parts["tokens"].tolist(), 0
        for length in parts["lengths"].tolist():
            store.add(tokens[start : start + length])
            start += length
        return store


def _read(path: Path) -> dict[str, Any]:
    """The arrays of a store's file, checked against each other."""
    try:
        # Read whole, so that a file that is refused is closed.
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as file:
            parts = {name: file[name] for name in FIELDS}
    except Exception as error:  # Damage shows wherever a reader of zip files or arrays meets it.
        raise InvalidConfig(
            f"{str(path)!r} is no store of suffixes, or it is damaged ({error}); "
            "save one with SuffixStore.save"
        ) from error
    if parts["version"].shape != () or parts["version"] != VERSION:
        raise InvalidConfig(
            f"{str(path)!r} is a store of version {parts['version']}; this is version {VERSION}: "
            "save it anew"
        )
    numbers = [parts[name] for name in ("limits", "lengths", "tokens")]
    sound = all(one.dtype == np.int64 and one.ndim == 1 and (one >= 0).all() for one in numbers)
    sound = sound and len(parts["limits"]) == 3 and parts["shared"].dtype == np.bool_
    sound = sound and parts["tenant"].dtype == np.uint8 and (parts["tokens"] < END).all()
    if not sound or parts["lengths"].sum() != len(parts["tokens"]):
        raise InvalidConfig(
            f"{str(path)!r} is damaged: its parts contradict each other; save it anew"
        )
    return parts


class StoreReader:
    """Follows one text through a store: the longest match of its end in each segment."""

    def __init__(self, store: SuffixStore) -> None:
        self._store = store
        self._read = 0
        # By segment: its tokens when the place was found, and the place.
        self._places: list[tuple[Segment, int, tuple[int, int]]] = []

    def places(self, tokens: list[int]) -> list[tuple[SuffixAutomaton, tuple[int, int]]]:
        """Each segment's automaton and the place of the text's end in it, the newest first.

        The store's lock must be held while the places are used.
        """
        known = {id(segment): (size, place) for segment, size, place in self._places}
        self._places = []
        for segment in reversed(self._store.segments):
            automaton, size = segment.automaton, len(segment.tokens)
            before, place = known.get(id(segment), (-1, (0, 0)))
            # Matches have a bound, so no more of the text than that can be part of one; what was
            # found before the segment grew may now be longer.
            longest = automaton.longest
            new = tokens[self._read :] if before == size else tokens[-longest:]
            state, length = place if before == size else (0, 0)
            for token in new[-longest:] if len(new) > longest else new:
                state, length = automaton.follow(state, length, token)
            self._places.append((segment, size, (state, length)))
        self._read = len(tokens)
        return [(segment.automaton, place) for segment, _, place in self._places]
