"""Where a text ends and what its reader gets: stop rules and deltas."""

from __future__ import annotations

from dataclasses import dataclass, replace

from outrider.decoding import RULES
from outrider.engine.text import Decodes, TextAssembler
from outrider.engine.told import NOTHING, Told
from outrider.errors import InvalidConfig
from outrider.sequence import Sequence
from outrider.types import Delta, FinishReason, Source


@dataclass(frozen=True, slots=True)
class Gained:
    """What a round offers one text, token by token; stop rules may cut it.

    Attributes:
        tokens: the accepted tokens and the target's own.
        sources: where each came from.
        drafters: who guessed it; None for the target's own.
        told: what the request asked to be told.
    """

    tokens: list[int]
    sources: list[Source]
    drafters: list[str | None]
    told: Told = NOTHING


@dataclass(frozen=True, slots=True)
class Kept:
    """What a round adds to one text, made whole before any of it is applied.

    Applying it twice is applying it once: everything names the place it goes to.
    """

    num_tokens: int
    num_deltas: int
    delta: Delta
    assembler: TextAssembler | None

    def settle(self, text: Sequence) -> None:
        """Appends the tokens and ends the text where they end it."""
        text.tokens[self.num_tokens :] = self.delta.token_ids
        text.sources[self.num_tokens - text.num_prompt :] = self.delta.sources
        text.finish_reason, text.stop_reason = self.delta.finish_reason, self.delta.stop_reason

    def hand_out(self, text: Sequence) -> None:
        """Puts the delta into the text's outbox."""
        text.outbox[self.num_deltas :] = [self.delta]


class Emitter:
    """Cuts each round's tokens at the first end and turns them into deltas.

    Tokens are looked at one by one in the order of the text, so the end is where plain decoding's
    would be, in the middle of an accepted run too. Without a tokenizer texts are token ids alone.
    """

    def __init__(self, tokenizer: Decodes | None) -> None:
        self._tokenizer = tokenizer
        self._assemblers: dict[int, TextAssembler] = {}
        self._kept: dict[int, Kept] = {}

    def open(self, text: Sequence) -> None:
        """Prepares for a new text.

        Raises:
            InvalidConfig: stop strings where there is no tokenizer to make text with.
        """
        if self._tokenizer is not None:
            self._assemblers[text.key] = TextAssembler(
                self._tokenizer, text.request.prompt, text.request.sampling.stop
            )
        elif text.request.sampling.stop:
            raise InvalidConfig(
                f"stop={text.request.sampling.stop!r} needs a tokenizer; use LLM, or stop_token_ids"
            )

    def keep(self, text: Sequence, gained: Gained) -> int:
        """Settles the tokens up to and including the first that ends the text; returns how many.

        The outcome is noted whole before the text changes, so that `emit` can finish what an
        interrupt broke off.
        """
        kept = self._kept[text.key] = self._cut(text, gained)
        kept.settle(text)
        return len(kept.delta.token_ids)

    def emit(self, text: Sequence) -> None:
        """Hands out the delta of what was kept last, if anything was."""
        kept = self._kept.get(text.key)
        if kept is None:
            return
        kept.settle(text)
        if kept.assembler is not None:
            self._assemblers[text.key] = kept.assembler
        kept.hand_out(text)
        del self._kept[text.key]

    def _cut(self, text: Sequence, gained: Gained) -> Kept:
        assembler = self._assemblers.get(text.key)
        assembler = assembler and assembler.copy()
        params = text.request.sampling
        finish: FinishReason | None = None
        reason: str | int | None = None
        num = 0
        for num, token in enumerate(gained.tokens, start=1):
            late = text.num_output + num >= params.min_tokens
            if token in params.stop_token_ids:
                finish, reason = "stop", token
            elif token in text.end_tokens:
                finish = "stop"
            elif assembler and (stop := assembler.push(token, watch=late)) is not None:
                finish, reason = "stop", stop
            elif text.num_output + num == text.max_tokens:
                finish = "length"
            if finish is not None:
                break
        new, told = "", gained.told
        if assembler and finish is None:
            new = assembler.take()
        elif assembler:
            new = assembler.finish(stopped=isinstance(reason, str))
        delta = Delta(
            index=text.request.sample,
            text=new,
            token_ids=tuple(gained.tokens[:num]),
            sources=tuple(gained.sources[:num]),
            finish_reason=finish,
            stop_reason=reason,
            lossless=text.rule in RULES,
            logprobs=told.logprobs and told.logprobs[:num],
            drafters=tuple(gained.drafters[:num]),
            round=len(text.outbox),
            trace=told.trace and replace(told.trace, kept=num),
        )
        return Kept(len(text.tokens), len(text.outbox), delta, assembler)

    def close(self, text: Sequence) -> None:
        """Forgets the text."""
        self._assemblers.pop(text.key, None)
        self._kept.pop(text.key, None)
