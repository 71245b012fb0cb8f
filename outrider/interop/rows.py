"""Padded tensors in: prompts without their padding, and rows that end one by one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from outrider.errors import EmptyPrompt, InvalidConfig
from outrider.interop.asked import Ends
from outrider.sequence import Sequence

if TYPE_CHECKING:
    from jaxtyping import Int64


def prompts_of(
    input_ids_BL: Int64[Tensor, "B L"], mask: Tensor | None, positions: Tensor | None
) -> list[tuple[int, ...]]:
    """The prompts without their padding, which must stand on the left.

    Raises:
        InvalidConfig: padding elsewhere, or positions that are not each prompt's own 0, 1, 2, ...
        EmptyPrompt: nothing but padding.
    """
    held_BL = torch.ones_like(input_ids_BL) if mask is None else mask
    if held_BL.shape != input_ids_BL.shape or (held_BL[:, 1:] < held_BL[:, :-1]).any():
        raise InvalidConfig(
            f"attention_mask of shape {tuple(held_BL.shape)} is no left padding of input_ids of "
            f"shape {tuple(input_ids_BL.shape)}; set padding_side='left' on the tokenizer"
        )
    held_BL = held_BL != 0
    own_BL = (held_BL.cumsum(1) - 1).clamp(min=0)
    if positions is not None and (
        positions.shape[-1] != own_BL.shape[1]
        or positions.dim() != 2
        or not torch.equal(positions.expand_as(own_BL)[held_BL], own_BL[held_BL])
    ):
        raise InvalidConfig("position_ids other than 0, 1, 2, ... per prompt; leave them out")
    prompts = [tuple(row[held].tolist()) for row, held in zip(input_ids_BL, held_BL, strict=True)]
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise EmptyPrompt(f"prompt {index} holds padding alone; give at least one token")
    return prompts


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of a call: padded as they came, their prompts, and where their texts end."""

    input_ids_BL: Tensor
    prompts: list[tuple[int, ...]]
    ends: Ends

    @classmethod
    def read(
        cls,
        input_ids_BL: Int64[Tensor, "B L"],
        inputs: Mapping[str, Any],
        criteria: Iterable[Any],
        more: Iterable[Any],
    ) -> Batch:
        """What transformers hands a callable, checked; `more` criteria are asked last."""
        prompts = prompts_of(input_ids_BL, inputs.get("attention_mask"), inputs.get("position_ids"))
        return cls(input_ids_BL, prompts, Ends.read([*criteria, *more], input_ids_BL.shape[1]))

    @property
    def width(self) -> int:
        """Tokens of a padded prompt."""
        return self.input_ids_BL.shape[1]


@dataclass(slots=True)
class Row:
    """One text and how far its criteria have been asked."""

    text: Sequence
    padded_L: Tensor
    asked: int = 0
    ends_at: int | None = None

    @property
    def made(self) -> list[int]:
        """The new tokens so far, those beyond the end included."""
        return self.text.tokens[self.text.num_prompt :]

    def look(self, ends: Ends) -> None:
        """Asks the criteria about every new token in order, as plain decoding would have."""
        made = self.made
        if ends.criteria and self.ends_at is None:
            new = torch.tensor(made, dtype=torch.int64, device=self.padded_L.device)
            ids = torch.cat((self.padded_L, new))[None]
            while self.ends_at is None and self.asked < len(made):
                self.asked += 1
                upto = ids[:, : self.padded_L.shape[0] + self.asked]
                if bool(torch.as_tensor(ends.criteria(upto, None)).any()):  # pyright: ignore
                    self.ends_at = self.asked
        if self.ends_at is None:
            self.asked = len(made)
            self.ends_at = len(made) if self.text.finished else None

    def token(self, column: int, ends: Ends, pad: int) -> int | None:
        """The token of a column; None where it has not been made yet."""
        over = self.ends_at is not None and column >= self.ends_at
        if over and ends.pads:
            return pad
        made = self.made
        if column < len(made):
            return made[column] if over or column < self.asked else None
        return pad if self.text.finished else None
