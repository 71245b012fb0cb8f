"""The law of a text's first tokens under several controls: enumerated, and sampled by the engine.

The target is a Llama of one layer and 13 tokens, read through Outrider's own attention. Its law is
enumerated from the model's plain forward and the controls written out in `control_rows`. Texts are
asked for eight tokens, so that drafts never meet the end of the request, and given up after three.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as Tokens
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import count, islice, product
from typing import Any
from unittest import mock

import torch

from outrider import SamplingParams
from outrider.drafters import ModelDrafter
from outrider.engine import Emitter, Engine, Requests
from outrider.engine.places import Places
from outrider.engine.settings import tree_budget
from outrider.models.base import Rows, Target
from outrider.models.hf import HuggingFaceTarget
from outrider.sequence import Sequence
from outrider.types import Request
from tests.engine.control_rows import COMBINATIONS, END, VOCAB, law_after
from tests.interop.tiny import tiny

PROMPT = (2,)
FIRST, ASKED, DEPTH = 3, 8, 3
"""Tokens that are looked at, asked for, and drafted in a round."""
WIDTH, NODES = 2, 5
"""Of trees."""
RULES = ("block", "token", "hybrid-traversal")
"""In law; the last on trees."""
LAWS = {number: COMBINATIONS[number] for number in (0, 3, 16, 15, 14, 7)}
"""Six of the combinations, in which every control comes."""
RULE_OF = {number: RULES[i % 3] for i, number in enumerate(LAWS)}
BLIND = {"presence_penalty": 2.0, "frequency_penalty": 2.0}
"""What rows that do not know their path show in."""
WAITING = 256
"""Texts that are open at a time."""


@cache
def model() -> Any:
    """The target's model."""
    return tiny(
        vocab=VOCAB,
        std=0.55,
        seed=4,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )


@cache
def logits() -> dict[tuple[int, ...], torch.Tensor]:
    """The plain forward's scores after every beginning of up to two tokens."""
    found: dict[tuple[int, ...], torch.Tensor] = {}
    with torch.no_grad():
        for length in range(FIRST):
            texts = list(product(range(VOCAB), repeat=length))
            rows = model()(torch.tensor([[*PROMPT, *text] for text in texts])).logits[:, -1]
            found |= dict(zip(texts, rows, strict=True))
    return found


class Table(Target):
    """A draft model whose law depends on the last token alone: a guess made in no time."""

    max_length = None

    def __init__(self, logits_VV: torch.Tensor) -> None:
        self.logits_VV = logits_VV
        self.vocab_size = len(logits_VV)
        self._lengths: dict[int, int] = {}
        self._staged: dict[int, int] = {}
        self._handles = count()

    def open(self, reserve: int, prefix: Tokens = ()) -> int:
        seq = next(self._handles)
        self._lengths[seq] = self._staged[seq] = 0
        return seq

    def length(self, seq: int) -> int:
        return self._lengths[seq]

    def num_staged(self, seq: int) -> int:
        return self._staged[seq]

    def score(self, rows: Rows) -> torch.Tensor:
        for seq, num in zip(rows.seqs, rows.counts, strict=True):
            self._staged[seq] += num
        wanted = slice(None) if rows.logits_rows is None else rows.logits_rows
        return self.logits_VV[rows.tokens_R[wanted]]

    def commit(self, seq: int, path: int | Tokens) -> None:
        self._lengths[seq] += path if isinstance(path, int) else len(path)
        self._staged[seq] = 0

    def discard(self, seq: int) -> None:
        self._staged[seq] = 0

    def close(self, seq: int) -> None:
        del self._lengths[seq], self._staged[seq]


def draft() -> Table:
    """A guess at the target: its laws after the prompt and one token, made blunter."""
    rows_VV = torch.stack([logits()[(token,)] for token in range(VOCAB)])
    return Table((0.75 * rows_VV.softmax(-1) + 0.25 / VOCAB).log())


def due(given: dict[str, Any]) -> dict[tuple[int, ...], float]:
    """The probability of every beginning of three tokens, fewer where the text ends."""
    open_texts: dict[tuple[int, ...], float] = {(): 1.0}
    closed: dict[tuple[int, ...], float] = {}
    for _ in range(FIRST):
        grown: dict[tuple[int, ...], float] = {}
        for text, mass in open_texts.items():
            law = law_after(logits()[text].double(), PROMPT, text, given).tolist()
            for token, p in enumerate(law):
                if p > 0:
                    place = closed if token == END else grown
                    place[(*text, token)] = mass * p
        open_texts = grown
    return closed | open_texts


def samples(given: dict[str, Any], rule: str, num: int, seed: int = 1) -> Counter[tuple[int, ...]]:
    """The beginnings of `num` texts, each of its own noise."""
    trees = tree_budget(DEPTH, WIDTH, NODES) if "traversal" in rule else None
    target = HuggingFaceTarget(model(), share_prefixes=False)
    drafter = ModelDrafter(draft())
    engine = Engine(target, drafter, Emitter(None), max_texts=WAITING, trees=trees)
    requests = Requests(engine, depth=DEPTH, end_tokens=frozenset({END}))
    params = SamplingParams(seed=seed, max_tokens=ASKED, **given)
    counts: Counter[tuple[int, ...]] = Counter()
    going: list[Sequence] = []
    numbers = iter(range(num))
    while counts.total() < num:
        new = [
            requests.text(Request(PROMPT, params, sample=number, rule=rule))
            for number in islice(numbers, WAITING - len(going))
        ]
        engine.submit(new)
        engine.step()
        going += new
        left: list[Sequence] = []
        for text in going:
            assert text.error is None, text.error
            if not text.finished and text.num_output < FIRST:
                left.append(text)
                continue
            engine.cancel(text)
            counts[tuple(text.tokens[len(PROMPT) :][:FIRST])] += 1
        going = left
    assert engine.metrics.accepted > num / 4
    return counts


@dataclass(frozen=True, slots=True)
class Fit:
    """Pearson's statistic of counts beside a law."""

    statistic: float
    degrees: int

    @property
    def p(self) -> float:
        """How often chance alone gives so large a statistic."""
        half = torch.tensor([self.degrees / 2, self.statistic / 2], dtype=torch.float64)
        return float(torch.special.gammaincc(half[0], half[1]))


def fit(counts: Counter[tuple[int, ...]], law: dict[tuple[int, ...], float]) -> Fit:
    """Cells of which fewer than five are due are one cell; what cannot come fits nothing."""
    total = sum(counts.values())
    if not counts.keys() <= law.keys():
        return Fit(float("inf"), 1)
    cells = [(counts[text], total * p) for text, p in law.items()]
    rare = [cell for cell in cells if cell[1] < 5]
    cells = [cell for cell in cells if cell[1] >= 5]
    if rare:
        cells.append((sum(seen for seen, _ in rare), sum(want for _, want in rare)))
    return Fit(sum((seen - want) ** 2 / want for seen, want in cells), len(cells) - 1)


@contextmanager
def blind() -> Iterator[None]:
    """Rows that do not know what was drafted before them."""
    honest = Places.of

    def forgetful(tree: Any) -> Places:
        places = honest(tree)
        return Places(places.owners, [()] * len(places.owners))

    with mock.patch.object(Places, "of", forgetful):
        yield
