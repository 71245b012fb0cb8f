"""Strict: a row's logits are the same bits whatever goes along; without it they are not."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.errors import UnsupportedModel
from outrider.models.base import Rows
from outrider.models.hf import HuggingFaceTarget
from tests.models.families import (
    EXPERTS,
    FAMILIES,
    ancestors_of,
    one_thread,
    random_model,
    random_tokens,
)

LENGTH = 330  # more than one canonical block of keys
PARENTS = [-1, 0, 0, 1, 1, 2, 5, 3]
DTYPES = [torch.float32, torch.bfloat16]


def read(target, tokens, counts, *, stage_only=False):
    """Return every row's logits, read `counts` rows at a time."""
    seq, out = target.open(8), []
    for part in tokens.split(counts):
        out.append(target.score(Rows((seq,), (len(part),), part)))
        if not stage_only:
            target.commit(seq, len(part))
    target.close(seq)
    return torch.cat(out)


def cut(total, *pattern):
    """Return the pattern repeated until it fills `total`."""
    counts = []
    while sum(counts) < total:
        counts.append(min(pattern[len(counts) % len(pattern)], total - sum(counts)))
    return counts


CASES = [(family, dtype) for family in ("llama", "qwen3") for dtype in DTYPES]
CASES.append(("gemma2", torch.float32))
single = pytest.fixture(scope="module", autouse=True)(one_thread)


@pytest.fixture(scope="module", params=CASES, ids=str)
def target(request):
    family, dtype = request.param
    return HuggingFaceTarget(random_model(family).to(dtype), strict=True)


@pytest.fixture(scope="module")
def wanted(target):
    return read(target, random_tokens(LENGTH), [LENGTH])


def test_rows_one_at_a_time_and_in_chunks(target, wanted):
    tokens = random_tokens(LENGTH)
    for counts in ([LENGTH - 12, *cut(12, 1)], [LENGTH - 30, *cut(30, 5)], cut(LENGTH, 37, 64, 9)):
        assert torch.equal(read(target, tokens, counts), wanted), counts
    assert torch.equal(read(target, tokens, [250, 5, 1, 9, 65], stage_only=True), wanted)


def test_rows_in_a_batch_of_five(target, wanted):
    tokens = random_tokens(LENGTH)
    others = [random_tokens(n, n) for n in (3, 40, 300, 261)]
    texts = [others[0], others[1], tokens, others[2], others[3]]
    seqs = [target.open(8) for _ in texts]
    starts = [2, 30, LENGTH - 7, 255, 200]
    prefix = torch.cat([text[:n] for text, n in zip(texts, starts, strict=True)])
    target.score(Rows(tuple(seqs), tuple(starts), prefix, None, torch.empty(0, dtype=torch.int64)))
    for seq, start in zip(seqs, starts, strict=True):
        target.commit(seq, start)
    counts = (1, 4, 7, 3, 5)
    rows = torch.cat([text[n : n + c] for text, n, c in zip(texts, starts, counts, strict=True)])
    got = target.score(Rows(tuple(seqs), counts, rows))
    assert torch.equal(got[5:12], wanted[-7:])
    picked = target.score(Rows((seqs[0],), (1,), texts[0][:1], None, torch.tensor([0])))
    assert picked.shape == (1, target.vocab_size)
    for seq in seqs:
        target.close(seq)


