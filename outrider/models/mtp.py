"""Multi-token prediction modules: decoder layers of the target's own class, one behind another.

DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024, arXiv 2412.19437, section 2.2): module k reads
h'_k = W [norm emb(x); norm h_{k-1}] with one layer of the target's kind, and shares embeddings and
output layer with it. What the first module reads, and what each gives to the next, has passed a
norm, as in transformers' own `MtpModel`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from outrider.errors import ModelError, UnsupportedModel
from outrider.models.folder import silent
from outrider.models.head import Attend, Head, attending, final_norm
from outrider.models.hf import LoadedTarget
from outrider.models.registration import NAME, register

if TYPE_CHECKING:
    from jaxtyping import Float, Int64

_BY_INDEX: Mapping[str, Any] = {
    "first_k_dense_replace": 0,
    "num_dense_layers": 0,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
}
"""Options that tell layers apart by their number, and what makes the first be as the last."""


class MtpModule(nn.Module):
    """One module; `block` is a decoder layer, `norm` one like the target's final norm."""

    def __init__(self, block: nn.Module, norm: nn.Module, size: int) -> None:
        super().__init__()
        self.enorm, self.hnorm, self.norm = (copy.deepcopy(norm) for _ in range(3))
        # What the constructor draws is written over, and the global generator is not its own.
        with torch.random.fork_rng(devices=[]):
            self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.block = block

    def forward(self, embedded_BTD: Tensor, h_BTD: Tensor, **row: Any) -> Tensor:
        """The feature after each token; `row` is what the layer wants to know of its rows."""
        h_BTD = self.eh_proj(torch.cat((self.enorm(embedded_BTD), self.hnorm(h_BTD)), -1))
        given = self.block(h_BTD, **row)
        return self.norm(given[0] if isinstance(given, tuple) else given)


class MtpHead(Head):
    """The modules of a target, behind its last layer."""

    kind = "mtp"

    def __init__(self, modules: Sequence[MtpModule], target: LoadedTarget) -> None:
        """`target` lends the rotary embedding and says how far back a layer like these sees."""
        super().__init__()
        model: Any = target.model
        self.config = config = model.config.get_text_config()
        self.taps, self.vocab_size = (int(config.num_hidden_layers),), target.vocab_size
        self.target_size, self.num_modules = int(config.hidden_size), len(modules)
        self.mtp = nn.ModuleList(modules)
        like = like_layer(config, 0)
        self.reaches = {0: target.reach(like)}
        rotary = model.get_decoder().rotary_emb
        types = getattr(config, "layer_types", None)
        own = types[like] if types else None
        # In a tuple, so that it is not taken for a part.
        self._rotary = rotary, {"layer_type": own} if own in (config.rope_parameters or {}) else {}

    def step(
        self,
        tokens_BT: Int64[Tensor, "B T"],
        h_BTD: Float[Tensor, "B T D"],
        positions_BT: Int64[Tensor, "B T"],
        attend: Attend,
        module: int = 0,
    ) -> Float[Tensor, "B T D"]:
        """The feature after each token, given the feature before it, by one of the modules."""
        embedded_BTD = self.parts.embeddings(tokens_BT).to(h_BTD.dtype)
        rotary, options = self._rotary
        row = {
            "attention_mask": None,
            "position_ids": positions_BT,
            "past_key_values": None,
            "position_embeddings": rotary(h_BTD, positions_BT, **options),
        }
        with attending(attend):
            return self.mtp[module](embedded_BTD, h_BTD, **row)


def like_layer(config: Any, module: int) -> int:
    """The number of the target's layer that a module's is like: its last, or the type it names.

    Raises:
        UnsupportedModel: a type that none of the target's layers has.
    """
    named = [
        (own, types[module])
        for own, types in (
            (getattr(config, name, None), getattr(config, f"mtp_{name}", None))
            for name in ("layer_types", "mlp_layer_types")
        )
        if own and types
    ]
    for layer in reversed(range(int(config.num_hidden_layers))):
        if all(own[layer] == wanted for own, wanted in named):
            return layer
    raise UnsupportedModel(
        f"MTP module {module} is of type {' and '.join(wanted for _, wanted in named)}, and no "
        "layer of the target is; use drafter='ngram'"
    )


def module_of(
    target: LoadedTarget,
    module: int,
    block: Mapping[str, Tensor] | None = None,
    options: Mapping[str, Any] | None = None,
) -> MtpModule:
    """A module whose layer is of the target's class and config, but for `options`.

    transformers itself puts the tensors `block` into the layer, so that they may have the names of
    any checkpoint of the family. None: the layer's weights are yet to be given.

    Raises:
        ModelError: tensors that are not the layer's.
        UnsupportedModel: a target whose layers are not built from its config alone.
    """
    register()
    model: Any = target.model
    config = model.config
    if config is not config.get_text_config() or not hasattr(model.get_decoder(), "rotary_emb"):
        raise UnsupportedModel(
            f"the layers of the {config.model_type} model cannot be built beside it, so that it "
            "has no MTP modules here; use drafter='ngram'"
        )
    single = _single(config, like_layer(config, module), options or {})
    made, about = type(model), {"dtype": target.dtype, "attn_implementation": NAME}
    with torch.random.fork_rng(devices=[]), silent():
        if block is None:
            carrier, wrong = made(single), set()
        else:
            try:
                carrier, info = made.from_pretrained(
                    None,
                    config=single,
                    state_dict={f"model.layers.0.{name}": t for name, t in block.items()},
                    output_loading_info=True,
                    **about,
                )
            except RuntimeError as error:
                raise ModelError(
                    f"the layer of MTP module {module} is of another shape than the target's "
                    f"({str(error).splitlines()[-1].strip()}); give the modules of this target"
                ) from error
            wrong = {n for n in info["missing_keys"] if "layers.0." in n} | {
                str(n) for n in info["unexpected_keys"]
            }
    if wrong:
        raise ModelError(
            f"the layer of MTP module {module} and a layer of the {config.model_type} model differ "
            f"in {', '.join(sorted(wrong))}; give the modules of this target"
        )
    layer = carrier.get_decoder().layers[0]
    return MtpModule(layer, final_norm(target), int(config.hidden_size))


def _single(config: Any, like: int, options: Mapping[str, Any]) -> Any:
    """The configuration of a model of one layer, that like another, and next to no vocabulary."""
    single, layers = copy.deepcopy(config), int(config.num_hidden_layers)
    for name, value in vars(config).items():
        if isinstance(value, list) and len(value) == layers and not name.startswith("mtp_"):
            setattr(single, name, [value[like]])
    changed = {name: value for name, value in _BY_INDEX.items() if hasattr(config, name)}
    ids = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    sizes = {"num_hidden_layers": 1, "vocab_size": 1}
    for name, value in {**changed, **ids, **sizes, **options}.items():
        setattr(single, name, value)
    single._attn_implementation = NAME
    return single
