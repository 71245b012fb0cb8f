"""Random heads of every kind: for a tiny Llama, and for an exact target."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from outrider.drafters import Drafter, EagleDrafter, MedusaDrafter
from outrider.models.base import Target
from outrider.models.eagle1 import FeatureHead
from outrider.models.eagle_cache import CachedHead
from outrider.models.head import Head, TargetHead, TargetParts
from outrider.models.hf import HuggingFaceTarget
from outrider.models.medusa import MedusaHeads, MedusaShape
from outrider.models.mtp import MtpHead, module_of
from tests.models.families import SHAPE, VOCAB, random_model, with_weights

KINDS = ("eagle", "medusa", "mtp", "mtp of two")


def randomised(head: TargetHead, seed: int, scale: float) -> TargetHead:
    """The head with weights that say something."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0.0, scale * parameter.size(-1) ** -0.5, generator=draw)
            else:
                parameter.uniform_(0.5, 1.5, generator=draw)
    return head.eval().requires_grad_(False)


def layer_config(size: int, vocab: int, layers: int = 1) -> LlamaConfig:
    """The layers of a small EAGLE head."""
    return LlamaConfig(
        vocab_size=vocab,
        hidden_size=size,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4 if size % 4 == 0 else 1,
        num_key_value_heads=2 if size % 4 == 0 else 1,
        head_dim=4,
    )


def random_head(kind: str, target: HuggingFaceTarget, seed: int = 0) -> TargetHead:
    """A head for a tiny model."""
    if kind == "eagle":
        head: TargetHead = FeatureHead(layer_config(64, VOCAB, 2), 3)
    elif kind == "medusa":
        head = MedusaHeads(MedusaShape(VOCAB, 64, 3, 2, 3))
    else:
        modules = [module_of(target, i) for i in range(2 if kind == "mtp of two" else 1)]
        head = MtpHead(modules, target)
    return randomised(head, seed, 1.5)


def drafter_of(head: TargetHead) -> Drafter:
    """Who drafts with it."""
    if isinstance(head, MedusaHeads):
        return MedusaDrafter(head)
    assert isinstance(head, Head)
    return EagleDrafter(head)


def tiny_target(strict: bool = False) -> HuggingFaceTarget:
    """A Llama of three layers."""
    return HuggingFaceTarget(random_model("llama"), strict=strict)


def toy_parts(vocab: int, seed: int) -> TargetParts:
    """What a head of an exact target borrows, whose hidden states are tokens one-hot."""
    draw = torch.Generator().manual_seed(seed)
    embeddings = nn.Embedding(vocab, vocab)
    embeddings.weight = nn.Parameter(torch.randn(vocab, vocab, generator=draw), False)
    output_VD = torch.randn(vocab, vocab, generator=draw)

    def output(h: Tensor) -> Tensor:
        return h @ output_VD.T

    return TargetParts(embeddings, nn.Identity(), output)


class ToyHead(EagleDrafter):
    """A random head for a `TappedTarget` of so many tokens."""

    def __init__(self, kind: str, vocab: int, seed: int) -> None:
        if kind == "eagle":
            head: Head = FeatureHead(layer_config(vocab, vocab), 1)
        else:
            options = {**SHAPE, "vocab_size": vocab, "hidden_size": vocab, "num_hidden_layers": 1}
            options |= {"num_attention_heads": 1, "num_key_value_heads": 1}
            target = HuggingFaceTarget(with_weights(LlamaConfig(**options)))
            head = MtpHead([module_of(target, i) for i in range(2)], target)
        self._toy = randomised(head, seed, 1.0)
        self._toy.borrow(toy_parts(vocab, seed))
        super().__init__(head)

    def attach(self, target: Target) -> Target:
        if self._head is None:
            self._head = CachedHead(self._given)
        return target


class ToyMedusa(MedusaDrafter):
    """Random Medusa heads for a `TappedTarget`."""

    def __init__(self, vocab: int, seed: int) -> None:
        heads = MedusaHeads(MedusaShape(vocab, vocab, 3, 1, 1))
        randomised(heads, seed, 1.0)
        heads.borrow(toy_parts(vocab, seed))
        super().__init__(heads)

    def attach(self, target: Target) -> Target:
        return target


TOYS: dict[str, Callable[[int, int], Drafter]] = {
    "eagle": lambda vocab, seed: ToyHead("eagle", vocab, seed),
    "medusa": ToyMedusa,
    "mtp of two": lambda vocab, seed: ToyHead("mtp", vocab, seed),
}