@pytest.mark.parametrize("length", [30, 252, 300])
def test_tree_rows_have_the_bits_of_their_branches(target, length):
    prefix, nodes = random_tokens(length), random_tokens(len(PARENTS), 2)
    branch = [0, 2, 5, 6]
    seq = target.open(8)
    target.score(Rows((seq,), (length,), prefix))
    target.commit(seq, length)
    got = target.score(Rows((seq,), (len(PARENTS),), nodes, ancestors_of(PARENTS)))
    target.commit(seq, branch)
    after = target.score(Rows((seq,), (1,), nodes[:1]))
    target.close(seq)
    text = torch.cat((prefix, nodes[branch], nodes[:1]))
    chain = read(target, text, [length, 1, 2, 1, 1])
    assert torch.equal(got[branch], chain[length : length + 4])
    assert torch.equal(after, chain[-1:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_strict_bits_differ(dtype):
    """Negative control: the comparison above can fail."""
    target = HuggingFaceTarget(random_model("llama").to(dtype), pack=False)
    tokens = random_tokens(LENGTH)
    counts = [LENGTH - 12, *cut(12, 1)]
    assert not torch.equal(read(target, tokens, counts), read(target, tokens, [LENGTH]))


SLABS = tuple(name for name, family in FAMILIES.items() if family.path == "slab")
STRICT = [name for name in FAMILIES if name not in EXPERTS + SLABS]
BY_DEFAULT = ("gemma3", "cohere2", "phi3", "gpt2", "minicpm3")


def every_family():
    """Those of the attention interface in both dtypes, a few of them by default."""
    for family in STRICT:
        marks = () if family in BY_DEFAULT else pytest.mark.slow
        for dtype in DTYPES:
            yield pytest.param(family, dtype, id=f"{family}-{dtype}", marks=marks)


@pytest.mark.parametrize(("family", "dtype"), list(every_family()))
def test_chains_and_trees_have_the_bits_of_plain_decoding(family, dtype):
    target = HuggingFaceTarget(random_model(family).to(dtype), strict=True)
    prefix, nodes = random_tokens(252), random_tokens(len(PARENTS), 2)
    other, seq = read_open(target, prefix[:5]), read_open(target, prefix)
    ancestors = torch.cat((ancestors_of([-1, 0, 1]), ancestors_of(PARENTS)))
    rows = Rows((other, seq), (3, len(PARENTS)), torch.cat((prefix[5:8], nodes)), ancestors)
    tree = target.score(rows)[3:]
    target.discard(seq)
    for path in ([0, 1, 4], [0, 2, 5, 6]):
        chain = target.score(Rows((seq,), (len(path),), nodes[path]))
        target.discard(seq)
        plain_seq = read_open(target, prefix)
        plain = []
        for node in path:
            plain.append(target.score(Rows((plain_seq,), (1,), nodes[node : node + 1])))
            target.commit(plain_seq, 1)
        target.close(plain_seq)
        assert torch.equal(chain, torch.cat(plain))
        assert torch.equal(tree[path], torch.cat(plain))


def read_open(target, tokens):
    """Open a sequence and commit the tokens."""
    seq = target.open(8)
    target.score(Rows((seq,), (len(tokens),), tokens, None, torch.empty(0, dtype=torch.int64)))
    target.commit(seq, len(tokens))
    return seq


@pytest.mark.parametrize("family", EXPERTS + SLABS)
def test_experts_and_attention_of_their_own_are_refused(family):
    reason = "experts" if family in EXPERTS else "attention interface"
    model = random_model(family)
    with pytest.raises(
        UnsupportedModel, match=rf"strict=True.*{model.config.model_type}.*{reason}"
    ):
        HuggingFaceTarget(model, strict=True)


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_real_layer_sizes_with_every_thread(dtype, pack):
    """The bundled target's widths, with packing and with the slabs that stand in for it."""
    torch.set_num_threads(2)
    config = LlamaConfig(
        vocab_size=4096, hidden_size=384, intermediate_size=1088, num_hidden_layers=1, head_dim=64,
        num_attention_heads=6, num_key_value_heads=2, tie_word_embeddings=True, pad_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).to(dtype)
    target = HuggingFaceTarget(model, strict=True, pack=pack)
    tokens = torch.arange(300) * 7919 % 4096
    wanted = read(target, tokens, [300])
    assert torch.equal(read(target, tokens, [250, 37, 1, 5, 1, 1, 5]), wanted)
    torch.set_num_threads(1)
