"""Arranged linear layers compute what plain ones do, keep weights once, save as loaded."""

import pytest
import torch
from torch import nn

from outrider.models.packing import (
    FewRowsLinear,
    FusedLinear,
    PackedLinear,
    arrange_linears,
    can_pack,
    join_linears,
)
from tests.models.families import (
    one_thread,
    plain_logits,
    random_model,
    random_tokens,
    relative_error,
)

single = pytest.fixture(scope="module", autouse=True)(one_thread)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(96, 40), (97, 33), (8, 9000)])
def test_every_row_count_equals_the_plain_product(shape, bias):
    noise = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.randn(shape, generator=noise))
    addend = nn.Parameter(torch.randn(shape[0], generator=noise)) if bias else None
    layers = [FewRowsLinear(weight, addend)]
    if can_pack(weight.device, weight.dtype):
        layers.append(PackedLinear(weight, addend))
    for rows in (0, 1, 2, 3, 4, 5, 12, 13, 16, 31, 48, 49, 100):
        inputs = torch.randn(1, rows, shape[1], generator=noise)
        with torch.inference_mode():
            doubled = None if addend is None else addend.double()
            wanted = nn.functional.linear(inputs.double(), weight.double(), doubled)
            # Libraries differ in how they add, by a rounding of each term at most.
            bound = 1e-5 + torch.finfo(torch.float32).eps / 2 * shape[1]
            for layer in layers:
                got = layer(inputs)
                assert got.shape == wanted.shape and got.dtype == torch.float32
                torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=bound)


@pytest.mark.parametrize("pack_all", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_an_arranged_model_is_the_same_model(family, pack_all):
    model = random_model(family)
    tokens = random_tokens(20)
    wanted, state = (
        plain_logits(model, tokens),
        {k: v.clone() for k, v in model.state_dict().items()},
    )
    done = arrange_linears(model, pack_all=pack_all)
    assert (done.num_packed, done.num_plain)[not pack_all] == 7 * 3 + 1
    with torch.inference_mode():
        for count in (1, 5, 20):
            assert relative_error(model(tokens[None, :count]).logits[0], wanted[:count]) < 1e-5
    after = model.state_dict()
    assert after.keys() == state.keys()
    assert all(torch.equal(after[name], state[name]) for name in state)


def test_siblings_share_one_product_and_any_order_of_calls_is_right():
    model = random_model("qwen2")
    attention = model.model.layers[0].self_attn
    wanted = [attention.q_proj, attention.k_proj, attention.v_proj]
    arrange_linears(model)
    layers = [attention.q_proj, attention.k_proj, attention.v_proj]
    assert all(isinstance(layer, FusedLinear) for layer in layers)
    first, second = torch.randn(1, 5, 64), torch.randn(1, 5, 64)
    calls = [
        (0, first),
        (2, first),
        (1, second),
        (1, first),
        (1, first),
        (0, second),
        (2, second),
        (0, first),
    ]
    with torch.inference_mode():
        for which, inputs in calls:
            torch.testing.assert_close(
                layers[which](inputs), wanted[which](inputs), rtol=1e-5, atol=1e-5
            )


def test_a_tied_output_layer_stays_tied():
    model = random_model("gemma2")
    arrange_linears(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_hooked_and_derived_layers_are_left_alone():
    class Own(nn.Linear):
        pass

    model = nn.ModuleDict({"own": Own(8, 8), "hooked": nn.Linear(8, 8), "placed": nn.Linear(8, 8)})
    model["plain"] = nn.Linear(8, 8)
    model["hooked"].register_forward_hook(lambda *_: None)
    # As a device map does, to move inputs and weights to the layer's device.
    model["placed"].forward = model["placed"].forward
    arrange_linears(model)
    kinds = [type(layer).__name__ for layer in model.values()]
    assert kinds == ["Own", "Linear", "Linear", "FewRowsLinear"]


def test_packing_needs_a_processor_and_a_known_dtype():
    assert not can_pack(torch.device("cuda"), torch.float32)
    assert not can_pack(torch.device("cpu"), torch.float16)


@torch.no_grad()
def test_layers_that_share_a_product_are_moved_with_the_model():
    """`.to` reaches the weights of the product, which is nobody's child."""
    for arrange in (join_linears, arrange_linears):
        model = random_model("llama")
        tokens = random_tokens(5)[None]
        wanted = model(tokens).logits
        arrange(model)
        assert any(isinstance(module, FusedLinear) for module in model.modules())
        before = model.state_dict()
        model.to(torch.float64)
        assert relative_error(model(tokens).logits, wanted.double()) < 1e-5
        after = model.state_dict()
        assert after.keys() == before.keys()
        assert all(torch.equal(after[name], before[name].double()) for name in before)
