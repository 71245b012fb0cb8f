"""vLLM's `LLM`, with any `speculative_config`, or plain.

Run by `worker.py` in the engine's Python; imports nothing of Outrider.
"""

from __future__ import annotations

import os
from importlib import import_module
from types import SimpleNamespace
from typing import Any

CONTROLS = {
    name: name
    for name in (
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
        "allowed_token_ids",
        "min_tokens",
        "ignore_eos",
        "stop_token_ids",
    )
}
"""Its `SamplingParams` have the same names."""
SPECULATION = ("speculative_config",)


def load(model: str, dtype: str = "float32", **options: Any) -> Vllm:
    """The engine in this process, in float32.

    Args:
        model: the target's folder.
        dtype: of the weights.
        options: of `vllm.LLM`, such as `speculative_config`.
    """
    # A process of its own would outlive a caller that is killed.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    # By name: a type checker would take this file for it.
    vllm: Any = import_module("vllm")
    return Vllm(vllm, vllm.LLM(model=model, dtype=dtype, **options))


class Vllm:
    """All prompts at once; each request has a seed of its own."""

    def __init__(self, vllm: Any, llm: Any) -> None:
        self._vllm, self._llm = vllm, llm
        self.name = f"vllm {vllm.__version__}"

    def __call__(self, prompts: Any, params: Any, seed: int) -> list[Any]:
        """The texts of some prompts."""
        asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        each = [self._params(params, seed + i) for i in range(len(prompts))]
        made = self._llm.generate(asked, each, use_tqdm=False)
        return [_text(one.outputs[0], params.logprobs is not None) for one in made]

    def _params(self, params: Any, seed: int) -> Any:
        asked = {theirs: getattr(params, name) for name, theirs in CONTROLS.items()}
        asked["logit_bias"] = dict(asked["logit_bias"]) or None
        asked["stop_token_ids"] = list(asked["stop_token_ids"])
        if params.temperature == 0:
            asked |= {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
        return self._vllm.SamplingParams(
            max_tokens=params.max_tokens,
            seed=seed,
            logprobs=params.logprobs,
            detokenize=False,
            **asked,
        )


def _text(one: Any, told: bool) -> Any:
    logprobs = None
    if told:
        pairs = zip(one.logprobs, one.token_ids, strict=True)
        logprobs = [row[token].logprob for row, token in pairs]
    return SimpleNamespace(token_ids=list(one.token_ids), logprobs=logprobs)
