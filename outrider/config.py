"""What a user may ask of a text: SamplingParams, validated where built; checks for all options."""

from __future__ import annotations

import difflib
import functools
import inspect
import json
import math
import operator
import reprlib
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Any, Literal, ParamSpec, TypeAlias, TypeVar, cast, get_args

from outrider.errors import InvalidConfig

MAX_SEED = 2**64
GRAMMARS = ("json_schema", "regex", "grammar", "choice")
"""Fields that say which texts may come, of which a request has one at most."""

P = ParamSpec("P")
R = TypeVar("R")
Word: TypeAlias = str | tuple[int, ...]
LogprobsMode = Literal["raw", "processed"]
GrammarKind = Literal["json_schema", "regex", "grammar"]
LogitsProcessor: TypeAlias = Callable[[Any, Any], Any]
"""`(input_ids[1, n], scores[1, V]) -> scores[1, V]`; transformers' own processors are such."""


def nearest(name: str, known: Iterable[str], aliases: Mapping[str, str] | None = None) -> str:
    """A suggestion for a misspelt `name`, ready to append to an error message; "" without one.

    `aliases` are the names that others have for known ones.
    """
    other = (aliases or {}).get(name)
    close = difflib.get_close_matches(name, list(known), n=1) if other is None else [other]
    return f"; did you mean {close[0]!r}?" if close else ""


