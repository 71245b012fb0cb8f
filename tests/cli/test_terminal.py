"""What reaches the terminal: control characters spelt out, characters under their source."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider import cores
from outrider.cli import terminal
from outrider.cli.sources import SourceSpans
from outrider.cli.terminal import escaped
from outrider.types import Delta, Source

SOURCES: tuple[Source, ...] = ("draft", "correction", "bonus")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\tb\nc", "a\tb\nc"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("back\rspace\x08\x7f", "back\\x0dspace\\x08\\x7f"),
        ("\x9b1m", "\\x9b1m"),
        ("if a\u202e: b", "if a\\u202e: b"),
        ("line\u2028end", "line\\u2028end"),
        ("déjà vu — 日本語 😀", "déjà vu — 日本語 😀"),
    ],
)
def test_escaped(text: str, shown: str) -> None:
    assert escaped(text) == shown


class Bytes:
    """A tokenizer whose tokens are single bytes."""

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


def deltas_of(text: str, sizes: list[int]) -> list[Delta]:
    """The text's bytes in rounds; each delta's text ends where a whole character does."""
    data, deltas, start, told = text.encode(), [], 0, 0
    while start < len(data):
        end = min(len(data), start + sizes[len(deltas) % len(sizes)])
        whole = data[:end].decode("utf-8", errors="ignore")
        sources = tuple(SOURCES[i % 3] for i in range(start, end))
        deltas.append(Delta(0, whole[told:], tuple(data[start:end]), sources))
        start, told = end, len(whole)
    return deltas


@settings(max_examples=60, deadline=None)
@given(
    st.text(st.characters(codec="utf-8", exclude_characters="\ufffd"), min_size=1, max_size=12),
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
)
def test_every_character_has_the_source_of_the_token_that_completed_it(
    text: str, sizes: list[int]
) -> None:
    spans = SourceSpans(Bytes(), ())
    got = [(char, s) for d in deltas_of(text, sizes) for part, s in spans.of(d) for char in part]
    ends, at = [], 0
    for char in text:
        at += len(char.encode())
        ends.append((char, SOURCES[(at - 1) % 3]))
    assert got == ends


def test_text_that_was_held_back_comes_later_under_its_own_source() -> None:
    spans = SourceSpans(Bytes(), ())
    first = list(spans.of(Delta(0, "a", (97, 98), ("draft", "correction"))))
    second = list(spans.of(Delta(0, "bc", (99,), ("bonus",))))
    assert first == [("a", "draft")]
    assert second == [("b", "correction"), ("c", "bonus")]


def test_threads_wait_as_the_user_or_the_machine_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    def waits(busy: bool | None, **own: str) -> tuple[str | None, str | None]:
        for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
            monkeypatch.setenv(name, "")  # So that what there was comes back in the end.
            monkeypatch.delenv(name)
        for name, value in own.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(cores, "others_at_work", lambda: busy)
        terminal.prepare()
        return os.environ.get("OMP_WAIT_POLICY"), os.environ.get("GOMP_SPINCOUNT")

    assert waits(True) == ("passive", None)
    assert waits(None) == ("passive", None), "what cannot be told is taken for busy"
    assert waits(False) == ("passive", terminal.SPINS)
    assert waits(False, GOMP_SPINCOUNT="7") == ("passive", "7")
    assert waits(False, OMP_WAIT_POLICY="active") == ("active", None)
