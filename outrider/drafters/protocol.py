"""A user's DraftModel as a drafter: it draws for itself, so its laws are taken on trust."""

from __future__ import annotations

import math
from collections.abc import Sequence as Sequenced

from torch import Tensor

from outrider.config import as_tokens
from outrider.decoding import Draft
from outrider.drafters.base import Drafter, RoundDraws
from outrider.errors import (
    DegenerateDistribution,
    DraftShapeMismatch,
    InvalidConfig,
    ModelError,
    OutriderError,
    TokenOutOfRange,
)
from outrider.models.protocol import DraftModel, DraftProposal, as_row
from outrider.sequence import Sequence

MASS_TOLERANCE = 1e-3
"""How far a reported law's mass may be from one, for rows of lower precision."""


class ProtocolDrafter(Drafter):
    """Asks a DraftModel once per text and round; chance comes from the text's own seed.

    Raises:
        InvalidConfig: a model without a vocabulary size.
    """

    trusted = True

    def __init__(self, model: DraftModel) -> None:
        if not isinstance(getattr(model, "vocab_size", None), int) or model.vocab_size < 1:
            raise InvalidConfig(
                f"vocab_size={getattr(model, 'vocab_size', None)!r} of {type(model).__name__}: "
                "a draft model needs the number of its tokens"
            )
        self.model = model
        self.vocab_size = model.vocab_size
        self.name = type(model).__name__

    def propose(
        self, texts: Sequenced[Sequence], depths: Sequenced[int], draws: RoundDraws
    ) -> Draft:
        """The models' own draws, checked in length, width and range."""
        tokens: list[Sequenced[int]] = []
        laws: list[Sequenced[Tensor] | None] = []
        for member, (text, depth) in enumerate(zip(texts, depths, strict=True)):
            if depth < 1:
                tokens.append(())
                laws.append(None)
                continue
            proposal = self._ask(text, depth, draws, member)
            tokens.append(proposal.tokens)
            laws.append(self._check(proposal, depth))
        return draws.trusted(tokens, laws)

    def _ask(self, text: Sequence, depth: int, draws: RoundDraws, member: int) -> DraftProposal:
        """The model's answer, of plain lists whose tokens are whole numbers."""
        try:
            answer = self.model.propose(tuple(text.tokens), depth, draws.rng(member))
            return DraftProposal(
                as_tokens(f"{self.name}.propose's tokens", answer.tokens),
                list(answer.token_logprobs),
                None if answer.distributions is None else list(answer.distributions),
            )
        except OutriderError:
            raise
        except Exception as error:
            raise ModelError(
                f"{self.name}.propose failed on a prefix of {len(text.tokens)} tokens: {error!r}"
            ) from error

    def _check(self, proposal: DraftProposal, depth: int) -> list[Tensor] | None:
        count = len(proposal.tokens)
        parts = {"token_logprobs": len(proposal.token_logprobs)}
        if proposal.distributions is not None:
            parts["distributions"] = len(proposal.distributions)
        for part, length in parts.items():
            if length != count:
                raise DraftShapeMismatch(
                    f"{self.name}.propose returned {count} tokens but {length} {part}; "
                    "the three fields need equal lengths"
                )
        if count > depth:
            raise DraftShapeMismatch(
                f"{self.name}.propose returned {count} tokens where at most {depth} were asked for"
            )
        for token in proposal.tokens:
            if not 0 <= token < self.model.vocab_size:
                raise TokenOutOfRange(
                    f"{self.name}.propose returned token {token}, outside its vocabulary "
                    f"0..{self.model.vocab_size - 1}"
                )
        if proposal.distributions is None:
            return None
        rows = [as_row(row, self.model.vocab_size) for row in proposal.distributions]
        for row, token in zip(rows, proposal.tokens, strict=True):
            mass = float(row.exp().sum())
            # Written so that NaN fails too.
            if not abs(mass - 1.0) < MASS_TOLERANCE or not float(row[token]) > -math.inf:
                raise DegenerateDistribution(
                    f"{self.name}.propose reported a law of mass {mass:.6g} for token {token}, its "
                    f"log-probability {float(row[token]):.6g}; a row holds the natural "
                    "log-probabilities of the law its token was drawn from, and sums to one"
                )
        return [row - row.logsumexp(-1) for row in rows]
