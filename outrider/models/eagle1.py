"""The EAGLE head of 2024: a linear over embedding and feature, then stock Llama layers.

Li et al., "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty" (ICML 2024, arXiv
2401.15077); EAGLE-2 (EMNLP 2024, arXiv 2406.16858) grows trees with the same head. Its features are
those behind the target's final norm, its laws the target's own output layer of its features, as in
the authors' `cnets1.py` and `ea_model.py`. Parameters bear the names of their files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from outrider.models.head import Attend, Head, attending
from outrider.models.registration import NAME, register

if TYPE_CHECKING:
    from jaxtyping import Float, Int64


class FeatureHead(Head):
    """A head that predicts the target's last hidden state from the one before and the token.

    `config` describes its layers, as many as it says; the first has no norm before its attention.
    """

    kind = "eagle"

    def __init__(
        self, config: LlamaConfig, depth: int, *, bias: bool = True, own_embeddings: bool = False
    ) -> None:
        """`depth` is the number of the target's layers, `bias` whether `fc` has one."""
        super().__init__()
        register()
        self.config = config
        self.taps, self.vocab_size = (depth,), int(config.vocab_size)
        self.target_size = size = int(config.hidden_size)
        config._attn_implementation = NAME
        # What the constructors draw is written over, and the global generator is not theirs.
        with torch.random.fork_rng(devices=[]):
            self.embed_tokens = nn.Embedding(config.vocab_size, size) if own_embeddings else None
            self.fc = nn.Linear(2 * size, size, bias=bias)
            self.layers = nn.ModuleList(
                LlamaDecoderLayer(config, i) for i in range(int(config.num_hidden_layers))
            )
        first: Any = self.layers[0]
        first.input_layernorm = nn.Identity()
        for layer in self.layers:
            # Where projections have biases at all, the last has none.
            attention: Any = layer.self_attn
            attention.o_proj.register_parameter("bias", None)
        # In a tuple, so that its frequencies stay float32 whatever the head becomes.
        self._rotary = (LlamaRotaryEmbedding(config),)

    @property
    def embeddings(self) -> nn.Module:
        """What tokens are looked up in."""
        return self.parts.embeddings if self.embed_tokens is None else self.embed_tokens

    def step(
        self,
        tokens_BT: Int64[Tensor, "B T"],
        h_BTD: Float[Tensor, "B T D"],
        positions_BT: Int64[Tensor, "B T"],
        attend: Attend,
        module: int = 0,
    ) -> Float[Tensor, "B T D"]:
        """The feature after each token, given the feature before it."""
        h_BTD = self.fc(torch.cat((self.embeddings(tokens_BT), h_BTD), -1))
        rotary = self._rotary[0].to(h_BTD.device)(h_BTD, positions_BT)
        with attending(attend):
            for layer in self.layers:
                h_BTD = layer(h_BTD, position_ids=positions_BT, position_embeddings=rotary)
        return h_BTD
