"""A model whose layers lie in several places (`device_map`) is scored where they lie."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.models.base import Rows
from outrider.models.hf import HuggingFaceTarget
from tests.models.families import (
    ancestors_of,
    one_thread,
    plain_tree_logits,
    random_model,
    random_tokens,
    relative_error,
)

PARENTS = [-1, 0, 0, 1, 1, 2, 5, 3]

single = pytest.fixture(scope="module", autouse=True)(one_thread)


@pytest.mark.parametrize(
    "second_layer",
    [
        "disk",
        pytest.param(
            "cuda:0",
            marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator"),
        ),
    ],
)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_layers_in_two_places_score_as_in_one(family, second_layer, tmp_path):
    pytest.importorskip("accelerate", reason="transformers places models with it")
    model = random_model(family)
    model.save_pretrained(tmp_path / "model")
    places = {f"model.{name}": "cpu" for name in ("embed_tokens", "norm", "rotary_emb")}
    places |= {f"model.layers.{i}": "cpu" for i in range(len(model.model.layers))}
    places |= {"model.layers.1": second_layer, "lm_head": "cpu"}
    placed = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=places, offload_folder=tmp_path / "rest", dtype=torch.float32
    )
    target = HuggingFaceTarget(placed)
    prefix, nodes = random_tokens(26), random_tokens(len(PARENTS), 2)
    seq = target.open(8)
    target.score(Rows((seq,), (26,), prefix))
    target.commit(seq, 26)
    got = target.score(Rows((seq,), (len(PARENTS),), nodes, ancestors_of(PARENTS)))
    assert relative_error(got.cpu(), plain_tree_logits(model, prefix, nodes, PARENTS)) < 1e-5
