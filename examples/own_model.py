"""Bring your own model: one method for the target, one for the drafter.

The target here is a lookup table over the last token; yours may be anything that can give the laws
after a prefix and after each of a few guesses.
"""

import math
from collections.abc import Sequence

from outrider import (
    DraftProposal,
    SamplingParams,
    SpeculativeDecoder,
    SpeculativeDecoderConfig,
    TargetScores,
)
from outrider.models.protocol import Rng

VOCABULARY = "abc"
# P(next | last): after `a` mostly `b`, after `b` mostly `c`, after `c` mostly `a`.
ROWS = [[0.1, 0.8, 0.1], [0.1, 0.1, 0.8], [0.8, 0.1, 0.1]]
LOG_ROWS = [[math.log(p) for p in row] for row in ROWS]


class Table:
    """A target: the laws after the prefix, after the prefix and one guess, and so on."""

    vocab_size = len(VOCABULARY)

    def verify(self, prefix: Sequence[int], draft_tokens: Sequence[int]) -> TargetScores:
        return TargetScores([LOG_ROWS[token] for token in (prefix[-1], *draft_tokens)])


class Cycle:
    """A drafter that is certain of the cycle: without distributions guesses are point masses."""

    vocab_size = len(VOCABULARY)

    def propose(self, prefix: Sequence[int], k: int, rng: Rng) -> DraftProposal:
        tokens = [(prefix[-1] + i + 1) % self.vocab_size for i in range(k)]
        return DraftProposal(tokens=tokens, token_logprobs=[0.0] * k)


def main() -> None:
    config = SpeculativeDecoderConfig(k=4, sampling=SamplingParams(temperature=1.0))
    decoder = SpeculativeDecoder(Cycle(), Table(), config)
    tokens = decoder.generate([0], max_tokens=60, seed=1)
    print("".join(VOCABULARY[token] for token in tokens))
    print(
        f"{decoder.metrics.mean_acceptance_length:.2f} tokens per call of the target instead of 1"
    )


if __name__ == "__main__":
    main()
