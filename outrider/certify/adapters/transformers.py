"""transformers' `generate`, assisted or not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from outrider.certify.model.book import set_controls
from outrider.certify.model.subject import Made, Prompts
from outrider.config import SamplingParams
from outrider.errors import UnsupportedModel

NAMES = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "typical_p": "typical_p",
    "repetition_penalty": "repetition_penalty",
    "no_repeat_ngram": "no_repeat_ngram_size",
    "min_tokens": "min_new_tokens",
}
"""Controls that `generate` has, and what it calls them."""


SAMPLED = "temperature", "top_k", "top_p", "min_p", "typical_p"
"""Those that greedy decoding has no use for."""


@dataclass(frozen=True, slots=True)
class Transformers:
    """A causal language model of transformers, one prompt after another.

    Attributes:
        model: the target.
        options: of `generate`, such as `assistant_model=` or `prompt_lookup_num_tokens=`.
    """

    model: Any
    options: dict[str, Any]

    def __call__(self, prompts: Prompts, params: SamplingParams, seed: int) -> list[Made]:
        """The noise is torch's own, begun anew in each call.

        Raises:
            UnsupportedModel: a control that `generate` does not have.
        """
        torch.manual_seed(seed)
        asked = self._asked(params)
        return [self._text(list(prompt), asked, params.logprobs) for prompt in prompts]

    def _asked(self, params: SamplingParams) -> dict[str, Any]:
        unknown = [name for name in set_controls(params) if name not in NAMES]
        unknown += ["ignore_eos"] * params.ignore_eos
        unknown += ["stop_token_ids"] * bool(params.stop_token_ids)
        if unknown:
            raise UnsupportedModel(
                f"{unknown[0]}: this adapter of transformers' has no such option"
            )
        greedy = params.temperature == 0
        # Every one is named, or the checkpoint's own defaults would take its place (top_k=50).
        asked = {
            theirs: getattr(params, name)
            for name, theirs in NAMES.items()
            if not (greedy and name in SAMPLED)
        }
        length = params.max_tokens
        return {"do_sample": not greedy, **asked, "max_new_tokens": length, **self.options}

    def _text(self, prompt: list[int], asked: dict[str, Any], logprobs: int | None) -> Made:
        out = self.model.generate(
            torch.tensor([prompt], device=self.model.device),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64, device=self.model.device),
            return_dict_in_generate=True,
            output_logits=logprobs is not None,
            **asked,
        )
        tokens = out.sequences[0, len(prompt) :].tolist()
        if logprobs is None:
            return Made(tuple(tokens))
        rows = [row[0].double().log_softmax(-1) for row in out.logits]
        told = tuple(float(row[token]) for row, token in zip(rows, tokens, strict=True))
        return Made(tuple(tokens), told)
