"""Imposed acceptance: the target's own greedy text, corrupted, at the cost of a real draft model.

A text's corrupted copy is fixed: each position bears the target's token with probability alpha and
another one otherwise. Each position is tested at most once, because after a refusal the target's
own token settles it; so the tests are independent and pass with probability alpha.
"""

from __future__ import annotations

import random
from collections.abc import Sequence as Sequenced
from typing import Any

import torch
from torch import Tensor

from outrider import host
from outrider.config import check_between
from outrider.decoding import Draft
from outrider.drafters import Drafter, ModelDrafter, RoundDraws
from outrider.sequence import Sequence


class OracleDrafter(Drafter):
    """Replays what it was taught; `model` does its forwards, and what it says is thrown away.

    Args:
        model: pays for every draft as if it were its own.
        alpha: the probability that a drafted token is the target's.
        seed: of the corruption.
    """

    name = "oracle"

    def __init__(self, model: ModelDrafter, alpha: float, seed: int = 0) -> None:
        check_between("alpha", alpha, 0.0, 1.0)
        self.vocab_size = model.vocab_size
        self._model, self._alpha, self._seed = model, alpha, seed
        self._texts: dict[tuple[int, ...], list[int]] = {}
        # Of texts that are being made: a long prompt is looked up once.
        self._known: dict[int, list[int]] = {}

    def knows(self, prompt: Sequenced[int], num_tokens: int) -> bool:
        """Whether that much of the prompt's continuation was learnt."""
        return len(self._texts.get(tuple(prompt), ())) >= num_tokens

    def learn(self, prompt: Sequenced[int], tokens: Sequenced[int]) -> None:
        """Remembers the target's greedy continuation of a prompt, corrupted."""
        draw = random.Random(f"{self._seed} {len(self._texts)}")
        self._texts[tuple(prompt)] = [
            token if draw.random() < self._alpha else self._other(token, draw) for token in tokens
        ]

    def guesses(self, text: Sequence, depth: int) -> list[int]:
        """What is replayed after the text as it stands: `depth` tokens."""
        at = len(text.tokens) - text.num_prompt
        known = self._known.get(text.key)
        if known is None:
            prompt = tuple(text.tokens[: text.num_prompt])
            known = self._known[text.key] = self._texts[prompt]
        # Beyond what was learnt nothing is verified that counts: the text ends there.
        return [*known[at : at + depth], *[0] * depth][:depth]

    def propose(
        self, texts: Sequenced[Sequence], depths: Sequenced[int], draws: RoundDraws
    ) -> Draft:
        """The model drafts, with every forward it needs; the tokens are the oracle's."""
        guesses = [self.guesses(text, depth) for text, depth in zip(texts, depths, strict=True)]
        return self._model.propose(texts, depths, _Replayed(draws, guesses))

    def unread(self, text: Sequence) -> int:
        """Tokens of the text that the model has not read."""
        return self._model.unread(text)

    def read(self, text: Sequence, rows: int) -> None:
        """The model reads ahead."""
        self._model.read(text, rows)

    def commit(self, text: Sequence, accepted: int) -> None:
        """The model keeps what it has read of the text."""
        self._model.commit(text, accepted)

    def foresee(self, text: Sequence, accepted_1: Tensor, token_1: Tensor) -> None:
        """The model runs ahead."""
        self._model.foresee(text, accepted_1, token_1)

    def discard(self, text: Sequence) -> None:
        """The model forgets the round."""
        self._model.discard(text)

    def close(self, text: Sequence) -> None:
        """The model gives the text's cache back."""
        self._known.pop(text.key, None)
        self._model.close(text)

    def _other(self, token: int, draw: random.Random) -> int:
        assert self.vocab_size is not None
        return (token + draw.randrange(1, self.vocab_size)) % self.vocab_size


class _Replayed:
    """The round's draws to the model: a choice is made as ever, and the guess returned."""

    trees = None
    max_certain = 0

    def __init__(self, draws: RoundDraws, guesses: Sequenced[Sequenced[int]]) -> None:
        self._draws, self._guesses = draws, guesses
        self._there_K: Tensor | None = None
        self._picked: list[Tensor] = []

    def sample(self, logits_nV: Tensor, members: Sequenced[int], index: int) -> list[int]:
        """A greedy choice is made, for its cost."""
        logits_nV.argmax(-1).tolist()
        return [self._guesses[member][index] for member in members]

    def draw_unread(self, logits_1V: Tensor, member: int, index: int) -> Tensor:
        """The same, unread."""
        if self._there_K is None:
            self._there_K = host.send(torch.tensor(self._guesses[member]), logits_1V.device)
        self._picked.append(logits_1V.argmax(-1))
        return self._there_K[index : index + 1]

    def read_drawn(self, member: int) -> list[int]:
        """What was chosen is read."""
        assert self._there_K is not None
        reading = host.Reading((torch.cat(self._picked),))
        self._draws.expect(member, self._there_K)  # pyright: ignore
        reading.wait()
        return list(self._guesses[member])

    def drawn(self) -> Draft:
        """The guesses, as certain tokens."""
        return self._draws.points(self._guesses)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._draws, name)
