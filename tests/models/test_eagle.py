"""The EAGLE-3 head: cached rows are those read at once, trees their paths, files are checked."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.errors import (
    InvalidConfig,
    ModelError,
    TargetShapeMismatch,
    UnsupportedModel,
    VocabularyMismatch,
)
from outrider.models.base import Rows
from outrider.models.eagle import EagleHead, EagleShape
from outrider.models.eagle_cache import CachedHead
from outrider.models.head import check_fits
from outrider.models.hf import HuggingFaceTarget
from outrider.models.originals import load_eagle
from outrider.models.speculators import load_head, save_head
from outrider.train.eagle import Lines
from tests.models.families import VOCAB, one_thread, random_model

single = pytest.fixture(scope="module", autouse=True)(one_thread)
SHAPE = EagleShape(
    vocab_size=VOCAB,
    draft_vocab_size=40,
    hidden_size=64,
    ffn_size=48,
    heads=4,
    kv_heads=2,
    head_size=16,
    taps=(1, 3),
)
TOKENS = torch.arange(40) * 2 + 3


def random_head(seed: int = 0, shape: EagleShape = SHAPE) -> EagleHead:
    """A head whose layer says something, over every second token."""
    draw = torch.Generator().manual_seed(seed)
    head = EagleHead(shape, TOKENS, own_embeddings=True)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, 1.5 * parameter.size(1) ** -0.5, generator=draw)
            else:
                parameter.uniform_(0.5, 1.5, generator=draw)
    return head.eval().requires_grad_(False)


def at_once(head: EagleHead, tokens: torch.Tensor, h_TD: torch.Tensor) -> torch.Tensor:
    """Features after all rows of one text, in one plain pass."""
    position_1T = torch.arange(len(tokens))[None]
    return head.step(
        tokens[None], h_TD[None], position_1T, Lines(len(tokens), tokens.device).attend
    )[0]


def test_cached_rows_and_trees_are_those_of_plain_passes() -> None:
    head = random_head()
    cached = CachedHead(head)
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCAB, (9,), generator=draw)
    h_TD = torch.randn(9, 64, generator=draw)
    wanted = at_once(head, tokens, h_TD)
    seq, other = cached.open(4), cached.open(4)
    rows = Rows(
        (seq, other), (5, 2), torch.cat((tokens[:5], tokens[:2])), None, torch.tensor([4, 6])
    )
    features = cached.score(rows, torch.cat((h_TD[:5], h_TD[:2])))
    torch.testing.assert_close(features, wanted[[4, 1]], rtol=1e-5, atol=1e-5)
    cached.commit(seq, 5)
    # Two paths from the fifth row: 5 6 7, and 5 8.
    masks = torch.tensor([1, 0b11, 0b111, 0b1001])
    features = cached.score(Rows((seq,), (4,), tokens[5:], masks), h_TD[5:])
    torch.testing.assert_close(features[:3], wanted[5:8], rtol=1e-5, atol=1e-5)
    path = torch.tensor([0, 1, 2, 3, 4, 5, 8])
    torch.testing.assert_close(
        features[3], at_once(head, tokens[path], h_TD[path])[-1], rtol=1e-5, atol=1e-5
    )
    assert not torch.allclose(features[3], wanted[8], atol=1e-3), "it does not see its siblings"
    cached.discard(seq)
    again = cached.score(Rows((seq,), (3,), tokens[5:8]), h_TD[5:8])
    torch.testing.assert_close(again, wanted[5:8], rtol=1e-5, atol=1e-5)


def test_training_reads_rows_as_drafting_does() -> None:
    """Row i of step s is what the head says s tokens behind token i, fed by itself."""
    head, steps, size = random_head(), 3, 7
    draw = torch.Generator().manual_seed(2)
    tokens = torch.randint(VOCAB, (size + steps,), generator=draw)
    features = torch.randn(size, 128, generator=draw)
    fused = head.fused(features)
    lines, h = Lines(size, tokens.device), fused[None]
    found = []
    for step in range(steps):
        rows = tokens[None, 1 + step : 1 + step + size]
        h = head.step(rows, h, torch.arange(size)[None] + step, lines.attend)
        found.append(h[0])
    for i in range(size):
        cached = CachedHead(head)
        seq = cached.open(4)
        own = cached.score(Rows((seq,), (i + 1,), tokens[1 : i + 2]), fused[: i + 1])
        cached.commit(seq, i + 1)
        torch.testing.assert_close(own[-1], found[0][i], rtol=1e-4, atol=1e-5)
        for step in range(1, steps):
            at = 1 + i + step
            own = cached.score(Rows((seq,), (1,), tokens[at : at + 1]), own[-1:])
            torch.testing.assert_close(own[-1], found[step][i], rtol=1e-4, atol=1e-5)


def test_rotations_are_as_precise_in_bfloat16() -> None:
    """Frequencies of two bytes would be off by radians at the end of a context."""
    head, position = random_head(), torch.tensor([[2000]])
    wanted = head._rotations(position)[0].clone()
    found = head.to(torch.bfloat16)._rotations(position)[0]
    torch.testing.assert_close(found.float(), wanted, rtol=0, atol=5e-3)


def save(head: EagleHead, folder: Path, **options) -> Path:
    save_head(head, folder, verifier="tiny", architecture="LlamaForCausalLM", **options)
    return folder


def test_a_head_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    head = random_head()
    again = load_head(save(head, tmp_path / "whole"))
    assert again.shape == head.shape
    assert again.state_dict().keys() == head.state_dict().keys()
    assert all(torch.equal(again.state_dict()[k], v) for k, v in head.state_dict().items())
    assert torch.equal(again.tokens, TOKENS)
    stored = load_file(tmp_path / "whole" / "model.safetensors")
    assert stored["t2d"].nonzero().flatten().tolist() == TOKENS.tolist()
    assert {"fc.weight", "layers.0.hidden_norm.weight", "d2t", "embed_tokens.weight"} <= set(stored)
    lent = load_head(save(head, tmp_path / "lent", embeddings=False, dtype=torch.float16))
    assert lent.embed_tokens is None
    torch.testing.assert_close(lent.fc.weight, head.fc.weight, rtol=1e-3, atol=1e-3)
    # A pickle of tensors is read, one that holds code is not.
    other = tmp_path / "pickled"
    other.mkdir()
    (other / "config.json").write_text((tmp_path / "whole" / "config.json").read_text())
    torch.save(stored, other / "pytorch_model.bin")
    assert torch.equal(load_head(other).fc.weight, head.fc.weight)
    (other / "pytorch_model.bin").write_bytes(pickle.dumps(print, protocol=2))
    with pytest.raises(ModelError, match="hold more than tensors"):
        load_head(other)


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"speculators_model_type": "eagle"}, UnsupportedModel, "'eagle3' is read here"),
        ({"norm_before_fc": True}, UnsupportedModel, "norm_before_fc=True"),
        ({"draft_vocab_size": 41}, ModelError, "d2t"),
        ({"draft_vocab_size": 98}, InvalidConfig, "draft_vocab_size=98 with a vocabulary of 97"),
        ({"hidden_size": 32}, ModelError, r"has shape \(.*\), and config.json says \("),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}, ModelError, "fc.weight in"),
        ({"eagle_aux_hidden_state_layer_ids": None}, ModelError, "which layers it reads"),
        ({"hidden_act": "gelu"}, UnsupportedModel, "hidden_act='gelu'"),
        ({"transformer_layer_config": {}}, ModelError, "hidden_size"),
    ],
)
def test_what_does_not_fit_is_refused_before_any_forward(change, error, says, tmp_path) -> None:
    folder = save(random_head(), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    for key, value in change.items():
        place = config if key in config else config["transformer_layer_config"]
        place[key] = value
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(error, match=says):
        load_head(folder)


def test_files_that_are_no_head_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"holds no config.json"):
        load_head(tmp_path)
    folder = save(random_head(), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "more.weight": torch.zeros(1)}, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"other tensors than an EAGLE-3 head \(more.weight\)"):
        load_head(folder)
    save_file({**tensors, "d2t": tensors["d2t"].flip(0)}, folder / "model.safetensors")
    with pytest.raises(ModelError, match="no ascending map"):
        load_head(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="holds neither model"):
        load_head(folder)


def test_another_target_is_refused_and_both_are_named(tmp_path: Path) -> None:
    target = HuggingFaceTarget(random_model("llama"))
    wide = replace(SHAPE, hidden_size=32)
    with pytest.raises(TargetShapeMismatch, match="width 32, those of the target are 64 wide"):
        check_fits(random_head(shape=wide), target)
    more = replace(SHAPE, vocab_size=99)
    with pytest.raises(VocabularyMismatch, match="of 99 tokens, the target has 97"):
        check_fits(random_head(shape=more), target)
    folder = tmp_path / "qwen"
    save_head(random_head(), folder, verifier="some/model", architecture="Qwen3ForCausalLM")
    with pytest.raises(ModelError, match="a Qwen3ForCausalLM, and the target is a Llama"):
        load_eagle(folder, target)


def test_shapes_that_cannot_be_are_refused() -> None:
    for change, says in (
        ({"kv_heads": 3}, "kv_heads=3 does not divide heads=4"),
        ({"taps": ()}, "ascending, from 1 on"),
        ({"taps": (3, 1)}, "ascending, from 1 on"),
        ({"draft_vocab_size": 0}, "give 1 to 97"),
    ):
        with pytest.raises(InvalidConfig, match=says):
            replace(SHAPE, **change)
