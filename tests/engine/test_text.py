"""Text assembly: whole characters, stop strings wherever they fall, the same for every split."""

from __future__ import annotations

import random

import pytest

from outrider.engine.text import LONGEST_CHARACTER, WINDOW, TextAssembler


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


def test_each_token_is_decoded_with_a_few_before_it() -> None:
    decoded: list[int] = []

    class Counting(Bytes):
        def decode(self, ids: list[int]) -> str:
            decoded.append(len(ids))
            return super().decode(ids)

    chance = random.Random(3)
    text = "".join(chance.choice("aé日🎉 \n") for _ in range(400))
    data = text.encode()
    assembler, out, num = TextAssembler(Counting(), list(b"seed"), []), "", 0
    for byte in data:
        # A round is settled in a copy, which may be thrown away.
        assembler.copy().push(98)
        before = len(decoded)
        assembler.push(byte)
        num += len(decoded) - before
        out += assembler.take()
    assert out + assembler.finish(stopped=False) == text
    assert num < 1.3 * len(data)
    assert max(decoded) < WINDOW + LONGEST_CHARACTER


class Runs:
    """Bytes one after another are text together or not at all, as in Llama 2's tokenizer.

    Tokens from 256 on are characters.
    """

    def decode(self, ids: list[int]) -> str:
        out, run = "", b""
        for token in [*ids, None]:
            if token is not None and token < 256:
                run += bytes([token])
                continue
            try:
                out += run.decode()
            except UnicodeDecodeError:
                out += "\ufffd" * len(run)
            out, run = out + ("" if token is None else chr(token)), b""
        return out


@pytest.mark.parametrize("tokenizer", [Bytes, Runs])
@pytest.mark.parametrize("cut", range(8))
def test_long_runs_of_bytes_are_text_wherever_the_prompt_ends(tokenizer: type, cut: int) -> None:
    text = "日本語" * 30 + "é🎉" * 20 + "ab"
    data = ("語" * 9).encode() + text.encode()
    start = 27 + cut
    assembler, out = TextAssembler(tokenizer(), list(data[:start]), []), ""
    for byte in data[start:]:
        assembler.push(byte)
        out += assembler.take()
    # A character that the prompt has begun is new.
    assert out + assembler.finish(stopped=False) == text[cut // 3 :]


@pytest.mark.parametrize("between", ["", "ŀŁ"])
def test_a_broken_byte_in_a_run_breaks_no_more_than_itself(between: str) -> None:
    text = "日本語日本語"
    for before in range(7):
        tail = (text[before:] + "ab" * 9).encode()
        tokens = [*text[:before].encode(), 0xE6, *map(ord, between), *tail]
        assembler, out = TextAssembler(Runs(), [*b"seed"], []), ""
        for token in tokens:
            assembler.push(token)
            out += assembler.take()
        out += assembler.finish(stopped=False)
        assert out == f"{text[:before]}\ufffd{between}{text[before:]}{'ab' * 9}"
