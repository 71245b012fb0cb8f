"""Sampling controls written out slowly: the row after a prefix, with transformers' processors."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import regex
import torch
from llguidance import LLTokenizer, TokenizerWrapper
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from outrider.models.grammar import Grammars

VOCAB = 13
END = 3


class Echo(LogitsProcessor):
    """A user's own: what came last is made likelier, in place; so the path matters."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        assert input_ids.shape[0] == scores.shape[0] == 1
        scores[0, input_ids[0, -1]] += 1.5
        return scores


def parity(input_ids: Tensor, scores: Tensor) -> Tensor:
    """A plain function: after an even number of tokens small ids are dearer."""
    step = torch.arange(scores.shape[1], device=scores.device) / scores.shape[1]
    return scores - step if input_ids.shape[1] % 2 else scores + step


EACH: dict[str, dict[str, Any]] = {
    "allowed_token_ids": {"allowed_token_ids": [0, 1, 2, 3, 4, 6, 8, 9]},
    "bad_words": {"bad_words": [[5], [1, 2], [2, 1], [0, 4, 7], [8, 9], [4, 4], [6, 0]]},
    "min_tokens": {"min_tokens": 4},
    "logit_bias": {"logit_bias": {0: 2.0, 5: -3.5, 12: 1.25}},
    "repetition_penalty": {"repetition_penalty": 1.7},
    "repetition_reward": {"repetition_penalty": 0.6},
    "presence_penalty": {"presence_penalty": 1.3},
    "frequency_penalty": {"frequency_penalty": 0.8},
    "frequency_reward": {"frequency_penalty": -0.7},
    "no_repeat_ngram_1": {"no_repeat_ngram": 1},
    "no_repeat_ngram_2": {"no_repeat_ngram": 2},
    "no_repeat_ngram_3": {"no_repeat_ngram": 3},
    "logits_processors": {"logits_processors": (Echo(), parity)},
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "typical_p": {"typical_p": 0.6},
}
"""Every control alone."""

AHEAD = (
    "bad_words",
    "min_tokens",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "no_repeat_ngram_2",
    "logits_processors",
)
"""Those that look at the drafted tokens before a row."""


SPELLED = [b"a", b"b", b"c", b"<end>", b"d", b"x", b"y", b"ax", b"e", b"ab", b"xe", b"z", b"ya"]
"""The tokens as text, for grammars."""
PAIRS = "([a-e]x?[a-e]y?)*"
"""Pairs of letters, of which nothing is ever forced; the tests' own tokens a to e always fit."""


def may_come(pattern: str, output: Sequence[int]) -> list[int]:
    """Tokens after which the text still begins a match, END where it is one."""
    text = b"".join(SPELLED[token] for token in output).decode()
    begun = [
        token
        for token, spelled in enumerate(SPELLED)
        if regex.fullmatch(pattern, text + spelled.decode(), partial=True)
    ]
    return [*begun, END] if regex.fullmatch(pattern, text) else begun


class Spelled:
    """The toy vocabulary as llguidance asks for one; the longest token that fits comes first."""

    eos_token_id = END
    bos_token_id = None
    special_token_ids = (END,)
    tokens = SPELLED

    def __call__(self, text: bytes) -> list[int]:
        found: list[int] = []
        while text:
            fits = [t for t, spelled in enumerate(SPELLED) if text.startswith(spelled)]
            best = max(fits, key=lambda t: len(SPELLED[t]), default=None)
            found += [] if best is None else [best]
            text = text[1 if best is None else len(SPELLED[best]) :]
        return found


GRAMMARS = Grammars(lambda: LLTokenizer(TokenizerWrapper(Spelled()), eos_token=[END]), [END], VOCAB)


