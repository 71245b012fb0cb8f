"""Grammars through llguidance: which tokens may come next, after a text and along drafted paths.

The one door of llguidance, which comes with the extra `grammar`.
"""

from __future__ import annotations

import importlib.util
import reprlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from outrider.config import GrammarKind, SamplingParams
from outrider.errors import InvalidConfig, MissingExtra, ModelError, UnsupportedModel
from outrider.models.text import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_COMPILED = 64
"""Grammars kept compiled; the one unused for longest goes first."""


class Grammars:
    """The grammars of one vocabulary, each compiled once; any thread may ask.

    Args:
        vocabulary: makes llguidance's view of the tokenizer; called once, when it is needed.
        ends: the model's own ends of text.
        width: tokens of the target's rows.
    """

    def __init__(
        self, vocabulary: Callable[[], LLTokenizer], ends: Iterable[int], width: int
    ) -> None:
        self._vocabulary = vocabulary
        self._ends = frozenset(end for end in ends if 0 <= end < width)
        self._width = width
        self._tokens: LLTokenizer | None = None
        self._known: OrderedDict[tuple[GrammarKind, str], CompiledGrammar] = OrderedDict()
        self._lock = threading.Lock()

    @classmethod
    def of(cls, tokenizer: Tokenizer, width: int) -> Grammars:
        """Those of a checkpoint's tokenizer."""
        ends = tokenizer.end_tokens()
        return cls(lambda: _read(tokenizer, ends), ends, width)

    def compiled(self, sampling: SamplingParams) -> CompiledGrammar | None:
        """The grammar a request asks for; None where it asks for none.

        Raises:
            InvalidConfig: text that is no such grammar, or a model without an end of text.
            MissingExtra: llguidance is not installed.
            UnsupportedModel: a tokenizer llguidance cannot read.
        """
        asked = sampling.grammar_source
        if asked is None:
            return None
        with self._lock:
            tokens = self._tokens = self._tokens or self._vocabulary()
            if asked not in self._known:
                matcher = _compiled(tokens, *asked)
                ends = self._ends | frozenset(tokens.eos_tokens)
                self._known[asked] = CompiledGrammar(matcher, ends, self._width)
            self._known.move_to_end(asked)
            while len(self._known) > MAX_COMPILED:
                self._known.popitem(last=False)
            return self._known[asked]


class CompiledGrammar:
    """A grammar over the tokens of one target; implements `types.Grammar`."""

    def __init__(self, matcher: LLMatcher, ends: frozenset[int], width: int) -> None:
        self._matcher, self._ends, self._width = matcher, ends, width
        self._lock = threading.Lock()

    def matcher(self) -> LLMatcher:
        """A matcher of its own, at the beginning."""
        with self._lock:
            return self._matcher.deep_copy()

    def guide(self, num_prompt: int, ends: Iterable[int]) -> MatcherGuide:
        """A guide for one text; it may end with `ends` too, where the grammar may."""
        return MatcherGuide(self.matcher, num_prompt, self._ends | frozenset(ends), self._width)