def known_options(
    *others: str, aliases: Mapping[str, str] | None = None, note: str = ""
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A function whose arguments by name are looked at before Python refuses them.

    Args:
        others: names to suggest that are options of something else, which `note` names.
        aliases: the names that others have for its own.
        note: what to say beside a name that does not exist.

    Raises:
        InvalidConfig: from the function: an option it does not have, with its value and the
            nearest one.
    """

    def wrap(function: Callable[P, R]) -> Callable[P, R]:
        known = [
            name
            for name, one in inspect.signature(function).parameters.items()
            if name != "self" and one.kind is not one.VAR_KEYWORD
        ]
        where = function.__qualname__.removesuffix(".__init__")

        @functools.wraps(function)
        def checked(*args: P.args, **options: P.kwargs) -> R:
            for name, value in options.items():
                if name not in known:
                    raise InvalidConfig(
                        f"{name}={shown(value)}: {where} has no such option; options are "
                        f"{', '.join(known)}{note}" + nearest(name, (*known, *others), aliases)
                    )
            return function(*args, **options)

        return checked

    return wrap


def check_whole(name: str, value: Any, least: int, most: int | None = None) -> None:
    """Refuses anything but a whole number of at least `least` and below `most`."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or value < least or (most is not None and value >= most):
        limit = f"at least {least}" + (f" and below {most}" if most is not None else "")
        raise InvalidConfig(f"{name}={value!r}: a whole number of {limit} is due")


def shown(value: Any) -> str:
    """A value in an error message: plain ones as they are written, others by their type's name."""
    plain = value is None or isinstance(value, (str, bytes, int, float, list, tuple, dict, set))
    return reprlib.repr(value) if plain else getattr(value, "__name__", type(value).__name__)


def counted(number: int, noun: str) -> str:
    """A number of things in words: `1 round`, `2 rounds`."""
    return f"{number} {noun}" + "s" * (number != 1)


def check_rule(rule: Any) -> None:
    """Refuses anything but a name, or None, where a verification rule is named."""
    if rule is not None and not isinstance(rule, str):
        raise InvalidConfig(
            f"rule={shown(rule)}: the name of a rule is due; put a rule of your own into "
            "outrider.decoding.RULES first (docs/write-a-rule.md)"
        )


def check_flag(name: str, value: Any) -> None:
    """Refuses anything but True and False."""
    if not isinstance(value, bool):
        raise InvalidConfig(f"{name}={value!r}: True or False is due")


def as_tokens(name: str, values: Any) -> tuple[int, ...]:
    """Token ids as plain whole numbers, from any sequence, array or tensor of them.

    Raises:
        InvalidConfig: something else; a number with a fraction and a truth value are no tokens.
    """
    try:
        if isinstance(values, (str, bytes, Mapping, Set)):
            raise TypeError(f"{type(values).__name__} holds no token ids")
        return tuple(_as_token(value) for value in _plain(values))
    except (TypeError, ValueError) as error:
        raise InvalidConfig(
            f"{name}={reprlib.repr(values)}: a sequence of token ids (whole numbers) is due: "
            f"{error}"
        ) from error


def _as_token(value: Any) -> int:
    value = _plain(value)
    if isinstance(value, bool):
        raise TypeError("a truth value is no token")
    return operator.index(value)


def _plain(value: Any) -> Any:
    """Arrays, tensors and their elements as Python's own objects; others as they are."""
    convert = getattr(value, "tolist", None)
    return value if convert is None else convert()


def check_between(
    name: str, value: Any, low: float, high: float, *, low_open: bool = False
) -> None:
    """Refuses anything but a finite number from `low` (left out when open) to `high`."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    inside = number and math.isfinite(value) and low <= value <= high
    if not inside or (low_open and value == low):
        bracket = "(" if low_open else "["
        raise InvalidConfig(f"{name}={value!r}: a finite number in {bracket}{low}, {high}] is due")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The law a request is sampled from, and where its text ends.

    The law of a row is that of its logits after allowed_token_ids, bad_words, min_tokens,
    the grammar, logit_bias, the repetition, presence and frequency penalties, no_repeat_ngram,
    logits_processors, temperature, top_k, top_p, min_p and typical_p, in this order, each given the
    text before the row. Names and defaults are vLLM's, except that max_tokens=None means up to the
    context.

    Attributes:
        max_tokens: new tokens at most; None = as many as the context holds, which bounds every
            text (its finish reason is then "length").
        min_tokens: new tokens before which no end or stop token can be drawn and no stop string
            acts.
        temperature: divides the logits; 0 is the one-hot law of the largest logit (greedy).
        top_k: keep the k largest logits; 0 = all.
        top_p: keep the smallest set of likeliest tokens whose mass reaches top_p.
        min_p: keep tokens at least min_p times as likely as the likeliest.
        stop: strings at which the text ends; the string itself is not part of the text. None = ().
        stop_token_ids: tokens at which the text ends, besides the model's own end of text. None =
            ().
        ignore_eos: do not end at the model's end of text.
        seed: 64-bit seed of the request's noise; None draws one from the system.
        n: samples per prompt.
        typical_p: keep the tokens nearest to the law's entropy up to this mass; 1 = all.
        repetition_penalty: divides the positive and multiplies the negative logits of tokens in
            the prompt or the output; 1 is off.
        presence_penalty: subtracted from the logits of tokens in the output; 0 is off.
        frequency_penalty: the same, as many times as they stand there.
        no_repeat_ngram: no n-gram of this many tokens comes twice, those of the prompt counted;
            0 is off.
        logit_bias: added to logits; a mapping from token to number, kept as pairs.
        bad_words: what may not come: sequences of token ids, or strings where there is a tokenizer.
            A word's last token is forbidden wherever the tokens before it stand.
        allowed_token_ids: what may come, ends of text included; None = everything.
        json_schema: the text is JSON of this schema, a dictionary or JSON text; kept as text.
        regex: the whole text matches this regular expression.
        grammar: the text is one of this grammar, Lark or GBNF.
        choice: the text is one of these strings. Of these four at most one may be given; they need
            a tokenizer and the extra `grammar`.
        logits_processors: functions `(input_ids[1, n], scores[1, V]) -> scores`, such as
            transformers' LogitsProcessor objects; each depends on its arguments alone.
        logprobs: each token comes with its log-probability and those of so many likeliest tokens;
            None = without.
        logprobs_mode: "raw" = of the model's own row, "processed" = of the law sampled from.

    Raises:
        InvalidConfig: a value that cannot be meant, with its remedy.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    n: int = 1
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram: int = 0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    bad_words: tuple[Word, ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    logits_processors: tuple[LogitsProcessor, ...] = ()
    logprobs: int | None = None
    logprobs_mode: LogprobsMode = "raw"
    json_schema: Mapping[str, Any] | str | bool | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", _as_stops(self.stop))
        ends = () if self.stop_token_ids is None else self.stop_token_ids
        object.__setattr__(self, "stop_token_ids", as_tokens("stop_token_ids", ends))
        if self.max_tokens is not None:
            check_whole("max_tokens", self.max_tokens, 1)
        check_whole("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidConfig(
                f"min_tokens={self.min_tokens} exceeds max_tokens={self.max_tokens}; "
                "lower the one or raise the other"
            )
        check_between("temperature", self.temperature, 0.0, 1e6)
        if 0 < self.temperature < 1e-6:
            raise InvalidConfig(
                f"temperature={self.temperature!r}: use 0 for greedy decoding, or at least 1e-6"
            )
        check_whole("top_k", self.top_k, 0, 2**31)
        check_between("top_p", self.top_p, 0.0, 1.0, low_open=True)
        check_between("min_p", self.min_p, 0.0, 1.0)
        check_whole("n", self.n, 1)
        if self.seed is not None:
            check_whole("seed", self.seed, 0, MAX_SEED)
        check_flag("ignore_eos", self.ignore_eos)
        for token in self.stop_token_ids:
            check_whole("stop_token_ids", token, 0)
        self._check_penalties()
        self._check_tokens()
        self._check_grammar()
        if self.logprobs is not None:
            check_whole("logprobs", self.logprobs, 0)
        if self.logprobs_mode not in get_args(LogprobsMode):
            raise InvalidConfig(
                f"logprobs_mode={self.logprobs_mode!r}: 'raw' or 'processed' is due"
                + nearest(str(self.logprobs_mode), get_args(LogprobsMode))
            )

    @property
    def grammar_source(self) -> tuple[GrammarKind, str] | None:
        """Which kind of grammar the text follows, and its text; None without one.

        The kinds are json_schema, regex and grammar: a choice is a regex.
        """
        if self.choice:
            return "regex", "|".join(map(_as_regex, self.choice))
        kinds: dict[GrammarKind, Any] = {
            "json_schema": self.json_schema,
            "regex": self.regex,
            "grammar": self.grammar,
        }
        return next(((kind, str(s)) for kind, s in kinds.items() if s is not None), None)

    @property
    def bias_pairs(self) -> tuple[tuple[int, float], ...]:
        """logit_bias as it is kept: tokens in order, each with its number."""
        return cast("tuple[tuple[int, float], ...]", self.logit_bias)

    def _check_penalties(self) -> None:
        check_between("typical_p", self.typical_p, 0.0, 1.0, low_open=True)
        check_between("repetition_penalty", self.repetition_penalty, 0.0, 1e6, low_open=True)
        check_between("presence_penalty", self.presence_penalty, -2.0, 2.0)
        check_between("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        check_whole("no_repeat_ngram", self.no_repeat_ngram, 0)

    def _check_grammar(self) -> None:
        """At most one grammar, kept as text, so that the record is hashable."""
        if self.json_schema is not None:
            object.__setattr__(self, "json_schema", _as_schema(self.json_schema))
        for name in ("regex", "grammar"):
            text = getattr(self, name)
            if text is not None and not (isinstance(text, str) and text):
                raise InvalidConfig(f"{name}={text!r}: non-empty text is due, or None")
        object.__setattr__(self, "choice", _as_choice(self.choice))
        given = [name for name in GRAMMARS if getattr(self, name) not in (None, ())]
        if len(given) > 1:
            raise InvalidConfig(f"{' and '.join(given)} exclude each other; give one of them")

    def _check_tokens(self) -> None:
        """Mappings, lists and None become tuples, so that the record is hashable."""
        allowed = self.allowed_token_ids
        if allowed is not None:
            allowed = as_tokens("allowed_token_ids", allowed)
            if not allowed:
                raise InvalidConfig("allowed_token_ids is empty; name some, or leave it at None")
            for token in allowed:
                check_whole("allowed_token_ids", token, 0)
            object.__setattr__(self, "allowed_token_ids", tuple(sorted(set(allowed))))
        object.__setattr__(self, "logit_bias", _as_bias(self.logit_bias))
        object.__setattr__(self, "bad_words", _as_words(self.bad_words))
        object.__setattr__(self, "logits_processors", _as_processors(self.logits_processors))


SAMPLING = tuple(SamplingParams.__dataclass_fields__)
"""The names of SamplingParams' fields."""

SAMPLING_ALIASES = {
    "bad_words_ids": "bad_words",
    "eos_token_id": "stop_token_ids",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "logits_processor": "logits_processors",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "no_repeat_ngram_size": "no_repeat_ngram",
    "num_return_sequences": "n",
    "sequence_bias": "logit_bias",
    "stop_strings": "stop",
}
"""What others call them."""

# In place of a parameter of its own for every other name, which would hide the fields from editors.
SamplingParams.__init__ = known_options(aliases=SAMPLING_ALIASES)(SamplingParams.__init__)


def _as_bias(given: Any) -> tuple[tuple[int, float], ...]:
    """A mapping, pairs or None, as pairs in the order of the tokens."""
    try:
        pairs = given.items() if isinstance(given, Mapping) else given or ()
        biases = {_as_token(token): value for token, value in pairs}
    except (TypeError, ValueError) as error:
        raise InvalidConfig(
            f"logit_bias={reprlib.repr(given)}: a mapping from token id to number is due: {error}"
        ) from error
    for token, value in biases.items():
        check_whole("logit_bias", token, 0)
        check_between(f"logit_bias of token {token}", value, -1e6, 1e6)
    return tuple(sorted((token, float(value)) for token, value in biases.items()))


def _as_words(given: Any) -> tuple[Word, ...]:
    """One string or several words, as several; None as none."""
    several: Any = (given,) if isinstance(given, str) else given or ()
    if not isinstance(several, (tuple, list, Set)):
        raise InvalidConfig(f"bad_words={given!r}: words in a list are due, text or token ids")
    return tuple(_as_word(word) for word in cast("Iterable[Any]", several))


def _as_word(word: Any) -> Word:
    tokens = word if isinstance(word, str) else as_tokens("bad_words", word)
    if not tokens:
        raise InvalidConfig("bad_words holds an empty word, which would forbid nothing; drop it")
    for token in () if isinstance(tokens, str) else tokens:
        check_whole("bad_words", token, 0)
    return tokens


def _as_processors(given: Any) -> tuple[LogitsProcessor, ...]:
    """One function or several, as several; None as none."""
    # A LogitsProcessorList is a list, and callable too.
    one = callable(given) and not isinstance(given, (tuple, list))
    several: Any = (given,) if one else given or ()
    if not isinstance(several, (tuple, list)) or not all(map(callable, several)):
        raise InvalidConfig(
            f"logits_processors={given!r}: functions (input_ids, scores) -> scores are due"
        )
    return tuple(several)


def _as_schema(given: Any) -> str:
    """A JSON schema, or the text of one, as text; properties stay in their order."""
    try:
        schema = json.loads(given) if isinstance(given, str) else given
        if not isinstance(schema, (Mapping, bool)):
            raise TypeError("a schema is an object, true or false")
        return json.dumps(dict(schema) if isinstance(schema, Mapping) else schema)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidConfig(
            f"json_schema={reprlib.repr(given)}: a JSON schema is due, a dictionary or its text: "
            f"{error}"
        ) from error


def _as_choice(given: Any) -> tuple[str, ...]:
    """Strings to choose from; None as none."""
    usual = given is None or isinstance(given, (tuple, list))
    if not usual or not all(isinstance(text, str) and text for text in given or ()):
        raise InvalidConfig(f"choice={given!r}: non-empty strings in a list are due")
    return tuple(given or ())


def _as_regex(text: str) -> str:
    """An expression that matches this text alone."""
    return "".join(c if c.isalnum() and c.isascii() else f"\\x{{{ord(c):x}}}" for c in text)


def _as_stops(stop: Any) -> tuple[str, ...]:
    """One stop string, several or None, as several."""
    if stop is None:
        return ()
    several = (stop,) if isinstance(stop, str) else stop
    usual = isinstance(several, (tuple, list, Set))
    if not usual or not all(isinstance(text, str) and text for text in several):
        raise InvalidConfig(f"stop={stop!r}: non-empty text is due, or several in a list")
    return tuple(several)
