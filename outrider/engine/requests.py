"""From requests to finished texts: validation before any work, then steps until nothing is left."""

from __future__ import annotations

import copy
import itertools
import reprlib
from collections.abc import Iterator
from contextlib import contextmanager

from outrider import noise
from outrider.config import SamplingParams, check_flag, check_whole
from outrider.decoding import rule_named
from outrider.engine.engine import Engine
from outrider.engine.memory import out_of_memory
from outrider.engine.settings import resolve_rule
from outrider.engine.unused import Unused
from outrider.errors import (
    EmptyPrompt,
    InvalidConfig,
    ModelError,
    OutOfMemory,
    OutriderError,
    PromptTooLong,
    TokenOutOfRange,
    warn,
)
from outrider.sequence import Sequence
from outrider.types import Completion, Delta, Guide, Request

# One count for all, so that a drafter given to two engines tells their texts apart.
_KEYS = itertools.count()


def raised(error: Exception) -> OutriderError:
    """An error of one's own to raise for a text that ended with `error`, which is its cause.

    Texts of several callers may have ended with the same one.
    """
    own: OutriderError | None = None
    if isinstance(error, OutriderError):
        try:
            own = copy.copy(error)
        except Exception:
            own = None  # A class of the user's whose constructor wants more than the message.
    elif out_of_memory(error):
        own = OutOfMemory(f"{error}; ask for shorter texts, or fewer at a time (max_texts)")
    own = own or ModelError(f"a round failed on this text: {error!r}")
    own.__cause__ = error
    return own


def _named(sampling: SamplingParams) -> Iterator[int]:
    """Every token that sampling parameters name.

    Raises:
        InvalidConfig: a word that is text still.
    """
    yield from sampling.stop_token_ids
    yield from sampling.allowed_token_ids or ()
    yield from (token for token, _ in sampling.bias_pairs)
    for word in sampling.bad_words:
        if isinstance(word, str):
            raise InvalidConfig(f"bad_words={word!r} needs a tokenizer; use LLM, or token ids")
        yield from word


def _check_grammar(request: Request) -> None:
    """Refuses a grammar that is text still."""
    asked = request.sampling.grammar_source
    if asked is not None and request.grammar is None:
        kind, source = asked
        raise InvalidConfig(
            f"{kind}={reprlib.repr(source)} needs a tokenizer; use LLM, or allowed_token_ids"
        )