class MatcherGuide:
    """What a grammar lets come next in one text; implements `types.Guide`.

    Where the grammar may end all ends of text may come, and after one of them nothing else. The
    text's own matcher only ever goes forward, and paths are gone along by copies of it: llguidance
    1.9 rolled back from one branch gave some rows of another the first one's mask.
    """

    def __init__(
        self,
        start: Callable[[], LLMatcher],
        num_prompt: int,
        ends: frozenset[int],
        width: int,
    ) -> None:
        self._start, self._num_prompt, self._ends = start, num_prompt, ends
        self._num_bytes = -(-width // 8)
        self._ends_bits = _bits(ends, width)
        self._matcher: LLMatcher | None = None
        self._read = num_prompt
        self._over = False
        self._known: dict[tuple[int, ...], NDArray[np.uint8]] = {}

    def follow(self, tokens: Sequence[int]) -> None:
        """Reads what the text has gained.

        Raises:
            ModelError: tokens the grammar does not let come, or a grammar too hard to follow.
        """
        if self._matcher is not None and self._read == len(tokens):
            return
        self._known.clear()
        # Taken out meanwhile: an interrupt may come in between, and then it starts anew.
        matcher, self._matcher = self._matcher, None
        if matcher is None:
            matcher, self._read, self._over = self._start(), self._num_prompt, False
        new = tokens[self._read :]
        rest = new[self._go(matcher, new) :]
        if rest and not self._ended(matcher, rest):
            raise ModelError(
                f"the text went on with token {rest[0]}, which its grammar does not let come; "
                "use a rule without loss, or leave the grammar out"
            )
        self._over = self._over or bool(rest)
        self._read, self._matcher = len(tokens), matcher

    def allowed(self, paths: Sequence[Sequence[int]]) -> NDArray[np.uint8]:
        """Bits of what may come after each path, eight tokens a byte from the lowest bit.

        After a path that the grammar does not let come everything may: nobody walks there.

        Raises:
            ModelError: a grammar too hard to follow.
        """
        return np.stack([self._after(tuple(path)) for path in paths])

    def forced(self, most: int) -> list[int]:
        """Tokens beside which no other may come, at most so many, one after another."""
        chain: list[int] = []
        while len(chain) < most and not self._ends.intersection(chain[-1:]):
            bits = self._after(tuple(chain))
            bytes_set = np.flatnonzero(bits)
            byte = int(bits[bytes_set[0]]) if len(bytes_set) == 1 else 0
            if byte.bit_count() != 1:
                break
            chain.append(int(bytes_set[0]) * 8 + byte.bit_length() - 1)
        return chain

    def _after(self, path: tuple[int, ...]) -> NDArray[np.uint8]:
        """The bits after one path, which the drafter's row and the target's share."""
        bits = self._known.get(path)
        if bits is None:
            bits = self._known[path] = self._found(path)
        return bits

    def _found(self, path: tuple[int, ...]) -> NDArray[np.uint8]:
        assert self._matcher is not None, "follow comes first"
        matcher = self._matcher.deep_copy()
        rest = path[self._go(matcher, path) :]
        if not rest and not self._over:
            return self._mask(matcher)
        if self._ended(matcher, rest):
            return self._ends_bits
        return np.full(self._num_bytes, 255, np.uint8)

    def _go(self, matcher: LLMatcher, tokens: Sequence[int]) -> int:
        """Moves on as far as tokens belong to the grammar's text; returns how many do."""
        taken = 0
        for token in () if self._over else tokens:
            ended = token in self._ends and matcher.is_accepting()
            if ended or not matcher.try_consume_tokens([token]):
                break
            taken += 1
        _check(matcher)
        return taken

    def _mask(self, matcher: LLMatcher) -> NDArray[np.uint8]:
        """Bits of what may come where the matcher stands."""
        bits = np.zeros(self._num_bytes, np.uint8)
        found = np.frombuffer(matcher.compute_bitmask(), np.uint8)[: self._num_bytes]
        bits[: len(found)] = found
        _check(matcher)
        return bits | self._ends_bits if matcher.is_accepting() else bits

    def _ended(self, matcher: LLMatcher, rest: Sequence[int]) -> bool:
        """Whether tokens that the matcher did not take are ends of text at an end of text."""
        if not self._ends.issuperset(rest):
            return False
        return self._over or bool(self._mask(matcher.deep_copy())[rest[0] // 8] >> rest[0] % 8 & 1)


def _check(matcher: LLMatcher) -> None:
    if matcher.is_error():
        raise ModelError(f"the grammar cannot be followed: {_line(matcher.get_error())}")


def _line(problem: str) -> str:
    """What llguidance says, without the dump of its state, in one line."""
    return " ".join(problem.partition("<state>")[0].split())[:300]


def _bits(tokens: Iterable[int], width: int) -> NDArray[np.uint8]:
    """Bits of some tokens, eight a byte from the lowest bit."""
    flags = np.zeros(-(-width // 8) * 8, np.bool_)
    flags[[token for token in tokens if token < width]] = True
    return np.packbits(flags, bitorder="little")


def _read(tokenizer: Tokenizer, ends: frozenset[int]) -> LLTokenizer:
    """llguidance's view of a tokenizer."""
    if importlib.util.find_spec("llguidance") is None:
        raise MissingExtra(
            "json_schema, regex, grammar and choice need llguidance: "
            "pip install 'outrider[grammar]'"
        )
    if not ends:
        raise InvalidConfig(
            f"the model in {str(tokenizer.folder)!r} states no end of text, and a grammar's text "
            "ends with one; state eos_token_id in its generation_config.json"
        )
    try:
        return tokenizer.for_grammars(sorted(ends))
    except InvalidConfig:
        raise
    except ValueError as error:
        raise UnsupportedModel(
            f"the tokenizer in {str(tokenizer.folder)!r} cannot be used with a grammar: {error}"
        ) from error


def _compiled(tokens: LLTokenizer, kind: GrammarKind, source: str) -> LLMatcher:
    """The matcher of a grammar's text."""
    from llguidance import LLMatcher, grammar_from

    try:
        text = grammar_from(kind, source)
        matcher = LLMatcher(tokens, text, log_level=0)
        problem = matcher.get_error()
    except ValueError as error:
        matcher, problem = None, str(error)
    if matcher is None or problem:
        raise InvalidConfig(
            f"{kind}={reprlib.repr(source)} cannot be used: {_line(problem)}; correct it, "
            "docs/sampling.md says what is understood"
        )
    return matcher
