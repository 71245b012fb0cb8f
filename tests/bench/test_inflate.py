"""Inflated copies: the small model's outputs, every new weight random, or lost in sums."""

import pytest
import torch

from outrider.bench.inflate import VANISHING, Size, compare, inflate, size_of, weights_read
from outrider.errors import InvalidConfig, ModelError
from outrider.models.checkpoint import build_llama

SHAPE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
}
SIZE = Size(5, 256, 400)
TEXTS = [list(range(40)), list(range(60, 0, -1))]


@pytest.fixture(scope="module")
def small():
    """A Llama whose every weight matters: standard deviation 0.2 throughout."""
    model = build_llama(SHAPE, 0).eval()
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.2, generator=draw)
    return model


def test_outputs_are_the_small_models(small):
    found = compare(small, inflate(small, SIZE, 7), TEXTS)
    assert found.difference < 1e-5
    assert found.margin > 0
    assert found.num_rows == 100


@pytest.mark.parametrize("name", ["o_proj", "down_proj"])
def test_a_projection_that_does_not_vanish_shows(small, name):
    """The negative control: one extra row away from zero and the outputs part."""
    big = inflate(small, SIZE, 7)
    last = dict(big.named_parameters())[
        f"model.layers.4.{'self_attn' if name == 'o_proj' else 'mlp'}.{name}.weight"
    ]
    with torch.no_grad():
        last[0] += 1.0
    assert compare(small, big, TEXTS).difference > 1e-3


def test_an_extra_token_that_wins_is_refused(small):
    big = inflate(small, SIZE, 7)
    with torch.no_grad():
        big.lm_head.weight[100] = 2 * big.lm_head.weight[5] + 50 * big.lm_head.weight[9]
    with pytest.raises(ModelError, match="beats the best real one"):
        compare(small, big, TEXTS)


def test_extra_rows_lose_where_all_real_logits_are_negative(small):
    """Rows near zero would win there; rows around the mean do not."""
    big = inflate(small, SIZE, 7)
    state = -small.lm_head.weight.mean(0) * 1e3
    logits = big.lm_head(state)
    assert logits[:61].max() > logits[61:].max()


def test_new_weights_are_random_and_old_ones_are_kept(small):
    big = inflate(small, SIZE, 7)
    ours, theirs = dict(big.named_parameters()), dict(small.named_parameters())
    gate, down = (f"model.layers.1.mlp.{name}_proj.weight" for name in ("gate", "down"))
    assert torch.equal(ours[gate][:48], theirs[gate])
    assert ours[gate][48:].std() > 0.1
    assert torch.equal(ours[down][:, :48], theirs[down])
    assert 0 < ours[down][:, 48:].abs().max() <= VANISHING
    for name in ("self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj"):
        assert ours[f"model.layers.3.{name}.weight"].std() > 0.1
    assert ours["model.embed_tokens.weight"][61:].std() > 0.1
    assert not big.config.tie_word_embeddings


def test_no_two_matrices_are_equal(small):
    """An engine that keeps equal constants once would read fewer weights than there are."""
    matrices = [p for p in inflate(small, SIZE, 7).parameters() if p.dim() > 1]
    assert len({bytes(p.detach().numpy()) for p in matrices}) == len(matrices)


def test_the_seed_decides(small):
    first, again, other = (inflate(small, SIZE, seed) for seed in (7, 7, 8))
    pairs = list(zip(first.parameters(), again.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b, _ in pairs)
    assert not all(torch.equal(a, c) for a, _, c in pairs)


def test_sizes(small):
    big = inflate(small, SIZE, 7)
    assert size_of(big) == SIZE
    assert weights_read(small) == sum(p.numel() for p in small.parameters())
    assert weights_read(big) == sum(p.numel() for p in big.parameters()) - 400 * 32
    with pytest.raises(InvalidConfig, match="num_layers=1 is below"):
        inflate(small, Size(1, 256, 400), 7)
