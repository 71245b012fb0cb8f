"""transformers' `generate`, with an assistant, with prompt lookup, or plain.

Run by `worker.py` in the engine's Python; imports nothing of Outrider. `Transformers` takes a model
that is loaded already, too.
"""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

CONTROLS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "typical_p": "typical_p",
    "repetition_penalty": "repetition_penalty",
    "no_repeat_ngram": "no_repeat_ngram_size",
    "min_tokens": "min_new_tokens",
}
"""What `generate` calls them."""
SAMPLED = "temperature", "top_k", "top_p", "min_p", "typical_p"
"""Those that greedy decoding has no use for."""
SPECULATION = (
    "assistant_model",
    "num_assistant_tokens",
    "prompt_lookup_num_tokens",
    "max_matching_ngram_size",
)


def load(
    model: str,
    dtype: str = "float32",
    assistant_model: str | None = None,
    num_assistant_tokens: int = 4,
    threads: int | None = None,
    **options: Any,
) -> Transformers:
    """A causal language model of a folder.

    Args:
        model: the target's folder.
        dtype: of the weights.
        assistant_model: a draft model's folder.
        num_assistant_tokens: tokens it guesses per round, always so many.
        threads: of torch; None leaves its own.
        options: of `generate`, such as `prompt_lookup_num_tokens`.
    """
    import torch

    # By name: a type checker would take this file for it.
    transformers: Any = import_module("transformers")
    if threads is not None:
        torch.set_num_threads(threads)
    own = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()
    if assistant_model is not None:
        draft = transformers.AutoModelForCausalLM.from_pretrained(assistant_model, dtype=dtype)
        config: Any = draft.eval().generation_config
        config.num_assistant_tokens = num_assistant_tokens
        config.num_assistant_tokens_schedule = "constant"
        config.assistant_confidence_threshold = 0.0
        options["assistant_model"] = draft
    return Transformers(own, options)


class Transformers:
    """A causal language model, one prompt after another: the noise is torch's own.

    Args:
        model: the target.
        options: of `generate`.
    """

    def __init__(self, model: Any, options: dict[str, Any] | None = None) -> None:
        transformers: Any = import_module("transformers")
        self._model, self._options = model, options or {}
        self.name = f"transformers {transformers.__version__}"

    def __call__(self, prompts: Any, params: Any, seed: int) -> list[Any]:
        """The texts of some prompts; the noise begins anew in each call."""
        import torch

        torch.manual_seed(seed)
        with torch.inference_mode():
            return [self._text(list(prompt), params) for prompt in prompts]

    def _text(self, prompt: list[int], params: Any) -> Any:
        import torch

        ids = torch.tensor([prompt], device=self._model.device)
        told = params.logprobs is not None
        out = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            return_dict_in_generate=True,
            output_logits=told,
            **self._asked(params),
        )
        tokens = out.sequences[0, len(prompt) :].tolist()
        logprobs = None
        if told:
            rows = [row[0].double().log_softmax(-1) for row in out.logits]
            logprobs = [float(row[token]) for row, token in zip(rows, tokens, strict=True)]
        return SimpleNamespace(token_ids=tokens, logprobs=logprobs)

    def _asked(self, params: Any) -> dict[str, Any]:
        greedy = params.temperature == 0
        # Every one is named, or the checkpoint's own defaults would take its place (top_k=50).
        asked = {
            theirs: getattr(params, name)
            for name, theirs in CONTROLS.items()
            if not (greedy and name in SAMPLED)
        }
        length = params.max_tokens
        return {"do_sample": not greedy, **asked, "max_new_tokens": length, **self._options}
