"""Models with recurrent state: rows after restored snapshots are plain forwards' rows."""

import pytest
import torch
from transformers.cache_utils import DynamicSlidingWindowLayer, LinearAttentionCacheLayerMixin

from outrider import LLM
from outrider.errors import InvalidConfig, TokenOutOfRange, UnsupportedModel
from outrider.models import HuggingFaceTarget, RecurrentTarget, packing, recurrent_probe
from outrider.models.base import Rows
from outrider.models.bundled import bundled_path
from outrider.models.packing import PackedLinear
from outrider.models.plan import chain_ancestors
from outrider.models.recurrent import PENDING_LIMIT
from outrider.models.recurrent_state import SavedLayer
from tests.models.families import one_thread, plain_logits, random_tokens, relative_error
from tests.models.recurrent_families import OPTIONS, UNFIT, random_recurrent
from tests.models.test_capability import state_of

# The contract of every target, for the rows of chains.
from tests.models.test_families import (  # noqa: F401
    TOLERANCE,
    read,
    test_chunks_equal_one_plain_forward,
    test_staged_rows_continue_a_chain_and_discard_forgets_them,
    test_wanted_rows_are_the_same_rows,
)

HYBRID = ("bamba", "falcon_h1", "qwen3_next", "lfm2")
PUT_BACK = SavedLayer.put_back

single = pytest.fixture(scope="module", autouse=True)(one_thread)


@pytest.fixture(scope="module", params=OPTIONS)
def pair(request):
    """The family's model and a target over a second copy of it."""
    return random_recurrent(request.param), RecurrentTarget(random_recurrent(request.param))


def score(target, seq, tokens, wanted=None):
    """Stage the tokens of one sequence; logits of the last `wanted` rows, None: of all."""
    rows = None if wanted is None else torch.arange(len(tokens) - wanted, len(tokens))
    return target.score(Rows((seq,), (len(tokens),), tokens, None, rows))


def rounds(target, tokens, accepted, draft=4):
    """Rows of the text read as the engine reads it: in each round a few drafted ones are wrong."""
    seq = read(target, tokens[:20])
    out, known, wrong = [], 21, random_tokens(draft, 77)
    for kept in accepted:
        pending = tokens[target.length(seq) : known]
        drafted = torch.cat((tokens[known : known + kept], wrong[kept:]))
        rows = score(target, seq, torch.cat((pending, drafted)), len(drafted) + 1)
        out.append((known - 1, rows[: kept + 1]))
        target.commit(seq, len(pending) + kept)
        known += kept + 1
    target.close(seq)
    return out


def worst(target, model, accepted):
    tokens = random_tokens(120)
    want = plain_logits(model, tokens)
    return max(
        relative_error(rows, want[first : first + len(rows)])
        for first, rows in rounds(target, tokens, accepted)
    )


@pytest.mark.parametrize("accepted", [[0] * 25, [2, 0, 4, 1, 3, 3, 4, 4, 0], [1] * 30])
def test_chains_after_partial_commits_equal_plain_forwards(pair, accepted):
    model, target = pair
    assert worst(target, model, accepted) < TOLERANCE


def test_a_state_that_is_not_put_back_shows(pair, monkeypatch):
    model, target = pair
    monkeypatch.setattr(SavedLayer, "put_back", lambda *_: None)
    assert worst(target, model, [2, 0, 3]) > 100 * TOLERANCE


def test_attention_that_is_not_cropped_shows(pair, monkeypatch):
    model, target = pair
    if model.config.model_type not in HYBRID:
        pytest.skip("no attention layers")

    def states_alone(saved, layer):
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            layer.conv_states, layer.recurrent_states = saved.conv, saved.recurrent

    monkeypatch.setattr(SavedLayer, "put_back", states_alone)
    assert worst(target, model, [2, 0, 3]) > 100 * TOLERANCE


def test_a_ragged_batch_is_each_sequence_alone(pair):
    model, target = pair
    texts = [random_tokens(n, n) for n in (17, 30, 4, 9, 12)]
    seqs = [read(target, text[:-3]) for text in texts]
    counts = (3, 1, 2, 3, 3)
    flat = torch.cat([text[-3:][:n] for text, n in zip(texts, counts, strict=True)])
    got = target.score(Rows(tuple(seqs), counts, flat)).split(counts)
    for text, count, rows in zip(texts, counts, got, strict=True):
        want = plain_logits(model, text)[len(text) - 3 :][:count]
        assert relative_error(rows, want) < TOLERANCE
    for seq in seqs:
        target.close(seq)


