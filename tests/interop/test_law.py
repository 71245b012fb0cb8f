"""Sampling through the callable: plain generate's law, and the same text under the same seed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from scipy.stats import chi2_contingency

import outrider
from outrider import DraftProposal
from tests.interop.tiny import near, padded, tiny

VOCAB, SAMPLES = 12, 3_000
CONTROLS = {"temperature": 0.8, "top_k": 9, "top_p": 0.97, "min_p": 0.01}
IDS = torch.tensor([[3, 5]])


class Lying:
    """Drafts the last token it saw half of the time, and says that it drew from a uniform law."""

    vocab_size = VOCAB

    def propose(self, prefix: Sequence[int], k: int, rng) -> DraftProposal:
        row = [-float(np.log(VOCAB))] * VOCAB
        tokens = [int(rng.uniform() * 2) * prefix[-1] for _ in range(k)]
        return DraftProposal(tokens, [row[0]] * k, [row] * k)


@pytest.fixture(scope="module")
def model():
    return tiny(vocab=VOCAB, std=0.16, num_hidden_layers=1)


def counts(model, num_samples: int = SAMPLES, *, seed: int, **options) -> np.ndarray:
    """How often each pair of first tokens came, of samples of three tokens."""
    callable_ = outrider.custom_generate(**options) if options else None
    torch.manual_seed(seed)
    out = model.generate(
        IDS,
        attention_mask=torch.ones_like(IDS),
        max_new_tokens=3,
        do_sample=True,
        num_return_sequences=num_samples,
        eos_token_id=11,
        pad_token_id=11,
        **CONTROLS,
        custom_generate=callable_,
    )
    pairs = out[:, 2] * VOCAB + out[:, 3]
    return torch.bincount(pairs, minlength=VOCAB * VOCAB).numpy()


def p_value(one: np.ndarray, other: np.ndarray) -> float:
    """That both came from one law; cells of few samples are put together."""
    few = one + other < 20
    table = np.array([[*row[~few], row[few].sum()] for row in (one, other)])
    return float(chi2_contingency(table[:, table.sum(0) > 0]).pvalue)


@pytest.fixture(scope="module")
def plain(model) -> np.ndarray:
    return counts(model, seed=1)


def test_the_law_is_plain_generates(model, plain: np.ndarray) -> None:
    draft = near(model, share=0.4)
    got = counts(model, seed=2, assistant_model=draft, num_assistant_tokens=2)
    assert p_value(got, plain) > 1e-4


@pytest.mark.parametrize("rule", ["block", "token"])
def test_the_law_is_plain_generates_where_drafts_end_early(
    rule: str, model, plain: np.ndarray
) -> None:
    """How long a chain gets depends on what was drafted, and the law of the text does not."""
    callable_ = {"assistant_model": near(model, share=0.4), "num_assistant_tokens": 2, "rule": rule}
    got = counts(model, 3_000, seed=2, **callable_, assistant_confidence_threshold=0.2)
    assert p_value(got, plain) > 1e-4


def test_a_drafter_that_lies_about_its_law_is_found(model, plain: np.ndarray) -> None:
    got = counts(model, 2_000, seed=3, drafter=Lying(), num_assistant_tokens=2)
    assert p_value(got, plain) < 1e-9


def test_plain_generates_law_is_its_own(model, plain: np.ndarray) -> None:
    """The test's own size: two runs of plain generate pass."""
    assert p_value(counts(model, seed=4), plain) > 1e-4


@pytest.mark.parametrize("rule", ["block", "token", "coupled"])
def test_a_seed_of_torch_makes_the_text_again(rule: str) -> None:
    model, inputs = tiny(), padded()
    callable_ = outrider.custom_generate(assistant_model=near(model), rule=rule)

    def sample(seed: int, **options) -> torch.Tensor:
        torch.manual_seed(seed)
        return model.generate(
            **inputs, max_new_tokens=8, do_sample=True, pad_token_id=0, num_return_sequences=2,
            custom_generate=outrider.custom_generate(**options) if options else callable_,
        )  # fmt: skip

    first = sample(1)
    assert torch.equal(sample(1), first)
    assert not torch.equal(sample(2), first)
    new = first[:, inputs["input_ids"].shape[1] :]
    assert len({tuple(row) for row in new.tolist()}) == 6, "every sample has noise of its own"
    same = torch.equal(sample(1, drafter="none", rule=rule), first)
    assert same == (rule == "coupled"), "coupled alone is the same text whoever guesses"


def test_greedy_search_draws_nothing_from_torch() -> None:
    model, inputs = tiny(), padded()
    torch.manual_seed(1)
    wanted = torch.rand(3)
    torch.manual_seed(1)
    model.generate(
        **inputs, max_new_tokens=4, pad_token_id=0, custom_generate=outrider.custom_generate()
    )
    assert torch.equal(torch.rand(3), wanted)
