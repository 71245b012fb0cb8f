"""The texts of one call: the engine's rounds, criteria after each token, columns for a streamer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from outrider.engine import Requests
from outrider.engine.requests import raised
from outrider.errors import InvalidConfig, warn
from outrider.interop.asked import Ends
from outrider.interop.rows import Batch, Row
from outrider.types import Request


def written(
    requests: Requests, asked: list[Request], batch: Batch, pad: int, streamer: Any
) -> Tensor:
    """Makes every text and returns prompts and texts `[B, L + new]`.

    A criterion is asked about one text at a time, `[1, L + n]` with its padding, after each of its
    tokens in order; so a text ends where plain decoding's would, in the middle of an accepted run
    too.

    Raises:
        InvalidConfig, PromptTooLong, TokenOutOfRange: before any work.
        NonFinite, OutOfMemory, ModelError: what ended a text.
    """
    for request in asked:
        requests.check(request)
    _check_room(requests, batch)
    columns = Columns(streamer, batch.input_ids_BL)
    with requests.running(asked) as texts:
        rows = [Row(text, ids_L) for text, ids_L in zip(texts, batch.input_ids_BL, strict=True)]
        while open_rows := going(rows, batch.ends):
            requests.engine.step()
            for row in open_rows:
                if row.text.error is not None:
                    raise raised(row.text.error)
                row.look(batch.ends)
                if row.ends_at is not None and batch.ends.pads and not row.text.finished:
                    requests.engine.cancel(row.text)
            columns.put(rows, batch.ends, pad)
    columns.end()
    _warn_of_context(rows, batch.ends, requests.engine.target.max_length)
    return sequences(rows, batch, pad)


def _check_room(requests: Requests, batch: Batch) -> None:
    """Without padding every row needs as many tokens as the longest: the context must hold them."""
    context, most = requests.engine.target.max_length, batch.ends.max_tokens
    if batch.ends.pads or context is None or most is None or len(batch.prompts) == 1:
        return
    longest = max(len(prompt) for prompt in batch.prompts)
    if longest + most > context:
        raise InvalidConfig(
            f"{longest} prompt tokens and {most} new ones pass the model's context of {context}, "
            "and without an eos_token_id texts that end early are not padded; ask for fewer tokens"
        )


def _warn_of_context(rows: list[Row], ends: Ends, context: int | None) -> None:
    most = ends.max_tokens
    for row in rows:
        cut = row.text.finish_reason == "length" and row.ends_at == len(row.made)
        if cut and most is not None and len(row.made) < most:
            warn(
                f"a text ended after {len(row.made)} of {most} new tokens, at the model's context "
                f"of {context}; plain generate would have gone on beyond it"
            )
            return


class Columns:
    """Hands a streamer the columns `[B]` plain decoding would have handed it, in the same calls.

    Without a streamer it does nothing.
    """

    def __init__(self, streamer: Any, input_ids_BL: Tensor) -> None:
        self._streamer = streamer
        self._done = 0
        if streamer is not None:
            streamer.put(input_ids_BL.cpu())

    def put(self, rows: list[Row], ends: Ends, pad: int) -> None:
        """Hands on every column that is complete."""
        while self._streamer is not None and any(
            self._done < (row.asked if row.ends_at is None else row.ends_at) for row in rows
        ):
            column = [row.token(self._done, ends, pad) for row in rows]
            if None in column:
                return
            self._streamer.put(torch.tensor(column))
            self._done += 1

    def end(self) -> None:
        """Nothing more will come."""
        if self._streamer is not None:
            self._streamer.end()


def going(rows: list[Row], ends: Ends) -> list[Row]:
    """The rows that still have tokens to make."""
    open_rows = [row for row in rows if row.ends_at is None]
    if ends.pads:
        return open_rows
    if open_rows:
        return [row for row in rows if not row.text.finished]
    longest = max(row.ends_at or 0 for row in rows)
    return [row for row in rows if len(row.made) < longest and not row.text.finished]


def sequences(rows: list[Row], batch: Batch, pad: int) -> Tensor:
    """Prompts and texts `[B, L + new]`, int64, ended texts padded."""
    longest = max(row.ends_at or 0 for row in rows)
    new = [[row.token(column, batch.ends, pad) for column in range(longest)] for row in rows]
    made_BN = torch.tensor(new, dtype=torch.int64, device=batch.input_ids_BL.device)
    return torch.cat((batch.input_ids_BL, made_BN.reshape(len(rows), longest)), dim=1)
