"""After how many layers a model had best draft for itself, by a few prompts and a clock.

One pass over the prompts gives the hidden states behind every layer, and the final norm and the
head alone make laws of them. What a round costs follows from four short timings, as a pass's time
grows with the layers it runs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.config import check_whole
from outrider.decoding import compute_expected_tokens
from outrider.errors import EmptyPrompt
from outrider.models.base import Rows, Target
from outrider.models.early_exit import gated_target
from outrider.models.hf import HuggingFaceTarget
from outrider.models.layer_gate import LayerGate

PROMPTS = (
    "The river had been rising since the early morning, and by noon the people of the village had "
    "begun to carry their furniture up the hill. Nobody spoke much. The old bridge, which",
    "To make the dough, mix the flour with the salt, add the water little by little and knead it "
    "for ten minutes. Leave it in a warm place for an hour. Then",
    "def count_words(text):\n    counts = {}\n    for word in text.split():\n        word = "
    "word.lower()\n        counts[word] = counts.get(word, 0) + 1\n    return",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n"
    "        self.items.append(item)\n\n    def pop(self):\n        if not self.items:\n",
    "Question: Why is the sky blue during the day and red in the evening?\nAnswer: Sunlight is "
    "scattered by the air, and blue light more than red. In the evening",
)
"""Prose, instructions and code, for who has no prompts of their own."""

MAX_TOKENS = 128
"""Tokens of a prompt that are read."""
NUMBERS = 1 << 23
"""Numbers in the laws of one depth, all prompts together: a bound on memory, and on time."""
REPEATS = 5


@dataclass(frozen=True, slots=True)
class ExitTrial:
    """What drafting with the first `layers` layers promises for one text at a time.

    Attributes:
        layers: how many layers draft.
        acceptance: mean over the prompts' tokens of the sum over the vocabulary of min(p, q), p
            the target's law at temperature 1 and q that behind these layers.
        speedup: expected tokens a second over plain decoding's.
    """

    layers: int
    acceptance: float
    speedup: float


@torch.inference_mode()
def search_exit(
    target: Target, prompts: Sequence[Sequence[int]], *, k: int = 4
) -> tuple[ExitTrial, ...]:
    """Tries every exit of a model, on prompts of token ids and `k` drafted tokens a round.

    Acceptance is taken on the prompts' own tokens, as if it were independent from token to token;
    times are the least of a few.

    Raises:
        EmptyPrompt: no prompt, or one without tokens.
        InvalidConfig: a `k` that is no number of tokens.
        UnsupportedModel: a model whose layers cannot be run in parts.
    """
    check_whole("k", k, 1)
    target = gated_target(target)
    gate = LayerGate(target)
    if not prompts or not all(prompts):
        raise EmptyPrompt("a search for the best exit reads prompts; give each at least one token")
    cut = [list(prompt[:MAX_TOKENS]) for prompt in prompts]
    acceptances = _acceptances(target, gate, cut)
    one, many = _times(target, gate, cut[0], 1), _times(target, gate, cut[0], k + 1)
    return tuple(
        ExitTrial(layers, alpha, _speedup(alpha, layers, gate.num_layers, k, one, many))
        for layers, alpha in enumerate(acceptances, start=1)
    )


def best_exit(trials: Sequence[ExitTrial]) -> ExitTrial:
    """The exit of the highest expected speed; of equals the earliest."""
    return max(trials, key=lambda trial: trial.speedup)


@dataclass(frozen=True, slots=True)
class _Times:
    """Seconds of a pass over some rows: `fixed` whatever runs, `layer` for each layer that does."""

    fixed: float
    layer: float

    def of(self, layers: int) -> float:
        return self.fixed + self.layer * layers


def _speedup(
    alpha: float, layers: int, num_layers: int, k: int, one: _Times, many: _Times
) -> float:
    """Tokens of a round over what plain decoding makes in its time."""
    tokens = float(compute_expected_tokens([[alpha] * k]))
    # The last drafted token passes the first layers too, ahead of all rows' pass of the rest.
    round_s = (k + 1) * one.of(layers) + many.of(num_layers - layers)
    return tokens * one.of(num_layers) / round_s


def _times(target: HuggingFaceTarget, gate: LayerGate, prompt: list[int], rows: int) -> _Times:
    tokens = torch.tensor((prompt * rows)[:rows])
    seq = target.open_for([*prompt, *prompt], len(prompt) + rows)

    def seconds(layers: int) -> float:
        found: list[float] = []
        for _ in range(REPEATS):
            began = time.perf_counter()
            with gate.running(0, layers):
                target.score(Rows((seq,), (rows,), tokens))
            _finish(target)
            found.append(time.perf_counter() - began)
            target.discard(seq)
        return min(found)

    try:
        target.read(seq, prompt)
        least, most = seconds(1), seconds(gate.num_layers)
    finally:
        target.close(seq)
    layer = max(0.0, (most - least) / (gate.num_layers - 1))
    return _Times(max(0.0, least - layer), layer)


def _finish(target: HuggingFaceTarget) -> None:
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)


def _acceptances(
    target: HuggingFaceTarget, gate: LayerGate, prompts: list[list[int]]
) -> list[float]:
    """Mean overlap of the law behind each layer but the last with the target's own."""
    most = max(1, NUMBERS // target.vocab_size // len(prompts))
    seqs = tuple(target.open(len(prompt)) for prompt in prompts)
    counts = tuple(map(len, prompts))
    ends = torch.tensor(counts).cumsum(0).tolist()
    wanted = [
        row
        for end, count in zip(ends, counts, strict=True)
        for row in range(end - min(count, most), end)
    ]
    rows = Rows(
        seqs,
        counts,
        torch.tensor([token for prompt in prompts for token in prompt]),
        None,
        torch.tensor(wanted),
    )

    def laws() -> Tensor:
        try:
            return target.score(rows).float().softmax(-1)
        finally:
            for seq in seqs:
                target.discard(seq)

    every = range(gate.num_layers)
    try:
        with gate.running(0, gate.num_layers, kept=every) as passed:
            own_nV = laws()
        found: list[float] = []
        for hidden in passed.hidden[:-1]:
            with gate.running(gate.num_layers, gate.num_layers, entering=hidden):
                found.append(float(torch.minimum(own_nV, laws()).sum(-1).mean()))
    finally:
        for seq in seqs:
            target.close(seq)
    return found