class Requests:
    """Turns requests into texts of one engine.

    Args:
        engine: who makes them.
        depth: tokens drafted per round where a request does not say.
        end_tokens: the model's own ends of text; those it cannot predict are left out.
        lossless: False lets rules through that change the law of the text.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        depth: int,
        end_tokens: frozenset[int],
        lossless: bool = True,
    ) -> None:
        self.engine = engine
        self.depth = depth
        self.lossless = lossless
        self._unused = Unused(engine.choice)
        self._told_of_seed = False
        width = engine.target.vocab_size
        self.end_tokens = frozenset(token for token in end_tokens if 0 <= token < width)

    def check(self, request: Request) -> None:
        """Refuses what cannot be meant, before any work.

        Raises:
            EmptyPrompt, TokenOutOfRange, PromptTooLong, InvalidConfig: each names the value and
                the remedy.
        """
        target = self.engine.target
        if not request.prompt:
            raise EmptyPrompt("the prompt holds no token; give at least one to continue from")
        for token in (*request.prompt, *_named(request.sampling)):
            if not 0 <= token < target.vocab_size:
                raise TokenOutOfRange(
                    f"token {token} is outside the target's vocabulary 0..{target.vocab_size - 1}"
                )
        if target.max_length is not None and len(request.prompt) >= target.max_length:
            raise PromptTooLong(
                f"the prompt has {len(request.prompt)} tokens and the context holds "
                f"{target.max_length}; shorten it to at most {target.max_length - 1}"
            )
        room = self._room(request)
        if room is not None and request.sampling.min_tokens > room:
            raise InvalidConfig(
                f"min_tokens={request.sampling.min_tokens} exceeds the {room} tokens the context "
                f"of {target.max_length} leaves after the prompt; lower it, or shorten the prompt"
            )
        drafter = self.engine.choice.of(request.drafter)
        if request.depth is not None:
            check_whole("depth", request.depth, 0)
            if drafter.max_depth is not None and request.depth > drafter.max_depth:
                raise InvalidConfig(
                    f"depth={request.depth} exceeds max_depth={drafter.max_depth}, which bounds "
                    f"what drafter={drafter.name!r} may choose; ask for at most "
                    f"{drafter.max_depth}, or load with max_depth={request.depth}"
                )
        if request.drafter == "none" and request.depth:
            raise InvalidConfig(
                f"drafter='none' and depth={request.depth!r} contradict each other; give one"
            )
        check_flag("trace", request.trace)
        if request.tenant is not None and not isinstance(request.tenant, str):
            raise InvalidConfig(f"tenant={request.tenant!r}: text is due, or None")
        _check_grammar(request)
        self._rule(request)

    def _rule(self, request: Request) -> str:
        trees = self.engine.trees
        return resolve_rule(request.rule, request.sampling, trees=trees, lossless=self.lossless)

    def _guide(self, request: Request) -> Guide | None:
        if request.grammar is None:
            return None
        return request.grammar.guide(len(request.prompt), request.sampling.stop_token_ids)

    def _room(self, request: Request) -> int | None:
        """Tokens the context leaves after the prompt; None without a limit."""
        longest = self.engine.target.max_length
        return None if longest is None else longest - len(request.prompt)

    def text(self, request: Request) -> Sequence:
        """A new text for a checked request."""
        self.check(request)
        sampling = request.sampling
        limits = [n for n in (sampling.max_tokens, self._room(request)) if n is not None]
        if not limits:
            raise InvalidConfig("max_tokens=None needs a target with a context length; set it")
        return Sequence(
            key=next(_KEYS),
            request=request,
            seed=noise.fresh_seed() if sampling.seed is None else sampling.seed,
            rule=self._rule(request),
            depth=self.depth if request.depth is None else request.depth,
            max_tokens=min(limits),
            end_tokens=frozenset() if sampling.ignore_eos else self.end_tokens,
            tokens=list(request.prompt),
            guide=self._guide(request),
        )

    @contextmanager
    def running(self, requests: list[Request]) -> Iterator[list[Sequence]]:
        """Texts in the engine's queue; taken out again whatever happens."""
        texts = [self.text(request) for request in requests]
        for text in texts:
            if text.depth > 0:
                drafter = self.engine.choice.of(text.request.drafter)
                drafter.expect(text.num_prompt)
                if drafter.by_clock:
                    self._expect_seed(text)
        try:
            self.engine.submit(texts)
            yield texts
            self._unused.saw(texts)
        finally:
            for text in texts:
                self.engine.cancel(text)

    def _expect_seed(self, text: Sequence) -> None:
        """Warns, once, of a seed that gives no text twice: rule and times decide with it."""
        told = self._told_of_seed or text.request.sampling.seed is None
        if told or rule_named(text.rule, lossless=False).seeded:
            return
        self._told_of_seed = True
        warn(
            f"rule={text.rule!r} with seed={text.seed}: who drafts is chosen by measured times, so "
            "one seed gives texts of one law and not one text; leave the rule out ('coupled' gives "
            "the same text whoever drafts), or name one drafter, such as drafter='draft'"
        )

    def stream(self, request: Request) -> Iterator[Delta]:
        """One text's deltas as they come.

        Raises:
            NonFinite, OutOfMemory, ModelError: what ended the text.
        """
        with self.running([request]) as (text,):
            read, done = 0, False
            while not done:
                # Another thread may have taken the last step; then only its deltas are left.
                if not self.engine.settled([text]):
                    self.engine.step()
                done = self.engine.settled([text])
                while read < len(text.outbox):
                    read += 1
                    yield text.outbox[read - 1]
            if text.error is not None:
                raise raised(text.error)

    def complete(self, requests: list[Request]) -> list[Completion]:
        """All texts, in the order of the requests.

        One request's failure leaves the others alone: they are finished first, then the failure is
        raised with their completions in its attribute `completions` (None where one failed).

        Raises:
            NonFinite, OutOfMemory, ModelError: the first failure among the requests.
        """
        with self.running(requests) as texts:
            while not self.engine.settled(texts):
                self.engine.step()
            done = [
                None if text.error else Completion.of(text.outbox, text.stats, text.seed, text.rule)
                for text in texts
            ]
            for text in texts:
                if text.error is not None:
                    error = raised(text.error)
                    error.completions = done  # pyright: ignore[reportAttributeAccessIssue]
                    raise error
        return [completion for completion in done if completion is not None]
