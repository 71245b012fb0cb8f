"""Inflated copies of a Llama: many more weights, all of them really read, and the same outputs.

Extra blocks have vanishing output projections, wider feed-forwards vanishing columns in their down
projections, extra vocabulary rows never win; every other new weight is random. So text and
acceptance are the small model's, and the cost of a forward is a large model's.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from outrider.errors import InvalidConfig, ModelError

EXTRA_ROW_SCALE = 1e-3
"""Deviation of an extra vocabulary row from the mean row, in units of the real rows' own."""

VANISHING = 1e-20
"""Weights up to here leave no trace: sums of float32 lose them. Zeros would leave none either, but
an engine that keeps equal constants once would read the zeros of all blocks as one."""


@dataclass(frozen=True, slots=True)
class Size:
    """What an inflated copy grows to: blocks, feed-forward width, rows of the vocabulary."""

    num_layers: int
    feed_forward: int
    vocab: int


@dataclass(frozen=True, slots=True)
class Faithfulness:
    """How an inflated copy's logits compare with the small model's, over `num_rows` rows of text.

    `difference`: largest absolute difference over the largest absolute logit. `margin`: the
    smallest distance from a row's best real logit down to its best extra one; inf without extra
    rows.
    """

    num_rows: int
    difference: float
    margin: float


def size_of(model: nn.Module) -> Size:
    """The size of a Llama."""
    config = _config(model)
    return Size(config.num_hidden_layers, config.intermediate_size, config.vocab_size)


def inflate(small: nn.Module, size: Size, seed: int) -> nn.Module:
    """A copy of the Llama `small` grown to `size`, in its dtype, deterministic in `seed`.

    The embedding is untied from the output layer. Greedy text is the small model's; sampled text is
    not where the vocabulary grew, because extra tokens get some mass.

    Raises:
        InvalidConfig: a size below the small model's.
    """
    own = size_of(small)
    for name in ("num_layers", "feed_forward", "vocab"):
        if getattr(size, name) < getattr(own, name):
            raise InvalidConfig(
                f"{name}={getattr(size, name)} is below the model's own {getattr(own, name)}; "
                "a copy can only grow"
            )
    big = _empty(small, size)
    draw = torch.Generator().manual_seed(seed)
    sources = dict(small.named_parameters())
    with torch.no_grad():
        for name, parameter in big.named_parameters():
            source = sources.get(name)
            if name == "lm_head.weight":
                _fill_vocabulary(parameter, _output_rows(small), draw)
            elif name.endswith(("o_proj.weight", "down_proj.weight")):
                tiny = parameter.uniform_(-VANISHING, VANISHING, generator=draw)
                _copy_corner(tiny, source)
            elif parameter.dim() < 2:
                _copy_corner(parameter.fill_(1.0), source)
            else:
                bound = 3**0.5 * _deviation(parameter, source)
                _copy_corner(parameter.uniform_(-bound, bound, generator=draw), source)
    return big.eval()


def weights_read(model: nn.Module) -> int:
    """Weights one row's forward reads: all but the embedding, of which it reads one row."""
    config = _config(model)
    total = sum(parameter.numel() for parameter in model.parameters())
    return total if config.tie_word_embeddings else total - config.vocab_size * config.hidden_size


@torch.inference_mode()
def compare(small: nn.Module, big: nn.Module, texts: Sequence[Sequence[int]]) -> Faithfulness:
    """Run both models over the same token lists and compare every row's logits.

    Raises:
        ModelError: an extra vocabulary row would win somewhere.
    """
    own = size_of(small).vocab
    difference, largest, margin, rows = 0.0, 0.0, float("inf"), 0
    for text in texts:
        tokens = torch.tensor([list(text)])
        wanted, found = (
            model(input_ids=tokens, use_cache=False).logits[0] for model in (small, big)
        )
        largest = max(largest, float(wanted.abs().max()))
        difference = max(difference, float((found[:, :own] - wanted).abs().max()))
        if found.shape[1] > own:
            ahead = found[:, :own].amax(1) - found[:, own:].amax(1)
            margin = min(margin, float(ahead.min()))
        rows += len(text)
    if margin <= 0:
        raise ModelError(
            f"an extra vocabulary row beats the best real one by {-margin:.3g}, so greedy text "
            "would change; inflate with another seed"
        )
    return Faithfulness(rows, difference / largest, margin)


def _config(model: nn.Module) -> Any:
    config: Any = model.config
    return config


def _empty(small: nn.Module, size: Size) -> nn.Module:
    """A model of the wanted size whose weights hold nothing yet, with the small one's buffers."""
    config = copy.deepcopy(_config(small))
    config.num_hidden_layers = size.num_layers
    config.intermediate_size = size.feed_forward
    config.vocab_size = size.vocab
    config.tie_word_embeddings = False
    # On "meta" nothing is drawn or allocated; the usual constructor would draw every weight first.
    with torch.device("meta"):
        big = type(small)(config)
    big = big.to(next(small.parameters()).dtype).to_empty(device="cpu")
    buffers = dict(small.named_buffers())
    for name, buffer in big.named_buffers():
        buffer.copy_(buffers[name])
    return big


def _copy_corner(parameter: Tensor, source: Tensor | None) -> None:
    if source is not None:
        parameter[tuple(slice(0, n) for n in source.shape)] = source


def _deviation(parameter: Tensor, source: Tensor | None) -> float:
    return parameter.shape[1] ** -0.5 if source is None else float(source.std())


def _output_rows(small: nn.Module) -> Tensor:
    any_small: Any = small
    return any_small.get_output_embeddings().weight


def _fill_vocabulary(parameter: Tensor, rows_VD: Tensor, draw: torch.Generator) -> None:
    """Extra rows scatter closely around the mean of the real ones: logits near the mean logit.

    The mean never exceeds the maximum, whatever the final state is; rows near zero would win where
    all real logits are negative.
    """
    own = rows_VD.shape[0]
    parameter[:own] = rows_VD
    extra = parameter[own:]
    extra.normal_(0.0, EXTRA_ROW_SCALE * float(rows_VD.std()), generator=draw)
    extra += rows_VD.mean(0)
