"""Speculative decoding of models with recurrent state equals plain decoding, token by token."""

from functools import cache

import pytest
import torch

from outrider import SpeculativeDecoder, SpeculativeDecoderConfig
from outrider.drafters import NgramDrafter
from outrider.errors import UnsupportedModel
from outrider.models import HuggingFaceTarget, RecurrentTarget
from outrider.models.recurrent import PENDING_LIMIT
from tests.engine.toys import decoder
from tests.models.families import one_thread, plain_logits, random_model, random_tokens
from tests.models.recurrent_families import random_recurrent

LENGTH = 64
DEPTH = 4
LONG = 530
"""More tokens than a forward reads of a prompt: it is read in chunks."""

PREFIXES = [random_tokens(n, n).tolist() for n in (1, 7, 40, 3, LONG)]
WAYS = {"greedy": {"temperature": 0.0}, "coupled": {"rule": "coupled"}}
CASES = [
    ("lfm2", "ngram", "greedy"),
    ("lfm2", "model", "coupled"),
    ("mamba2", "ngram", "greedy"),
    ("bamba", "ngram", "coupled"),
    ("qwen3_next", "ngram", "greedy"),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            ("lfm2", "ngram", "coupled"),
            ("lfm2", "model", "greedy"),
            ("mamba2", "model", "coupled"),
            ("bamba", "model", "greedy"),
            ("qwen3_next", "model", "coupled"),
        )
    ),
]

single = pytest.fixture(scope="module", autouse=True)(one_thread)


@cache
def target_of(family):
    return RecurrentTarget(random_recurrent(family))


@cache
def llama():
    return HuggingFaceTarget(random_model("llama"))


@cache
def plain(family, way):
    """Plain decoding; greedy is checked against one plain forward of the model itself."""
    target = llama() if family == "llama" else target_of(family)
    out = decoder(None, target, **WAYS[way]).generate_batch(PREFIXES, LENGTH, seed=11)
    if way == "greedy" and family != "llama":
        for prefix, tokens in zip(PREFIXES, out, strict=True):
            rows = plain_logits(random_recurrent(family), torch.tensor(prefix + tokens))
            assert rows[len(prefix) - 1 : -1].argmax(-1).tolist() == tokens
    return out


@pytest.mark.parametrize(("family", "drafter", "way"), CASES)
def test_a_recurrent_target_gives_the_tokens_of_plain_decoding(family, drafter, way):
    draft = NgramDrafter(1, 3) if drafter == "ngram" else llama()
    spec = decoder(draft, target_of(family), DEPTH, **WAYS[way])
    assert spec.generate_batch(PREFIXES, LENGTH, seed=11) == plain(family, way)
    # Rounds that keep less than was drafted are what this is about.
    assert spec.metrics.drafted > spec.metrics.accepted
    alone = spec.generate(PREFIXES[2], LENGTH, seed=11)
    assert alone == plain(family, way)[2]


@pytest.mark.parametrize(("family", "way"), [("mamba2", "coupled"), ("lfm2", "greedy")])
def test_a_recurrent_draft_model_changes_no_token(family, way):
    spec = decoder(target_of(family), llama(), DEPTH, **WAYS[way])
    assert spec.generate_batch(PREFIXES, LENGTH, seed=11) == plain("llama", way)
    assert spec.metrics.drafted > spec.metrics.accepted


def test_a_draft_close_to_its_target_is_kept_in_part():
    """Every length of accepted runs, with both models recurrent."""
    model = random_recurrent("bamba")
    noise = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=noise) * 0.01)
    spec = decoder(RecurrentTarget(model), target_of("bamba"), DEPTH, **WAYS["coupled"])
    assert spec.generate_batch(PREFIXES, LENGTH, seed=11) == plain("bamba", "coupled")
    assert 0.2 < spec.metrics.acceptance_rate < 0.98


def test_trees_are_refused_before_any_work():
    with pytest.raises(UnsupportedModel, match="RecurrentTarget scores chains only"):
        SpeculativeDecoder(llama(), target_of("lfm2"), SpeculativeDecoderConfig(k=DEPTH, width=2))


def test_rows_read_again_are_bounded(monkeypatch):
    """A guesser that is always wrong leaves every token pending; passes stay short all the same."""
    lengths = []
    read = RecurrentTarget._pass

    def noted(target, state, tokens_r, wanted):
        lengths.append(len(tokens_r))
        return read(target, state, tokens_r, wanted)

    target = target_of("lfm2")
    monkeypatch.setattr(RecurrentTarget, "_pass", noted)
    spec = decoder(llama(), target, DEPTH, **WAYS["greedy"])
    spec.generate(PREFIXES[1], LENGTH)
    assert spec.metrics.acceptance_rate < 0.2
    assert PENDING_LIMIT < max(lengths) <= PENDING_LIMIT + DEPTH + 1
    # A pass per round, and one more for each time that the limit is passed.
    assert len(lengths) <= spec.metrics.rounds * (1 + 1.5 / PENDING_LIMIT) + 2
    assert not target._sequences
