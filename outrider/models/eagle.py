"""The EAGLE-3 head: one decoder layer that guesses from its target's own hidden states.

Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time
Test" (NeurIPS 2025, arXiv 2503.01840). Low, middle and high features of the target pass one linear;
with the embedding of the next token they enter one layer, whose output is the feature of the step
after. Parameters bear the names of the `speculators` layout. A module without policy: who calls it
says what its rows attend to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from outrider.errors import InvalidConfig
from outrider.models.head import Attend, Head

if TYPE_CHECKING:
    from jaxtyping import Float, Int64

TABLE_ROWS = 2048
"""Positions that rotations are worked out for at once."""


@dataclass(frozen=True, slots=True)
class EagleShape:
    """The shape of a head, and of the target it is for.

    Attributes:
        vocab_size: tokens of the target.
        draft_vocab_size: tokens the head can guess.
        hidden_size: width of the head, and of the target.
        taps: behind how many layers the target's hidden states are read, ascending.
        norm_before_residual: whether the layer's residual is the normalised feature.
    """

    vocab_size: int
    draft_vocab_size: int
    hidden_size: int
    ffn_size: int
    heads: int
    kv_heads: int
    head_size: int
    taps: tuple[int, ...]
    max_positions: int = 2048
    norm_eps: float = 1e-6
    rope: Mapping[str, Any] = field(
        default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0}
    )
    norm_before_residual: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise InvalidConfig(
                f"draft_vocab_size={self.draft_vocab_size} with a vocabulary of {self.vocab_size}; "
                f"give 1 to {self.vocab_size}"
            )
        if self.hidden_size % self.heads:
            raise InvalidConfig(
                f"heads={self.heads} does not divide hidden_size={self.hidden_size}; give a divisor"
            )
        if self.heads % self.kv_heads:
            raise InvalidConfig(
                f"kv_heads={self.kv_heads} does not divide heads={self.heads}; give a divisor"
            )
        if not self.taps or list(self.taps) != sorted(set(self.taps)) or self.taps[0] < 1:
            raise InvalidConfig(
                f"taps={self.taps}: numbers of layers are due, ascending, from 1 on"
            )

    def layer_config(self) -> LlamaConfig:
        """The head's layer as transformers describes one."""
        return LlamaConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.ffn_size,
            num_hidden_layers=1,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_size,
            max_position_embeddings=self.max_positions,
            rms_norm_eps=self.norm_eps,
            rope_parameters=dict(self.rope),
            tie_word_embeddings=False,
        )


