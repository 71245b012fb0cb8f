"""Muon: orthogonalised momentum for the matrices inside the blocks (Jordan et al. 2024).

torch.optim.Muon iterates in bfloat16, which processors without that format emulate at a quarter of
the speed; this one iterates in the dtype it is told.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

NEWTON_SCHULZ = (3.4445, -4.775, 2.0315)
NEWTON_SCHULZ_STEPS = 5


def orthogonalise(g_MN: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """About U V^T of the matrix's singular value decomposition, iterated in `dtype`.

    The result's singular values are all near 1.
    """
    a, b, c = NEWTON_SCHULZ
    x = g_MN.T if g_MN.size(0) > g_MN.size(1) else g_MN
    x = (x / x.norm().clamp(min=1e-7)).to(dtype)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.T if g_MN.size(0) > g_MN.size(1) else x).to(g_MN.dtype)


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised; a tall matrix's rate grows with its aspect's root."""

    def __init__(
        self,
        params: Iterable[Tensor],
        rate: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        dtype: torch.dtype = torch.float32,
    ):
        super().__init__(params, {"lr": rate, "momentum": momentum, "weight_decay": weight_decay})
        self._dtype = dtype

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update of every matrix that has a gradient."""
        assert closure is None
        group: dict[str, Any]
        for group in self.param_groups:
            for w_MN in group["params"]:
                if w_MN.grad is None:
                    continue
                state = self.state[w_MN]
                if not state:
                    state["momentum"] = torch.zeros_like(w_MN)
                velocity = state["momentum"]
                velocity.lerp_(w_MN.grad, 1 - group["momentum"])
                update = orthogonalise(w_MN.grad.lerp(velocity, group["momentum"]), self._dtype)
                w_MN.mul_(1 - group["lr"] * group["weight_decay"])
                w_MN.add_(update, alpha=-group["lr"] * max(1.0, w_MN.size(0) / w_MN.size(1)) ** 0.5)
