"""Rotary frequencies that follow the longest row of a forward: no text may change another's."""

import pytest
import torch
from transformers import LlamaConfig, Phi3Config

from outrider.errors import InvalidConfig
from outrider.models.base import Rows
from outrider.models.hf import HuggingFaceTarget
from tests.engine.toys import decoder
from tests.models.families import (
    SHAPE,
    ancestors_of,
    one_thread,
    plain_logits,
    plain_tree_logits,
    random_tokens,
    relative_error,
    with_weights,
)

SWITCH, LONGEST = 32, 96
TOLERANCE = 1e-5
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": SWITCH,
    "short_factor": [1.0] * 4, "long_factor": [1.5, 2.0, 3.0, 4.0],
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
PARENTS = [-1, 0, 0, 1, 1, 2, 5, 3]

single = pytest.fixture(scope="module", autouse=True)(one_thread)


def longrope():
    shape = {k: v for k, v in SHAPE.items() if k != "head_dim"}
    shape |= {"max_position_embeddings": LONGEST, "original_max_position_embeddings": SWITCH}
    return with_weights(Phi3Config(**shape, rope_parameters=LONGROPE))


def dynamic():
    return with_weights(
        LlamaConfig(**{**SHAPE, "max_position_embeddings": SWITCH}, rope_parameters=DYNAMIC)
    )


def read(target, tokens, chunk=7):
    seq = target.open(8)
    for part in tokens.split(chunk):
        target.score(Rows((seq,), (len(part),), part, None, torch.empty(0, dtype=torch.int64)))
        target.commit(seq, len(part))
    return seq


def each_alone(model, tokens, first):
    """Return each row as a plain forward of its own text alone gives it."""
    ends = range(first + 1, len(tokens) + 1)
    return torch.stack([plain_logits(model, tokens[:end])[-1] for end in ends])


def test_the_library_itself_lets_a_long_row_change_a_short_one():
    """Negative control: there is something to go wrong."""
    model, tokens = longrope(), random_tokens(20)
    positions = torch.arange(20)[None].expand(2, -1)
    with torch.no_grad():
        beside = model(
            tokens.expand(2, -1), position_ids=torch.stack((positions[0], positions[0] + SWITCH))
        ).logits[0]
    assert relative_error(beside, plain_logits(model, tokens)) > 100 * TOLERANCE


def test_a_short_text_beside_a_long_one_is_the_short_one_alone():
    model, target = longrope(), HuggingFaceTarget(longrope())
    assert target.max_length == LONGEST
    short, long = random_tokens(20), random_tokens(70, 2)
    seqs = read(target, short[:15]), read(target, long[:64])
    got = target.score(Rows(seqs, (5, 6), torch.cat((short[15:], long[64:]))))
    assert relative_error(got[:5], plain_logits(model, short)[15:]) < TOLERANCE
    assert relative_error(got[5:], plain_logits(model, long)[64:]) < TOLERANCE


@pytest.mark.parametrize("start", [26, 29, 31, 32])
def test_rows_on_both_sides_of_the_switch_have_their_own_frequencies(start):
    model, target = longrope(), HuggingFaceTarget(longrope())
    prefix, nodes = random_tokens(start), random_tokens(len(PARENTS), 2)
    seq, beside = read(target, prefix), read(target, prefix[:9])
    ancestors = torch.cat((ancestors_of(PARENTS), ancestors_of([-1])))
    rows = Rows((seq, beside), (8, 1), torch.cat((nodes, nodes[:1])), ancestors)
    want = torch.stack(
        [
            plain_tree_logits(model, prefix, nodes[path], list(range(-1, len(path) - 1)))[-1]
            for path in ([0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 4], [0, 2, 5], [0, 2, 5, 6],
                         [0, 1, 3, 7])
        ]
    )  # fmt: skip
    assert relative_error(target.score(rows)[:8], want) < TOLERANCE
    target.discard(beside)
    # What was rejected leaves no trace, what was kept goes on.
    for kept in ([], [0, 2, 5]):
        target.commit(seq, kept)
        prefix = torch.cat((prefix, nodes[kept]))
        after = random_tokens(8, 5)
        text = torch.cat((prefix, after))
        parts = [target.score(Rows((seq,), (len(p),), p)) for p in after.split([3, 5])]
        assert relative_error(torch.cat(parts), each_alone(model, text, len(prefix))) < TOLERANCE
        target.discard(seq)
        target.score(Rows((seq,), (8,), nodes, ancestors_of(PARENTS)))
    target.close(seq)
    target.close(beside)
    assert target._cache.num_free_blocks == target._cache.num_blocks


def test_greedy_over_the_switch_is_plain_greedy_in_every_batch():
    model = longrope()
    prompts = [random_tokens(n, n).tolist() for n in (28, 5, 40)]
    plain = []
    for prompt in prompts:
        text = list(prompt)
        for _ in range(24):
            text.append(int(plain_logits(model, torch.tensor(text))[-1].argmax()))
        plain.append(text[len(prompt) :])
    target, draft = HuggingFaceTarget(longrope()), HuggingFaceTarget(longrope())
    assert decoder(None, target, temperature=0.0).generate_batch(prompts, 24) == plain
    assert decoder(draft, target, 4, temperature=0.0).generate_batch(prompts, 24) == plain


def test_strict_rows_keep_their_bits_over_the_switch():
    target = HuggingFaceTarget(longrope(), strict=True)
    tokens = random_tokens(44)
    got = []
    for counts in ([44], [1] * 44, [30, 5, 9]):
        seq = target.open(8)
        rows = []
        for part in tokens.split(counts):
            rows.append(target.score(Rows((seq,), (len(part),), part)))
            target.commit(seq, len(part))
        target.close(seq)
        got.append(torch.cat(rows))
    assert torch.equal(got[0], got[1]) and torch.equal(got[0], got[2])


def test_dynamic_scaling_ends_where_frequencies_would_follow_the_length():
    model, target = dynamic(), HuggingFaceTarget(dynamic())
    tokens = random_tokens(SWITCH + 1)
    seqs = read(target, tokens[:4]), read(target, tokens[: SWITCH - 1])
    got = target.score(Rows(seqs, (1, 1), torch.stack((tokens[4], tokens[SWITCH - 1]))))
    assert relative_error(got[0], plain_logits(model, tokens[:5])[-1]) < TOLERANCE
    assert relative_error(got[1], plain_logits(model, tokens[:SWITCH])[-1]) < TOLERANCE
    target.commit(seqs[1], 1)
    with pytest.raises(InvalidConfig, match=f"context of {SWITCH}"):
        target.score(Rows((seqs[1],), (1,), tokens[-1:]))