class _Attention(nn.Module):
    """Queries, keys and values from embedding and feature side by side."""

    def __init__(self, shape: EagleShape) -> None:
        super().__init__()
        self.head_size = shape.head_size
        both, inner = 2 * shape.hidden_size, shape.heads * shape.head_size
        self.q_proj = nn.Linear(both, inner, bias=False)
        self.k_proj = nn.Linear(both, shape.kv_heads * shape.head_size, bias=False)
        self.v_proj = nn.Linear(both, shape.kv_heads * shape.head_size, bias=False)
        self.o_proj = nn.Linear(inner, shape.hidden_size, bias=False)

    def forward(self, both_BTD: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        # One object for the three, by which arranged layers know that they share a product.
        split = *both_BTD.shape[:-1], -1, self.head_size
        q, k, v = (proj(both_BTD).view(split) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k = _rotated(torch.cat((q, k), -2), *rotary).split((q.shape[-2], k.shape[-2]), -2)
        out = attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return self.o_proj(out.flatten(-2))


class _FeedForward(nn.Module):
    """A gated feed-forward."""

    def __init__(self, shape: EagleShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.ffn_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.ffn_size, bias=False)
        self.down_proj = nn.Linear(shape.ffn_size, shape.hidden_size, bias=False)

    def forward(self, h_BTD: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(h_BTD)) * self.up_proj(h_BTD))


class _Layer(nn.Module):
    """The decoder layer: attention reads embedding and feature, the residual the feature alone."""

    def __init__(self, shape: EagleShape) -> None:
        super().__init__()
        self._norm_first = shape.norm_before_residual
        self.input_layernorm = _norm(shape)
        self.hidden_norm = _norm(shape)
        self.self_attn = _Attention(shape)
        self.post_attention_layernorm = _norm(shape)
        self.mlp = _FeedForward(shape)

    def forward(
        self, embedded_BTD: Tensor, h_BTD: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend
    ) -> Tensor:
        normed_BTD = self.hidden_norm(h_BTD)
        both_BTD = torch.cat((self.input_layernorm(embedded_BTD), normed_BTD), -1)
        residual_BTD = normed_BTD if self._norm_first else h_BTD
        h_BTD = residual_BTD + self.self_attn(both_BTD, rotary, attend)
        return h_BTD + self.mlp(self.post_attention_layernorm(h_BTD))


class EagleHead(Head):
    """An EAGLE-3 head.

    `d2t` int64 `[draft vocabulary]` is what to add to a draft id for the target's token; draft ids
    ascend with these. A head without embeddings of its own borrows its target's, which are then no
    part of it.
    """

    d2t: Tensor
    kind = "eagle"
    needs_norm = False

    def __init__(
        self,
        shape: EagleShape,
        tokens: Int64[Tensor, " M"] | None = None,
        *,
        own_embeddings: bool = False,
    ) -> None:
        """`tokens` are those that can be guessed, ascending; None: the vocabulary's first."""
        super().__init__()
        self.shape = shape
        self.taps, self.vocab_size = shape.taps, shape.vocab_size
        self.target_size = shape.hidden_size
        self.config = shape.layer_config()
        # What the constructors draw is written over, and the global generator is not theirs.
        with torch.random.fork_rng(devices=[]):
            self.embed_tokens = (
                nn.Embedding(shape.vocab_size, shape.hidden_size) if own_embeddings else None
            )
            taps = len(shape.taps) * shape.hidden_size
            self.fc = nn.Linear(taps, shape.hidden_size, bias=False)
            self.layers = nn.ModuleList([_Layer(shape)])
            self.norm = _norm(shape)
            self.lm_head = nn.Linear(shape.hidden_size, shape.draft_vocab_size, bias=False)
        drafted = torch.arange(shape.draft_vocab_size)
        self.register_buffer("d2t", (drafted if tokens is None else tokens) - drafted)
        # In a tuple, so that its frequencies stay float32 whatever the head becomes.
        self._rotary = (LlamaRotaryEmbedding(self.config),)
        self._table: tuple[Tensor, Tensor] | None = None

    @property
    def tokens(self) -> Int64[Tensor, " M"]:
        """The target's tokens that the columns of `logits` stand for, ascending."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    @property
    def embeddings(self) -> nn.Module:
        """What tokens are looked up in."""
        return self.parts.embeddings if self.embed_tokens is None else self.embed_tokens

    def fused(self, features_RF: Float[Tensor, "*rows F"]) -> Float[Tensor, "*rows D"]:
        """The target's hidden states of some rows as one feature each."""
        return self.fc(features_RF)

    def step(
        self,
        tokens_BT: Int64[Tensor, "B T"],
        h_BTD: Float[Tensor, "B T D"],
        positions_BT: Int64[Tensor, "B T"],
        attend: Attend,
        module: int = 0,
    ) -> Float[Tensor, "B T D"]:
        """The feature after each token, given the feature before it."""
        embedded_BTD = self.embeddings(tokens_BT).to(h_BTD.dtype)
        return self.layers[0](embedded_BTD, h_BTD, self._rotations(positions_BT), attend)

    def logits(self, h_BTD: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows M"]:
        """What follows after features, over the draft vocabulary."""
        return self.lm_head(self.norm(h_BTD))

    def _rotations(self, positions_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines `[B, T, 1, E]` of some positions, from a table."""
        needed = int(positions_BT.max()) + 1
        weight = self.norm.weight
        table = self._table
        fits = table is not None and (table[0].dtype, table[0].device) == (
            weight.dtype,
            weight.device,
        )
        if table is None or not fits or len(table[0]) < needed:
            rows = -(-needed // TABLE_ROWS) * TABLE_ROWS
            with torch.inference_mode(False), torch.no_grad():
                every = torch.arange(rows, device=weight.device)[None]
                cos, sin = self._rotary[0].to(weight.device)(weight.detach(), every)
            # Half of each sine is subtracted.
            sin = torch.cat((-sin[..., : sin.shape[-1] // 2], sin[..., sin.shape[-1] // 2 :]), -1)
            self._table = table = (cos[0, :, None], sin[0, :, None])
        return table[0][positions_BT], table[1][positions_BT]


def _norm(shape: EagleShape) -> nn.RMSNorm:
    return nn.RMSNorm(shape.hidden_size, shape.norm_eps)


def _rotated(x_BTHE: Tensor, cos_BT1E: Tensor, sin_BT1E: Tensor) -> Tensor:
    """Rotary position embedding, halves as pairs; the sines of the first half bear a minus."""
    turned_BTHE = x_BTHE.roll(x_BTHE.shape[-1] // 2, -1)
    return torch.addcmul(x_BTHE * cos_BT1E, turned_BTHE, sin_BT1E)