def test_length_stays_at_the_mark_and_moves_with_a_whole_commit(pair):
    _, target = pair
    seq = read(target, random_tokens(6))
    score(target, seq, random_tokens(5))
    target.commit(seq, 3)
    assert (target.length(seq), target.num_staged(seq)) == (6, 0)
    score(target, seq, random_tokens(5))
    target.commit(seq, [0, 1, 2, 3, 4])
    assert target.length(seq) == 11
    # Row by row, as a draft model reads, every row has a mark.
    for token in random_tokens(4):
        score(target, seq, token[None])
    target.commit(seq, 3)
    assert target.length(seq) == 14
    target.close(seq)


def test_many_pending_rows_are_read_apart_from_the_draft(pair):
    _, target = pair
    for pending, length in ((PENDING_LIMIT, 6), (PENDING_LIMIT + 1, 6 + PENDING_LIMIT + 1)):
        seq = read(target, random_tokens(6))
        rows = score(target, seq, random_tokens(pending + 4), 5)
        assert len(rows) == 5
        target.commit(seq, pending + 2)
        assert target.length(seq) == length
        target.close(seq)


def test_a_prompt_in_chunks_keeps_two_marks_at_most(pair):
    model, target = pair
    tokens = random_tokens(90)
    seq = target.open(90)
    for start in range(0, 80, 10):
        score(target, seq, tokens[start : start + 10], 0)
        assert len(target.state(seq)._marks) <= 2
    got = score(target, seq, tokens[80:], 3)
    assert relative_error(got, plain_logits(model, tokens)[-3:]) < TOLERANCE
    # Chunks are not read again where the draft behind them is not kept whole.
    target.commit(seq, 88)
    assert target.length(seq) in (80, 88)
    target.close(seq)
    seq = target.open(90)
    score(target, seq, tokens[:30], 0)
    score(target, seq, tokens[30:60], 0)
    target.discard(seq)
    assert (target.length(seq), target.num_staged(seq)) == (0, 0)
    assert relative_error(score(target, seq, tokens), plain_logits(model, tokens)) < TOLERANCE
    target.close(seq)


def test_trees_are_refused_by_name(pair):
    _, target = pair
    family = target.model.config.model_type
    seq = read(target, random_tokens(6))
    tokens = random_tokens(3)
    with pytest.raises(UnsupportedModel, match=rf"{family}.*chains, not trees"):
        target.score(Rows((seq,), (3,), tokens, torch.tensor([1, 3, 5])))
    assert target.num_staged(seq) == 0
    target.score(Rows((seq,), (3,), tokens, chain_ancestors(3)))
    with pytest.raises(UnsupportedModel, match=rf"{family}.*chains, not trees"):
        target.commit(seq, [0, 2])
    target.commit(seq, [0, 1, 2])
    assert target.length(seq) == 9
    target.close(seq)


def test_a_failure_in_a_batch_stages_nothing(pair, monkeypatch):
    model, target = pair
    tokens = random_tokens(14)
    seqs = [read(target, tokens[:8]) for _ in range(3)]
    score(target, seqs[0], tokens[8:10])
    rows = Rows(tuple(seqs), (2, 2, 2), torch.cat((tokens[10:12], tokens[8:10], tokens[8:10])))
    forward, calls = target.model.forward, []

    def fails_in_its_second_call(**inputs):
        calls.append(inputs)
        forward(**inputs)
        return 1 / (2 - len(calls)) and forward(**inputs)

    monkeypatch.setattr(target.model, "forward", fails_in_its_second_call)
    with pytest.raises(ZeroDivisionError):
        target.score(rows)
    monkeypatch.undo()
    assert [target.num_staged(seq) for seq in seqs] == [2, 0, 0]
    want = plain_logits(model, tokens)
    assert relative_error(score(target, seqs[0], tokens[10:]), want[10:]) < TOLERANCE
    for seq in seqs[1:]:
        assert relative_error(score(target, seq, tokens[8:]), want[8:]) < TOLERANCE
    for seq in seqs:
        target.close(seq)


def test_bad_rows_end_in_typed_errors():
    target = RecurrentTarget(random_recurrent("lfm2"))
    seq = target.open(4)
    for bad in (97, -1):
        with pytest.raises(TokenOutOfRange, match=f"token {bad} "):
            score(target, seq, torch.tensor([1, bad]))
    with pytest.raises(InvalidConfig, match="context of 1024"):
        score(target, seq, torch.zeros(1025, dtype=torch.int64))
    with pytest.raises(InvalidConfig, match="name one twice"):
        target.score(Rows((seq, seq), (1, 1), torch.tensor([1, 2])))
    with pytest.raises(InvalidConfig, match="3 rows to commit where 0"):
        target.commit(seq, 3)
    target.close(seq)
    with pytest.raises(InvalidConfig, match="not open"):
        target.length(seq)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", UNFIT)
