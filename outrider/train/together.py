"""Processes that train one model together, each on its share of every step's rows.

`torchrun` and `accelerate launch` start them and say in the environment how many there are; what
they add up is the gradient of the whole step, so that the run is that of one process.
"""

from __future__ import annotations

import atexit
import os
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from outrider.errors import InvalidConfig

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Together:
    """One of `count` processes, the one of number `rank`."""

    rank: int = 0
    count: int = 1

    @property
    def leads(self) -> bool:
        """Whether this one writes files and speaks."""
        return self.rank == 0

    def share(self, micro: Sequence[Tensor]) -> list[tuple[int, Tensor]]:
        """The micro-batches of a step that are this process's, with their numbers.

        Raises:
            InvalidConfig: fewer of them than processes.
        """
        if len(micro) < self.count:
            raise InvalidConfig(
                f"{self.count} processes with {len(micro)} micro-batches a step; lower "
                "train.micro_tokens, or raise train.batch_tokens"
            )
        return [(i, rows) for i, rows in enumerate(micro) if i % self.count == self.rank]

    @contextmanager
    def leading(self) -> Iterator[None]:
        """What the others do only when the leading process has done it."""
        if not self.leads:
            dist.barrier()
        yield
        if self.leads and self.count > 1:
            dist.barrier()

    def summed(self, model: Any, loss: float) -> float:
        """The step's loss, its parts and the parts of its gradients added up."""
        if self.count == 1:
            return loss
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        device = trained[0].device
        # Where no process has a gradient there stays none: to an optimiser zeros are one.
        any_P = torch.tensor([p.grad is not None for p in trained], dtype=torch.int32)
        any_P = any_P.to(device)
        dist.all_reduce(any_P, dist.ReduceOp.MAX)
        for parameter, found in zip(trained, any_P.tolist(), strict=True):
            if found:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad)
        total = torch.tensor(loss, dtype=torch.float32, device=device)
        dist.all_reduce(total)
        return float(total)

    def added(self, values: Tensor, device: torch.device) -> Tensor:
        """The sum of all processes' values, by way of the device they compute on."""
        if self.count == 1:
            return values
        total = values.to(device)
        dist.all_reduce(total)
        return total.to(values.device)

    def check_same_step(self, step: int, device: torch.device) -> None:
        """Holds that all processes go on from one step.

        Raises:
            InvalidConfig: they do not: some found a state that others did not.
        """
        if self.count == 1:
            return
        ends = torch.tensor([step, -step], device=device)
        dist.all_reduce(ends, dist.ReduceOp.MAX)
        last, first = int(ends[0]), -int(ends[1])
        if first != last:
            raise InvalidConfig(
                f"the processes go on from steps {first} to {last}, and a run has one state; give "
                "all of them a folder that they share, or start anew with --fresh"
            )

    def agreed(self, asked: bool, device: torch.device) -> bool:
        """What the leading process asks: clocks differ."""
        if self.count == 1:
            return asked
        flag = torch.tensor(int(asked), device=device)
        dist.broadcast(flag, 0)
        return bool(flag)


ALONE = Together()


def joined(device: str | torch.device = "auto") -> Together:
    """This process among those that were launched with it; alone where none were.

    They meet at the first call, over NCCL where `device` is a GPU (`auto`: where there is one), of
    which each then has its own; they part when the process ends.

    Raises:
        InvalidConfig: an environment that names processes and no way to meet them.
    """
    count = os.environ.get("WORLD_SIZE", "1")
    if count == "1" or not dist.is_available():
        return ALONE
    if not dist.is_initialized():
        on_gpu = torch.cuda.is_available() and str(device).startswith(("auto", "cuda"))
        try:
            if on_gpu:
                torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
            dist.init_process_group("nccl" if on_gpu else "gloo")
        except (RuntimeError, ValueError) as error:
            raise InvalidConfig(
                f"WORLD_SIZE={count}, and the processes do not meet ({error}); start them with "
                "torchrun or accelerate launch"
            ) from error
        atexit.register(_part)
    return Together(dist.get_rank(), dist.get_world_size())


def _part() -> None:
    """Leaves the others, where nobody has done so before."""
    if dist.is_initialized():
        dist.destroy_process_group()
