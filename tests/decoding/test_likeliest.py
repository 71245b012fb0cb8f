"""The likeliest tokens are torch's argmax, faster."""

import pytest
import torch

from outrider.decoding.laws import (
    all_laws,
    check_logits,
    likeliest,
    likeliest_of_laws,
    processed_probs,
    tempered,
)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)
def test_it_is_argmax(dtype):
    rows = torch.randn(6, 1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    rows[0, [7, 900]] = 50.0
    rows[1, [30, 3]] = torch.tensor([float("inf"), float("nan")], dtype=dtype)
    rows[2] = float("-inf")
    rows[3] = 0.0
    for one in (rows, rows[::2], rows[:, 5:], rows.t()[:6], rows[:0]):
        assert torch.equal(likeliest(one), one.argmax(-1))
    assert likeliest(rows)[:4].tolist() == [7, 3, 0, 0]
    with torch.inference_mode():
        assert torch.equal(likeliest(rows.clone()), rows.argmax(-1))


def test_rows_with_gradients():
    rows = torch.randn(2, 9, requires_grad=True)
    assert torch.equal(likeliest(rows), rows.argmax(-1))


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)
@pytest.mark.parametrize(
    "broken", [[float("nan")], [float("inf"), float("nan")], [float("inf")], [float("-inf")] * 90]
)
def test_one_pass_tells_of_rows_that_are_no_law(dtype, broken):
    rows = torch.randn(5, 90, generator=torch.Generator().manual_seed(1)).to(dtype)
    rows[1, [4, 70]] = 30.0
    rows[3, :89] = float("-inf")
    assert bool(check_logits(rows).all()) and all_laws(rows)
    assert torch.equal(likeliest_of_laws(rows), rows.argmax(-1))
    rows[2, : len(broken)] = torch.tensor(broken, dtype=dtype)
    assert check_logits(rows).tolist() == [True, True, False, True, True]
    assert likeliest_of_laws(rows) is None and not all_laws(rows)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("temperature", [[1.0] * 4, [0.3, 1.0, 2.0, 0.7]], ids=["ones", "several"])
def test_a_temperature_alone_makes_the_same_laws(dtype, temperature):
    rows = 9 * torch.randn(4, 3000, generator=torch.Generator().manual_seed(2))
    rows[2, 100:] = float("-inf")
    heat = torch.tensor(temperature, dtype=torch.float64)
    due = processed_probs(rows.to(dtype), heat)
    assert torch.equal(tempered(rows.to(dtype), heat), due)
    if temperature == [1.0] * 4:
        assert torch.equal(tempered(rows.to(dtype)), due)
