"""An exit behind the first layers: the rest runs once, on one cache, and gives the same rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from outrider.errors import InvalidConfig, UnsupportedModel
from outrider.models import early_exit as module
from outrider.models.base import Rows
from outrider.models.early_exit import EarlyExit
from outrider.models.exit_search import ExitTrial, best_exit, search_exit
from outrider.models.hf import HuggingFaceTarget
from outrider.models.layer_gate import LayerGate
from outrider.models.protocol import ProtocolTarget
from outrider.models.tabular import MarkovModel
from tests.models.families import (
    EXPERTS,
    FAMILIES,
    SHAPE,
    ancestors_of,
    one_thread,
    random_model,
    random_tokens,
    relative_error,
    with_weights,
)

single = pytest.fixture(scope="module", autouse=True)(one_thread)
PARENTS = [-1, 0, 0, 1, 1, 2, 5, 3]
NONE = torch.empty(0, dtype=torch.int64)


def rows(seq: int, tokens, ancestors=None, wanted=None) -> Rows:
    return Rows((seq,), (len(tokens),), torch.as_tensor(tokens), ancestors, wanted)


def opened(target, prompt) -> int:
    seq = target.open(len(prompt) + 8)
    target.read(seq, list(prompt))
    return seq


@contextmanager
def counting(early: EarlyExit) -> Iterator[list[int]]:
    """Rows that pass each layer; a layer left out calls none of its parts."""
    seen = [0] * early.gate.num_layers
    hooks = []
    for i, layer in enumerate(early.gate._layers):
        part = next(child for name, child in layer.named_modules() if name.endswith("mlp"))

        def count(_, inputs, i=i) -> None:
            seen[i] += inputs[0].shape[-2]

        hooks.append(part.register_forward_pre_hook(count))
    yield seen
    for hook in hooks:
        hook.remove()


def test_drafted_rows_run_the_remaining_layers_alone() -> None:
    early = EarlyExit(HuggingFaceTarget(random_model("llama")), 1)
    tokens = random_tokens(12).tolist()
    seq = opened(early, tokens[:6])
    with counting(early) as seen:
        for token in tokens[6:9]:
            early.draft(rows(seq, [token]))
    assert seen == [3, 0, 0] and early.num_staged(seq) == 3
    with counting(early) as seen:
        early.score(rows(seq, tokens[6:10]))
    # The last token was guessed and not read yet: it passes all layers, the others the rest.
    assert seen == [1, 4, 4] and early.num_staged(seq) == 4
    early.commit(seq, 3)
    with counting(early) as seen:
        early.score(rows(seq, tokens[9:]))
    assert seen == [3, 3, 3] and early.length(seq) == 9


def families() -> list:
    """Windows in turn, sinks and experts, latent attention, the slab by default; or all."""
    by_default = ("gemma2", "gpt-oss", "deepseek-v3", "falcon")
    return [
        pytest.param(family, marks=() if family in by_default else pytest.mark.slow)
        for family in FAMILIES
    ]


def drafted_tree(early: EarlyExit, seqs: list[int], tokens: Tensor) -> Tensor:
    """Logits of the tree `PARENTS` and, beside it, of a chain that nothing was drafted of.

    Drafted before, in another order than the tree's: some of its inner nodes, and two guesses that
    come to nothing.
    """
    tree, other = tokens[:8].tolist(), tokens[8:]
    wrong = [(token + 1) % early.vocab_size for token in tree]
    early.draft(rows(seqs[0], tree[:1], ancestors_of([-1])))
    levels = ([tree[2], wrong[1], tree[1]], [0, 0, 0]), ([tree[5], wrong[3], tree[3]], [1, 2, 3])
    known = [-1]
    for drawn, above in levels:
        known += above
        early.draft(rows(seqs[0], drawn, ancestors_of(known)[-3:]))
    masks = torch.cat((ancestors_of(PARENTS), ancestors_of(list(range(-1, len(other) - 1)))))
    return early.score(Rows(tuple(seqs), (8, len(other)), tokens, masks))


@pytest.mark.parametrize("family", families())
def test_rows_are_the_whole_models(family: str) -> None:
    target = HuggingFaceTarget(random_model(family))
    early = EarlyExit(target, 2)
    prompts = random_tokens(30).tolist(), random_tokens(11, 2).tolist()
    tokens = random_tokens(12, 3)
    masks = torch.cat((ancestors_of(PARENTS), ancestors_of([-1, 0, 1, 2])))
    seqs = [opened(target, prompt) for prompt in prompts]
    wanted = target.score(Rows(tuple(seqs), (8, 4), tokens, masks))
    for seq in seqs:
        target.discard(seq)
    got = drafted_tree(early, seqs, tokens)
    limit = 1e-4 if family not in EXPERTS else 0.5
    assert relative_error(got, wanted) < limit
    assert [early.num_staged(seq) for seq in seqs] == [8, 4]
    # What is kept is where it belongs: the path 0, 2, 5, 6, and the next rows see it.
    early.commit(seqs[0], [0, 2, 5, 6])
    early.commit(seqs[1], 3)
    assert [early.length(seq) for seq in seqs] == [34, 14] and not early._drafted
    more = random_tokens(2, 4)
    path = [*prompts[0], *tokens[[0, 2, 5, 6]].tolist()]
    fresh = opened(target, path)
    assert relative_error(early.score(rows(seqs[0], more)), target.score(rows(fresh, more))) < limit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_strict_rows_and_what_is_cached_are_the_same_bits(family: str, dtype) -> None:
    target = HuggingFaceTarget(random_model(family).to(dtype), strict=True)
    early = EarlyExit(target, 1)
    prompts = random_tokens(270).tolist(), random_tokens(11, 2).tolist()
    tokens = random_tokens(12, 3)
    masks = torch.cat((ancestors_of(PARENTS), ancestors_of([-1, 0, 1, 2])))
    seqs = [opened(target, prompt) for prompt in prompts]
    wanted = target.score(Rows(tuple(seqs), (8, 4), tokens, masks))
    for seq in seqs:
        target.discard(seq)
    assert torch.equal(drafted_tree(early, seqs, tokens), wanted)


def test_there_is_one_cache_and_it_holds_what_it_would() -> None:
    prompt, tokens = random_tokens(20).tolist(), random_tokens(6, 2)
    held = []
    for with_exit in (False, True):
        target = HuggingFaceTarget(random_model("llama"), strict=True)
        served = EarlyExit(target, 2) if with_exit else target
        seq = opened(served, prompt)
        if isinstance(served, EarlyExit):
            served.draft(rows(seq, tokens[:3]))
            served.draft(rows(seq, tokens[3:5]))
        served.score(rows(seq, tokens))
        served.commit(seq, 6)
        cache = target._cache
        slots = cache.reserve(seq, 0).index(0, 26, target.device)
        parts = [t[:, slots] for pool in cache._pools.values() for t in (pool.keys, pool.values)]
        held.append((cache.block_bytes, cache.num_blocks - cache.num_free_blocks, parts))
    assert held[0][:2] == held[1][:2] and len(held[0][2]) == 6
    assert all(torch.equal(a, b) for a, b in zip(held[0][2], held[1][2], strict=True))


def test_a_bound_on_the_cache_is_kept_where_only_the_first_layers_have_pools() -> None:
    target = HuggingFaceTarget(random_model("llama"), cache_bytes=None)
    whole = target.block_bytes
    early = EarlyExit(target, 1)
    target.limit_cache(4 * whole)
    early.draft(rows(early.open(8), random_tokens(4)))
    assert target.block_bytes == whole


def test_a_failing_pass_leaves_nothing_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    early = EarlyExit(HuggingFaceTarget(random_model("llama")), 1)
    tokens = random_tokens(12).tolist()
    seq = opened(early, tokens[:6])
    wanted = early.score(rows(seq, tokens[6:]))
    early.discard(seq)
    for broken in (0, 2):
        early.draft(rows(seq, tokens[6:9]))
        own = early.gate._layers[broken]
        monkeypatch.setattr(own, "forward", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            early.score(rows(seq, tokens[6:]))
        assert early.num_staged(seq) == 0 and early.length(seq) == 6 and not early._drafted
        monkeypatch.undo()
        assert "forward" not in vars(own), "layers are the model's own again"
        assert relative_error(early.score(rows(seq, tokens[6:])), wanted) < 1e-5
        early.discard(seq)


def test_rows_that_have_not_passed_all_layers_are_not_committed() -> None:
    early = EarlyExit(HuggingFaceTarget(random_model("llama")), 1)
    seq = opened(early, [1, 2, 3])
    early.draft(rows(seq, [4, 5]))
    with pytest.raises(InvalidConfig, match="drafted rows must be scored first"):
        early.commit(seq, 1)
    early.score(rows(seq, [4, 5, 6]))
    for again in (early.draft, early.score):
        with pytest.raises(InvalidConfig, match="commit or discard"):
            again(rows(seq, [7]))
        early.discard(seq)
        early.draft(rows(seq, [4, 5]))
        early.score(rows(seq, [4, 5, 6]))
    early.discard(seq)
    early.draft(rows(seq, [4, 5]))
    with pytest.raises(InvalidConfig, match="hold the row itself"):
        early.score(rows(seq, [4, 5], torch.tensor([2, 1])))
    early.draft(rows(seq, [4, 5]))
    early.score(rows(seq, [4, 5, 6]))
    with pytest.raises(InvalidConfig, match="commit of 4 with 3 rows scored"):
        early.commit(seq, 4)
    early.commit(seq, [0, 1])
    assert early.length(seq) == 5
    # A piece of the text itself goes before everything drafted.
    early.draft(rows(seq, [6, 9]))
    early.read(seq, [6, 7])
    assert early.length(seq) == 7 and early.num_staged(seq) == 0
    early.close(seq)


def test_guesses_beyond_a_bitmasks_bits_are_forgotten() -> None:
    early = EarlyExit(HuggingFaceTarget(random_model("llama")), 1)
    tokens = random_tokens(60, 2).tolist()
    seq = opened(early, [1, 2, 3])
    masks = ancestors_of([-1, *[0] * 59])
    wanted = early.score(rows(seq, tokens, masks))
    early.discard(seq)
    others = [(token + 1) % early.vocab_size for token in tokens[1:11]]
    early.draft(rows(seq, [tokens[0], *others], ancestors_of([-1, *[0] * 10])))
    assert relative_error(early.score(rows(seq, tokens, masks)), wanted) < 1e-5
    assert early.num_staged(seq) == 60


@pytest.mark.parametrize("wrong", ["row", "layer"])
def test_a_wrong_hidden_state_is_found_by_the_trial(
    wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = HuggingFaceTarget(random_model("llama"))
    if wrong == "row":
        own = module._hand_out
        monkeypatch.setattr(
            module, "_hand_out", lambda hidden, *rest: own(hidden.roll(1, -2), *rest)
        )
    else:
        running = LayerGate.running
        monkeypatch.setattr(
            LayerGate,
            "running",
            lambda gate, first, *rest, **kept: running(gate, min(2, first * 2), *rest, **kept),
        )
    with pytest.raises(UnsupportedModel, match=r"llama model .* first 1 layers and the rest"):
        EarlyExit(target, 1)


@pytest.mark.parametrize("layers", [0, 3, -1, True, 1.5])
def test_a_number_of_layers_the_model_has_not_to_spare_is_refused(layers) -> None:
    target = HuggingFaceTarget(random_model("llama"))
    with pytest.raises(InvalidConfig, match="has 3 layers; give a number from 1 to 2"):
        EarlyExit(target, layers)


def test_targets_that_cannot_be_run_in_parts_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match="ProtocolTarget; use drafter='ngram'"):
        EarlyExit(ProtocolTarget(MarkovModel([0.5, 0.5], [[0.5, 0.5]] * 2)), 1)
    rope = {
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8, "original_max_position_embeddings": 32,
    }  # fmt: skip
    config = FAMILIES["phi3"].config()
    config.rope_parameters, config.head_dim = rope, 16
    config.hidden_size = config.num_attention_heads * 16
    config.original_max_position_embeddings, config.sliding_window = 32, None
    longrope = HuggingFaceTarget(with_weights(config))
    with pytest.raises(UnsupportedModel, match=r"phi3 model: its rotary frequencies change"):
        EarlyExit(longrope, 1)
    target = HuggingFaceTarget(random_model("llama"))
    layers = target.model.model.layers
    target.model.model.layers = torch.nn.ModuleList([layers[0], layers[0], layers[0]])
    with pytest.raises(UnsupportedModel, match=r"no list that a forward calls in order"):
        EarlyExit(target, 1)


def test_the_best_exit_is_the_fastest_and_of_equals_the_earliest() -> None:
    trials = [ExitTrial(n, 0.2 * n, speedup) for n, speedup in enumerate((1.1, 1.4, 1.4, 0.9), 1)]
    assert best_exit(trials).layers == 2
    assert best_exit(trials[::-1]).layers == 3


def test_the_search_finds_the_layer_behind_which_nothing_happens() -> None:
    model = with_weights(LlamaConfig(**{**SHAPE, "num_hidden_layers": 5}))
    with torch.no_grad():
        for layer in model.model.layers[2:]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    target = HuggingFaceTarget(model)
    trials = search_exit(target, [random_tokens(20, n).tolist() for n in range(3)], k=3)
    assert [trial.layers for trial in trials] == [1, 2, 3, 4]
    assert trials[0].acceptance < 0.9
    assert all(trial.acceptance == pytest.approx(1, abs=1e-5) for trial in trials[1:])
    assert all(trial.speedup > 0 for trial in trials) and best_exit(trials) in trials
    assert not target._cache._sequences, "nothing is left open"