def test_a_state_that_does_not_carry_is_refused_by_name(family, dtype):
    model = random_recurrent(family, dtype=dtype).train()
    before = state_of(model)
    with pytest.raises(UnsupportedModel, match=rf"{family}.*do not go on from its"):
        RecurrentTarget(model)
    after = state_of(model)
    assert (after[0], after[2], after[3]) == (before[0], before[2], before[3])
    assert all(torch.equal(after[1][name], weights) for name, weights in before[1].items())


@pytest.mark.parametrize("family", [*OPTIONS, *UNFIT])
def test_a_state_too_quiet_for_its_arithmetic_is_heard(family, monkeypatch):
    """With small weights in bfloat16, and every error tolerated, the trial still tells."""
    monkeypatch.setitem(recurrent_probe.TRIAL_TOLERANCE, torch.bfloat16, 10.0)
    model = random_recurrent(family, dtype=torch.bfloat16)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(0.5 if weight.dim() > 1 else 1.0)
    if family in UNFIT:
        with pytest.raises(UnsupportedModel, match=rf"{family}.*do not go on from its recurrent"):
            RecurrentTarget(model)
    else:
        RecurrentTarget(model)


@pytest.mark.parametrize("family", OPTIONS)
def test_the_trial_finds_a_state_that_is_not_put_back(family, monkeypatch):
    monkeypatch.setattr(SavedLayer, "put_back", lambda *_: None)
    with pytest.raises(UnsupportedModel, match=rf"{family}.*differ from its own"):
        RecurrentTarget(random_recurrent(family))


def test_strict_needs_equal_bits(monkeypatch):
    with pytest.raises(UnsupportedModel, match=r"strict=True.*lfm2.*other bits.*strict=False"):
        RecurrentTarget(random_recurrent("lfm2"), strict=True)
    with pytest.raises(UnsupportedModel, match=r"strict=True.*qwen3_next.*experts"):
        RecurrentTarget(random_recurrent("qwen3_next"), strict=True)
    whole = RecurrentTarget._pass

    def one_by_one(target, state, tokens_r, wanted):
        parts = [whole(target, state, token[None], [0]) for token in tokens_r]
        return [logits for row in wanted for logits in parts[row]]

    monkeypatch.setattr(RecurrentTarget, "_pass", one_by_one)
    assert RecurrentTarget(random_recurrent("lfm2"), strict=True).info()["strict"]


def test_an_output_layer_whose_weight_is_asked_for_stays_plain(monkeypatch):
    monkeypatch.setattr(packing, "MIN_PACKED", {torch.float32: 1, torch.bfloat16: 1})
    model = RecurrentTarget(random_recurrent("mamba2")).model
    assert isinstance(model.backbone.layers[0].mixer.in_proj, PackedLinear)
    assert type(model.lm_head) is torch.nn.Linear


def test_a_sliding_window_is_put_back():
    layer = DynamicSlidingWindowLayer(sliding_window=4)
    keys = torch.arange(12.0).view(1, 1, 12, 1)
    layer.update(keys[:, :, :6], keys[:, :, :6])
    saved = SavedLayer.of(layer)
    held = layer.keys.clone()
    layer.update(keys[:, :, 6:], keys[:, :, 6:])
    assert not torch.equal(layer.keys, held)
    saved.put_back(layer)
    assert torch.equal(layer.keys, held) and layer.get_seq_length() == 6


def test_folders_become_the_target_that_fits(tmp_path):
    model = random_recurrent("bamba")
    model.save_pretrained(tmp_path)
    target = HuggingFaceTarget.load(tmp_path, dtype=torch.float32)
    assert isinstance(target, RecurrentTarget)
    assert (target.vocab_size, target.max_length) == (97, 1024)
    tokens = random_tokens(20)
    want = plain_logits(model, tokens)
    assert relative_error(score(target, target.open(20), tokens), want) < TOLERANCE
    # The wrapped model still works by itself.
    assert relative_error(plain_logits(target.model, tokens), want) < TOLERANCE
    with pytest.raises(InvalidConfig, match=r"cache_bytes=999.*bamba.*max_texts"):
        HuggingFaceTarget.load(tmp_path, cache_bytes=999)
    with pytest.raises(UnsupportedModel, match="RecurrentTarget"):
        HuggingFaceTarget(model)


def test_an_llm_of_a_recurrent_model(tmp_path):
    model = random_recurrent("lfm2", vocab_size=8192)
    model.save_pretrained(tmp_path)
    for file in bundled_path("target").glob("tokenizer*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    llm = LLM.load(tmp_path, drafter="ngram", dtype="float32")
    assert llm.info()["attention"].endswith("recurrent state")
    with pytest.raises(InvalidConfig, match=r"cache_bytes"):
        LLM.load(tmp_path, drafter="ngram", dtype="float32", cache_bytes=1 << 20)
    with pytest.raises(InvalidConfig, match=r"cache_bytes=1048576.*lfm2"):
        LLM.load("bundled", drafter=f"draft:{tmp_path}", cache_bytes=1 << 20)