def combination(seed: int) -> dict[str, Any]:
    """Some of the controls together; `no_repeat_ngram=1` would soon leave nothing over."""
    chance = random.Random(seed)
    names = [name for name in EACH if name != "no_repeat_ngram_1"]
    chosen: dict[str, Any] = {}
    for name in chance.sample(names, chance.randint(3, 8)):
        chosen |= EACH[name]
    return chosen


COMBINATIONS = [combination(seed) for seed in range(20)]
GUIDED: dict[str, dict[str, Any]] = {
    "regex": {"regex": PAIRS},
    **{f"regex and combination{i}": {"regex": PAIRS} | COMBINATIONS[i] for i in (1, 5, 6, 7)},
}
"""Grammars alone and beside other controls; they need a tokenizer."""


def row_after(
    logits_V: Tensor, prompt: Sequence[int], output: Sequence[int], given: dict[str, Any]
) -> Tensor:
    """The scores of the token after prompt and output, before temperature."""
    ids, row = torch.tensor([[*prompt, *output]]), logits_V[None].clone()
    for step in before_temperature(list(prompt), list(output), given):
        row = step(ids, row)
    return row[0]


def law_after(
    logits_V: Tensor, prompt: Sequence[int], output: Sequence[int], given: dict[str, Any]
) -> Tensor:
    """The law of the token after prompt and output."""
    row = row_after(logits_V, prompt, output, given)[None]
    temperature = given.get("temperature", 1.0)
    if temperature == 0:
        return torch.nn.functional.one_hot(row[0].argmax(), row.shape[1]).to(row.dtype)
    steps: list[Any] = []
    if temperature != 1:
        steps.append(TemperatureLogitsWarper(temperature))
    if "top_k" in given:
        steps.append(TopKLogitsWarper(given["top_k"]))
    if "top_p" in given:
        steps.append(TopPLogitsWarper(given["top_p"]))
    if "min_p" in given:
        steps.append(MinPLogitsWarper(given["min_p"]))
    if "typical_p" in given:
        steps.append(TypicalLogitsWarper(given["typical_p"]))
    ids = torch.zeros(1, 1, dtype=torch.int64)
    for step in steps:
        row = step(ids, row)
    return row[0].softmax(-1)


def before_temperature(
    prompt: list[int], output: list[int], given: dict[str, Any]
) -> list[Callable[[Tensor, Tensor], Tensor]]:
    """The steps in their order; those without a counterpart in transformers are written out."""
    steps: list[Any] = []
    if "allowed_token_ids" in given:
        refused = [t for t in range(VOCAB) if t not in given["allowed_token_ids"]]
        steps.append(lambda _, row: row.index_fill(1, torch.tensor(refused), -torch.inf))
    if "bad_words" in given:
        steps.append(NoBadWordsLogitsProcessor([list(word) for word in given["bad_words"]]))
    if len(output) < given.get("min_tokens", 0):
        steps.append(lambda _, row: row.index_fill(1, torch.tensor([END]), -torch.inf))
    if "regex" in given:
        left_out = set(range(VOCAB)) - set(may_come(given["regex"], output))
        steps.append(lambda _, row: row.index_fill(1, torch.tensor([*left_out]), -torch.inf))
    if "logit_bias" in given:
        added = torch.zeros(VOCAB)
        for token, value in given["logit_bias"].items():
            added[token] = value
        steps.append(lambda _, row: row + added)
    if "repetition_penalty" in given:
        steps.append(RepetitionPenaltyLogitsProcessor(given["repetition_penalty"]))
    counts = torch.tensor([float(Counter(output)[token]) for token in range(VOCAB)])
    if "presence_penalty" in given:
        steps.append(lambda _, row: row - given["presence_penalty"] * (counts > 0))
    if "frequency_penalty" in given:
        steps.append(lambda _, row: row - given["frequency_penalty"] * counts)
    if "no_repeat_ngram" in given:
        steps.append(NoRepeatNGramLogitsProcessor(given["no_repeat_ngram"]))
    return [*steps, *given.get("logits_processors", ())]
