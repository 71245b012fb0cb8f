"""Sampling from a GGUF target: the exact law of its own rows, for chains and trees."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from outrider import DraftProposal, SamplingParams
from outrider.bench.gguf_file import write_gguf
from outrider.drafters import Drafter, ModelDrafter, ProtocolDrafter
from outrider.engine import Emitter, Engine, Requests
from outrider.models.base import Rows
from outrider.models.libllama import LibllamaTarget
from outrider.tree import TreeBudget
from outrider.types import Request
from tests.interop.tiny import near, tiny
from tests.models.families import ancestors_of, one_thread
from tests.models.libllama_models import needs_libllama

pytestmark = needs_libllama
single = pytest.fixture(scope="module", autouse=True)(one_thread)

VOCAB, PREFIX, SAMPLES = 12, (3, 5), 2_000


class Lying:
    """Drafts the last token it saw half of the time, and says that it drew from a uniform law."""

    vocab_size = VOCAB

    def propose(self, prefix, k, rng) -> DraftProposal:
        row = [-float(np.log(VOCAB))] * VOCAB
        tokens = [int(rng.uniform() * 2) * prefix[-1] for _ in range(k)]
        return DraftProposal(tokens, [row[0]] * k, [row] * k)


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[LibllamaTarget, LibllamaTarget]:
    """A random target and a draft model near to it."""
    folder: Path = tmp_path_factory.mktemp("law")
    model = tiny(vocab=VOCAB, std=0.16, num_hidden_layers=1)
    for name, one in (("target", model), ("draft", near(model, share=0.4))):
        write_gguf(one, folder / f"{name}.gguf", tokenizer=None, dtype=torch.float32)
    return LibllamaTarget(folder / "target.gguf"), LibllamaTarget(folder / "draft.gguf")


def law(target: LibllamaTarget) -> np.ndarray:
    """The probability of each pair of first tokens: a root and every child in one tree."""
    seq = target.open(4)
    target.read(seq, PREFIX[:-1])
    nodes = torch.tensor([PREFIX[-1], *range(VOCAB)])
    rows = target.score(Rows((seq,), (VOCAB + 1,), nodes, ancestors_of([-1, *[0] * VOCAB])))
    target.close(seq)
    probs = rows.double().softmax(-1)
    return (probs[0, :, None] * probs[1:]).flatten().numpy()


def p_value(target: LibllamaTarget, drafter: Drafter, rule: str, trees: TreeBudget | None) -> float:
    """That samples of three tokens, whose first two are counted, came from the exact law."""
    engine = Engine(target, drafter, Emitter(None), max_texts=64, trees=trees)
    requests = Requests(engine, depth=2, end_tokens=frozenset())
    asked = [
        Request(PREFIX, SamplingParams(seed=seed, max_tokens=3), rule=rule)
        for seed in range(SAMPLES)
    ]
    seen = Counter(one.token_ids[0] * VOCAB + one.token_ids[1] for one in requests.complete(asked))
    counts = np.array([seen[pair] for pair in range(VOCAB * VOCAB)])
    due = law(target) * SAMPLES
    few = due < 5
    pooled = [np.array([*row[~few], row[few].sum()]) for row in (counts, due)]
    return float(chisquare(*pooled).pvalue)


@pytest.mark.parametrize(
    ("rule", "trees"),
    [
        ("block", None),
        ("hybrid-traversal", TreeBudget(3, 6)),
        pytest.param("token", None, marks=pytest.mark.slow),
        pytest.param("coupled", TreeBudget(3, 6), marks=pytest.mark.slow),
    ],
)
def test_the_law_is_that_of_the_files_rows(pair, rule: str, trees: TreeBudget | None) -> None:
    target, draft = pair
    assert p_value(target, ModelDrafter(draft), rule, trees) > 1e-4


def test_a_drafter_that_lies_about_its_law_is_found(pair) -> None:
    target, _ = pair
    assert p_value(target, ProtocolDrafter(Lying()), "block", None) < 1e-9
