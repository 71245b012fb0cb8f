"""How well a pair agrees: acceptance of the draft's law on the text its target writes."""

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from outrider.errors import InvalidConfig
from outrider.train import forward
from outrider.train.chance import generator
from outrider.train.writing import continue_rows

MAX_ROWS = 64


@dataclass(frozen=True, slots=True)
class Prompt:
    """One evaluation prompt; `overlap` is the share of its 8-grams that the training text has."""

    id: str
    source: str
    text: str
    num_tokens: int
    overlap: float


@dataclass(frozen=True, slots=True)
class Agreement:
    """Acceptance of single tokens along the target's own continuations of the prompts.

    `greedy`: share of tokens of greedy text that are the draft's likeliest too. `sampled`: mean
    over positions of text drawn at temperature 1 of the sum over the vocabulary of min(p, q).
    `overlap`: mean overlap.
    """

    num_prompts: int
    num_tokens: int
    greedy: float
    sampled: float
    overlap: float


def load_prompts(path: Path) -> tuple[Prompt, ...]:
    """The prompts of a JSONL file; InvalidConfig for a line that is none."""
    prompts: list[Prompt] = []
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        try:
            prompts.append(Prompt(**json.loads(line)))
        except (TypeError, ValueError) as error:
            raise InvalidConfig(
                f"line {number} of {path.name} is no prompt: {error}; write the file anew"
            ) from error
    return tuple(prompts)


@torch.no_grad()
def agreement(
    target: Any,
    draft: Any,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    *,
    max_tokens: int = 64,
    seed: int = 0,
) -> Agreement:
    """Acceptance over `max_tokens` tokens after each prompt, greedy and sampled."""
    by_length: dict[int, list[list[int]]] = defaultdict(list)
    for prompt in prompts:
        ids = tokenizer.encode(prompt.text).ids
        by_length[len(ids)].append(ids)
    equal, shared, count = 0.0, 0.0, 0
    for length, rows in sorted(by_length.items()):
        for prompts_BT in torch.tensor(rows).split(MAX_ROWS):
            draw = generator(seed, f"evaluation of {length}")
            for greedy in (True, False):
                greedy_B = torch.full((len(prompts_BT),), greedy)
                text_BT = continue_rows(target, prompts_BT, max_tokens, greedy_B, draw)
                p_BNV, q_BNV = (_laws(model, text_BT, max_tokens) for model in (target, draft))
                if greedy:
                    equal += float((p_BNV.argmax(-1) == q_BNV.argmax(-1)).sum())
                else:
                    shared += float(torch.minimum(p_BNV, q_BNV).sum())
            count += prompts_BT.size(0) * max_tokens
    overlap = sum(p.overlap for p in prompts) / len(prompts)
    return Agreement(len(prompts), count, equal / count, shared / count, overlap)


def _laws(model: Any, text_BT: torch.Tensor, count: int) -> torch.Tensor:
    """Next-token laws `[B, N, V]` before each of the last `count` tokens."""
    h_BTD, _ = forward.hidden_states(model, text_BT.to(model.lm_head.weight.device))
    return forward.logits(model, h_BTD[:, -count - 1 : -1]).softmax(-1)
