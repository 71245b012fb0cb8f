"""Where a text ends and what its reader gets: stop rules and deltas."""

from __future__ import annotations

from outrider.engine.text import Decodes, TextAssembler
from outrider.errors import InvalidConfig
from outrider.sequence import Sequence
from outrider.types import Delta, Source


class Emitter:
    """Cuts each round's tokens at the first end and turns them into deltas.

    Tokens are looked at one by one in the order of the text, so the end is where plain decoding's
    would be, in the middle of an accepted run too. Without a tokenizer texts are token ids alone.
    """

    def __init__(self, tokenizer: Decodes | None) -> None:
        self._tokenizer = tokenizer
        self._assemblers: dict[int, TextAssembler] = {}

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

    def keep(self, text: Sequence, tokens: list[int]) -> list[int]:
        """The tokens up to and including the first that ends the text; sets its finish reason."""
        assembler = self._assemblers.get(text.key)
        params = text.request.sampling
        for num, token in enumerate(tokens, start=1):
            late = text.num_output + num >= params.min_tokens
            if token in params.stop_token_ids:
                text.finish_reason, text.stop_reason = "stop", token
            elif token in text.end_tokens:
                text.finish_reason = "stop"
            elif assembler and (stop := assembler.push(token, watch=late)) is not None:
                text.finish_reason, text.stop_reason = "stop", stop
            elif text.num_output + num == text.max_tokens:
                text.finish_reason = "length"
            if text.finish_reason is not None:
                return tokens[:num]
        return tokens

    def emit(self, text: Sequence, tokens: list[int], sources: list[Source]) -> None:
        """Puts the round's delta into the text's outbox."""
        assembler = self._assemblers.get(text.key)
        new = ""
        if assembler and text.finish_reason is None:
            new = assembler.take()
        elif assembler:
            new = assembler.finish(stopped=isinstance(text.stop_reason, str))
        text.outbox.append(
            Delta(
                index=text.request.sample,
                text=new,
                token_ids=tuple(tokens),
                sources=tuple(sources),
                finish_reason=text.finish_reason,
                stop_reason=text.stop_reason,
            )
        )

    def close(self, text: Sequence) -> None:
        """Forgets the text."""
        self._assemblers.pop(text.key, None)
