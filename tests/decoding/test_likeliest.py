"""The likeliest tokens are torch's argmax, faster."""

import pytest
import torch

from outrider.decoding.laws import likeliest


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
