"""Every way a text can end ends it where plain decoding does, whichever round it falls into.

Target and draft follow scripts, so that each case hits the situation it is named for; the sources
of its tokens (d draft, c correction, b bonus) say that it did. Up to three tokens are drafted.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from outrider import DraftProposal, SamplingParams, TargetScores
from outrider.drafters import ProtocolDrafter
from outrider.engine import Emitter, Engine, Requests
from outrider.engine.emit import Kept
from outrider.models.protocol import ProtocolTarget
from outrider.types import Completion, Request

TEXT = {
    **{letter: letter.encode() for letter in "abcSPz"},
    "E": b"",  # end of text
    "T": b"TO",
    "X": b"xSTOPy",
    "<": b"\xf0\x9f",  # two halves of a party popper
    ">": b"\x8e\x89",
    "{": b"\xc3",  # and of an e with an acute accent
    "}": b"\xa9",
}
IDS = {name: i for i, name in enumerate(TEXT)}
BYTES = list(TEXT.values())
EOS, FALLBACK = IDS["E"], IDS["z"]


class Tokenizer:
    """The letters above."""

    def decode(self, ids) -> str:
        return b"".join(BYTES[i] for i in ids).decode("utf-8", "replace")


def ids(names: str) -> tuple[int, ...]:
    return tuple(IDS[name] for name in names)


class Script:
    """A target that says its script, then `a` for ever; `z` where it may not say that."""

    vocab_size = len(IDS)

    def __init__(self, script: str) -> None:
        self.script = script

    def verify(self, prefix, draft_tokens):
        return TargetScores([self._row(len(prefix) - 1 + i) for i in range(len(draft_tokens) + 1)])

    def _row(self, place: int):
        row = np.full(self.vocab_size, np.log(1e-18))
        row[FALLBACK] = np.log(1e-9)
        row[IDS[self.script[place]] if place < len(self.script) else IDS["a"]] = 0.0
        return row


class Prompter:
    """A draft model that says its own script, certain of each token."""

    vocab_size = len(IDS)

    def __init__(self, script: str) -> None:
        self.script = script

    def propose(self, prefix, k, rng):
        said = self.script + "a" * k
        place = min(len(prefix) - 1, len(self.script))
        return DraftProposal(ids(said[place : place + k]), [0.0] * k)


@dataclass(frozen=True)
class Case:
    """A situation: what target and draft say (None: the same), and what must come of it."""

    script: str
    tokens: str
    sources: str
    text: str
    finish: str = "stop"
    reason: str | int | None = None
    draft: str | None = None
    params: dict = field(default_factory=dict)


def stops(*strings: str, **more) -> dict:
    return {"stop": strings, **more}


CASES = {
    # The end of text, wherever it falls.
    "eos first drafted": Case("E", "E", "d", ""),
    "eos middle drafted": Case("aEb", "aE", "dd", "a"),
    "eos last drafted": Case("abEa", "abE", "ddd", "ab"),
    "eos bonus": Case("abcE", "abcE", "dddb", "abc"),
    "eos correction": Case("aEbc", "aE", "dc", "a", draft="acbc"),
    "eos correction first": Case("Eabc", "E", "c", "", draft="aabc"),
    "eos first of the second round": Case("abcaE", "abcaE", "dddbd", "abca"),
    "eos bonus of the second round": Case("abcaabcE", "abcaabcE", "dddbdddb", "abcaabc"),
    "eos behind a rejected guess": Case("abEc", "abE", "dcd", "ab", draft="acEc"),
    "eos guessed and rejected": Case(
        "abca", "abca", "dcdb", "abca", "length", draft="aEca", params={"max_tokens": 4}
    ),
    "eos guessed first and rejected": Case(
        "abca", "abca", "cddb", "abca", "length", draft="Ebca", params={"max_tokens": 4}
    ),
    "eos twice in one round": Case("aEEb", "aE", "dd", "a"),
    "ignore_eos": Case(
        "aEbEE", "aEbEE", "dddbb", "ab", "length", params={"ignore_eos": True, "max_tokens": 5}
    ),
    "ignore_eos, eos a stop token": Case(
        "abEc", "abE", "ddd", "ab", reason=EOS,
        params={"ignore_eos": True, "stop_token_ids": (EOS,)},
    ),
    "eos on the last token allowed": Case(
        "abE", "abE", "ddb", "ab", params={"max_tokens": 3}
    ),
    # Stop tokens.
    "stop token first": Case("ca", "c", "d", "", reason=IDS["c"],
                             params={"stop_token_ids": ids("c")}),
    "stop token middle": Case("aba", "ab", "dd", "a", reason=IDS["b"],
                              params={"stop_token_ids": ids("bc")}),
    "stop token bonus": Case("aaac", "aaac", "dddb", "aaa", reason=IDS["c"],
                             params={"stop_token_ids": ids("bc")}),
    "stop token correction": Case("aabc", "aab", "ddc", "aa", reason=IDS["b"], draft="aaac",
                                  params={"stop_token_ids": ids("bc")}),
    "stop token rejected": Case("aaaE", "aaaE", "dcdd", "aaa", draft="acaE",
                                params={"stop_token_ids": ids("c")}),
    "stop token before eos": Case("abE", "ab", "dd", "a", reason=IDS["b"],
                                  params={"stop_token_ids": ids("b")}),
    "eos before a stop token": Case("aEb", "aE", "dd", "a",
                                    params={"stop_token_ids": ids("b")}),
    # The least and the most tokens.
    "max_tokens 1": Case("abc", "a", "b", "a", "length", params={"max_tokens": 1}),
    "max_tokens 1 and eos": Case("E", "E", "b", "", params={"max_tokens": 1}),
    "max_tokens 2": Case("abc", "ab", "db", "ab", "length", params={"max_tokens": 2}),
    "max_tokens as a round": Case("abca", "abca", "dddb", "abca", "length",
                                  params={"max_tokens": 4}),
    "max_tokens one more than a round": Case("abcab", "abcab", "dddbb", "abcab", "length",
                                             params={"max_tokens": 5}),
    "min_tokens beyond eos": Case("aEbE", "azbE", "dcdd", "azb", params={"min_tokens": 3}),
    "min_tokens beyond eos in the bonus": Case(
        "abcEE", "abczE", "dddbd", "abcz", params={"min_tokens": 4}
    ),
    "min_tokens up to eos": Case("abE", "abE", "ddd", "ab", params={"min_tokens": 2}),
    "min_tokens beyond a stop token": Case(
        "acbc", "azbc", "dcdd", "azb", reason=IDS["c"],
        params={"min_tokens": 3, "stop_token_ids": ids("c")},
    ),
    "min_tokens beyond a stop string": Case(
        "STPaSTP", "STPaSTP", "dddbddd", "STOPa", reason="STOP",
        params=stops("STOP", min_tokens=5),
    ),
    # Stop strings.
    "stop string inside one token": Case("aXb", "aX", "dd", "ax", reason="STOP",
                                         params=stops("STOP")),
    "stop string inside a bonus": Case("abcX", "abcX", "dddb", "abcx", reason="STOP",
                                       params=stops("STOP")),
    "stop string inside a correction": Case("aXb", "aX", "dc", "ax", reason="STOP", draft="abb",
                                            params=stops("STOP")),
    "stop string spanning three tokens": Case("STPa", "STP", "ddd", "", reason="STOP",
                                              params=stops("STOP")),
    "stop string across the bonus": Case("abSTPa", "abSTP", "dddbd", "ab", reason="STOP",
                                         params=stops("STOP")),
    "stop string across a rejected guess": Case("aSTPa", "aSTP", "ddcd", "a", reason="STOP",
                                                draft="aSaPa", params=stops("STOP")),
    "stop string across two rejected guesses": Case("STPa", "STP", "dcc", "", reason="STOP",
                                                    draft="Saaa", params=stops("STOP")),
    "stop string rejected": Case("STaE", "STaE", "ddcd", "STOa", draft="STPE",
                                 params=stops("STOP")),
    "stop string held back and given up": Case("abcSaE", "abcSaE", "dddbdd", "abcSa",
                                               params=stops("STOP")),
    "stop string begun at the end": Case("abSE", "abSE", "dddb", "abS", params=stops("STOP")),
    "stop string begun at the last token allowed": Case(
        "abcS", "abcS", "dddb", "abcS", "length", params=stops("STOP", max_tokens=4)
    ),
    "two stop strings, the first to begin wins": Case("aXb", "aX", "dd", "a", reason="xS",
                                                      params=stops("STOP", "xS")),
    "two stop strings in one round": Case("bcSTPa", "bc", "dd", "", reason="bc",
                                          params=stops("STOP", "bc")),
    "stop string before eos": Case("abE", "ab", "dd", "a", reason="b", params=stops("b")),
    "stop string on the last token allowed": Case(
        "aSTP", "aSTP", "dddb", "a", reason="STOP", params=stops("STOP", max_tokens=4)
    ),
    # Characters in several tokens.
    "character split inside a round": Case("a<>E", "a<>E", "dddb", "a🎉"),
    "character split across the bonus": Case("abc<>E", "abc<>E", "dddbdd", "abc🎉"),
    "character split across a rejected guess": Case("a<>E", "a<>E", "dcdd", "a🎉", draft="ab>E"),
    "character completed by a correction": Case("<>aE", "<>aE", "dcdd", "🎉a", draft="<aaE"),
    "character rejected half-way": Case("<{}E", "<{}E", "dcdd", "\ufffdé", draft="<>}E"),
    "character cut off by max_tokens": Case("ab<>", "ab<", "ddb", "ab\ufffd", "length",
                                            params={"max_tokens": 3}),
    "character cut off by eos": Case("a<E", "a<E", "ddd", "a\ufffd"),
    "stop string of split characters": Case("a{}b", "a{}", "ddd", "a", reason="é",
                                            params=stops("é")),
    "stop string of split characters across rounds": Case(
        "abc{}b", "abc{}", "dddbd", "abc", reason="é", params=stops("é")
    ),
}  # fmt: skip
RULES = ["greedy", "coupled", "token", "block", "match"]
DEPTH, MOST = 3, 12
LETTER = {"draft": "d", "correction": "c", "bonus": "b"}


def made(case: Case, rule: str, depth: int, emitter: Emitter | None = None) -> Completion:
    draft = case.script if case.draft is None else case.draft
    target = ProtocolTarget(Script(case.script))
    emitter = emitter or Emitter(Tokenizer())
    engine = Engine(target, ProtocolDrafter(Prompter(draft)), emitter)
    requests = Requests(engine, depth=depth, end_tokens=frozenset({EOS}))
    params = {"max_tokens": MOST, "temperature": 0.0 if rule == "greedy" else 1.0, **case.params}
    request = Request(ids("b"), SamplingParams(seed=5, **params), rule=rule)
    (done,) = requests.complete([request])
    assert not target._texts
    return done


def end(done: Completion) -> tuple:
    """What must not depend on who drafts."""
    counts = done.stats.committed, done.stats.prompt_tokens
    return done.token_ids, done.text, done.finish_reason, done.stop_reason, counts


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", CASES)
def test_a_text_ends_where_plain_decoding_ends_it(name: str, rule: str) -> None:
    case = CASES[name]
    plain, fast = made(case, rule, 0), made(case, rule, DEPTH)
    assert end(fast) == end(plain)
    assert plain.sources == ("bonus",) * len(plain.token_ids)
    names = "".join(list(IDS)[token] for token in fast.token_ids)
    sources = "".join(LETTER[source] for source in fast.sources)
    assert (names, sources) == (case.tokens, case.sources)
    assert (fast.text, fast.finish_reason) == (case.text, case.finish)
    assert fast.stop_reason == case.reason
    assert fast.stats.committed == len(case.tokens)
    assert fast.stats.accepted == case.sources.count("d")


class LooksAtTheLast(Emitter):
    """A wrong emitter: only the last token of a round can end the text."""

    def _cut(self, text, gained) -> Kept:
        ends, text.end_tokens = text.end_tokens, frozenset()
        if gained.tokens[-1] in ends:
            text.end_tokens = ends
        try:
            return super()._cut(text, gained)
        finally:
            text.end_tokens = ends


def test_an_emitter_that_looks_at_a_rounds_last_token_alone_is_found_out() -> None:
    """The negative control: the ends inside of an accepted run are what the cases are about."""
    wrong = [
        name
        for name, case in CASES.items()
        if end(made(case, "greedy", DEPTH, LooksAtTheLast(Tokenizer())))
        != end(made(case, "greedy", 0, LooksAtTheLast(Tokenizer())))
    ]
    assert {"eos first drafted", "eos middle drafted", "eos last drafted"} <= set(wrong)
    assert "eos bonus" not in wrong and "eos correction" not in wrong


class Wavering(Script):
    """A target that says `a`, `b` or the end of text at random, after its own script."""

    def _row(self, place: int):
        row = np.full(self.vocab_size, -np.inf)
        row[[IDS["a"], IDS["b"], EOS]] = np.log([0.45, 0.4, 0.15])
        return super()._row(place) if place < len(self.script) else row


@pytest.mark.parametrize("params", [{}, stops("ba"), {"stop_token_ids": ids("b")}], ids=str)
def test_four_samples_end_each_for_itself(params: dict) -> None:
    sampling = SamplingParams(max_tokens=20, seed=11, n=4, **params)
    several = [Request(ids("c"), sampling, sample=i) for i in range(sampling.n)]

    def run(depth: int) -> list[Completion]:
        engine = Engine(
            ProtocolTarget(Wavering("ca")),
            ProtocolDrafter(Prompter("ca" + "ab" * 10)),
            Emitter(Tokenizer()),
        )
        requests = Requests(engine, depth=depth, end_tokens=frozenset({EOS}))
        return requests.complete(several)

    plain, fast = run(0), run(DEPTH)
    assert [end(done) for done in fast] == [end(done) for done in plain]
    assert len({done.token_ids for done in fast}) > 1
    assert [done.index for done in fast] == [0, 1, 2, 3]
    assert {source for done in fast for source in done.sources} == {"draft", "correction", "bonus"}
