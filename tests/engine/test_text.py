"""Text assembly: whole characters, stop strings wherever they fall, the same for every split."""

from __future__ import annotations

import random

import pytest

from outrider.engine.text import TextAssembler


class Bytes:
    """A tokenizer whose tokens are bytes; 256 is a special token without text."""

    def decode(self, ids: list[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", "replace")


def run(data: bytes, stops: list[str], cuts: set[int], quiet: int = 0) -> tuple[str, str | None]:
    """Feeds bytes one by one, taking what is certain after the positions in `cuts`."""
    assembler = TextAssembler(Bytes(), list(b"seed"), stops)
    out: list[str] = []
    for i, byte in enumerate(data):
        stop = assembler.push(byte, watch=i >= quiet)
        if stop is not None:
            return "".join(out) + assembler.finish(stopped=True), stop
        if i in cuts:
            out.append(assembler.take())
            assert "\ufffd" not in out[-1] or b"\xff" in data
    return "".join(out) + assembler.finish(stopped=False), None


def test_characters_are_never_cut() -> None:
    text = "naïve 日本語 🎉 end"
    assert run(text.encode(), [], set(range(100))) == (text, None)


@pytest.mark.parametrize("stop", ["STOP", "\n\n", "é", "aab"])
def test_stop_strings_act_where_they_first_occur(stop: str) -> None:
    text = f"aaab one S ST STO \n {stop} tail {stop}"
    first = text.index(stop)
    assert run(text.encode(), [stop], set(range(100))) == (text[:first], stop)


def test_the_split_into_rounds_changes_nothing() -> None:
    chance = random.Random(5)
    for _ in range(300):
        data = bytes(chance.choice(b"ab\n") for _ in range(30))
        stops = ["ab\n", "\n\n", "bbb"]
        quiet = chance.randrange(12)
        whole = run(data, stops, set(), quiet)
        parts = run(data, stops, {i for i in range(30) if chance.random() < 0.5}, quiet)
        assert parts == whole


def test_a_stop_string_that_ends_too_early_never_acts() -> None:
    assert run(b"xSTOPyz", ["STOP"], set(), quiet=5) == ("xSTOPyz", None)
    assert run(b"xSTOPyz", ["STOP"], set(), quiet=4) == ("x", "STOP")


def test_broken_bytes_do_not_swallow_what_follows() -> None:
    text, _ = run(b"a\xff\xff\xff\xff\xff\xe2\x82\xac b", [], set(range(20)))
    assert text.startswith("a\ufffd") and text.endswith("\u20ac b")


def test_special_tokens_have_no_text() -> None:
    assembler = TextAssembler(Bytes(), list(b"p"), [])
    for token in (97, 256, 98):
        assembler.push(token)
    assert assembler.finish(stopped=False) == "ab"
