"""Small models for engine tests: laws that depend on the text, drafters good and bad."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outrider import DraftProposal, SamplingParams, SpeculativeDecoder, SpeculativeDecoderConfig
from outrider.models.tabular import MarkovModel


def markov(vocab: int, order: int, seed: int, *, zeros: float = 0.0) -> MarkovModel:
    """A random Markov law; a share `zeros` of its entries has no mass."""
    chance = np.random.default_rng(seed)
    rows = chance.gamma(0.7, size=(vocab,) * (order + 1)) + 1e-3
    rows *= chance.random(rows.shape) >= zeros
    rows[..., 0] += 0.05
    return MarkovModel(chance.gamma(1.0, size=vocab) + 0.1, rows)


def blurred(model: MarkovModel, seed: int, share: float) -> MarkovModel:
    """A draft for `model`: the same law mixed with noise."""
    other = markov(model.vocab_size, model.order, seed)
    return MarkovModel(
        (1 - share) * model.init + share * other.init,
        (1 - share) * model.rows + share * other.rows,
    )


class Certain:
    """A draft model that repeats one token, without a law (point masses)."""

    def __init__(self, vocab_size: int, token: int) -> None:
        self.vocab_size = vocab_size
        self.token = token

    def propose(self, prefix: Sequence[int], k: int, rng: object) -> DraftProposal:
        return DraftProposal([self.token] * k, [0.0] * k)


def decoder(draft, target, k: int = 3, rule: str | None = None, **sampling) -> SpeculativeDecoder:
    """A decoder in one line."""
    config = SpeculativeDecoderConfig(k=k, rule=rule, sampling=SamplingParams(**sampling))
    return SpeculativeDecoder(draft, target, config)
