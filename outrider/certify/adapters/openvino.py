"""OpenVINO GenAI's `LLMPipeline`, with a draft model, with prompt lookup, or plain.

Run by `worker.py` in the engine's Python; imports nothing of Outrider.
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
    "repetition_penalty": "repetition_penalty",
    "min_tokens": "min_new_tokens",
    "ignore_eos": "ignore_eos",
    "stop_token_ids": "stop_token_ids",
}
"""What `GenerationConfig` calls them."""
SPECULATION = "draft", "prompt_lookup", "num_assistant_tokens", "max_ngram_size"
F32 = {"INFERENCE_PRECISION_HINT": "f32"}


def load(
    model: str,
    draft: str | None = None,
    prompt_lookup: bool = False,
    device: str = "CPU",
    cache_gb: int = 1,
    num_assistant_tokens: int | None = None,
    max_ngram_size: int | None = None,
    **properties: Any,
) -> OpenVino:
    """The pipeline of a folder that `optimum-cli export openvino` wrote, in float32.

    Args:
        model: the target's folder.
        draft: a draft model's folder.
        prompt_lookup: guess from the prompt.
        device: where it runs.
        cache_gb: room for keys and values.
        num_assistant_tokens: tokens guessed per round.
        max_ngram_size: the longest run that is looked up.
        properties: of the device.
    """
    genai: Any = import_module("openvino_genai")
    where: dict[str, Any] = {**F32, **properties}
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = cache_gb
    more: dict[str, Any] = {"prompt_lookup": True} if prompt_lookup else {}
    if draft is not None:
        more["draft_model"] = genai.draft_model(draft, device, **where)
    pipeline = genai.LLMPipeline(model, device, scheduler_config=scheduler, **more, **where)
    guesses = {"num_assistant_tokens": num_assistant_tokens, "max_ngram_size": max_ngram_size}
    if prompt_lookup or draft is not None:
        # Without a number of its own a request is decoded plainly, or refused.
        guesses["num_assistant_tokens"] = num_assistant_tokens or 4
    if prompt_lookup:
        guesses["max_ngram_size"] = max_ngram_size or 3
    asked = {name: value for name, value in guesses.items() if value is not None}
    return OpenVino(genai, pipeline, asked)


class OpenVino:
    """One prompt after another: a call has one seed for all."""

    def __init__(self, genai: Any, pipeline: Any, guesses: dict[str, Any]) -> None:
        self._genai, self._pipeline, self._guesses = genai, pipeline, guesses
        self.name = f"openvino-genai {genai.__version__}"

    def __call__(self, prompts: Any, params: Any, seed: int) -> list[Any]:
        """The texts of some prompts; each has a seed of its own."""
        return [self._text(prompt, params, seed + i) for i, prompt in enumerate(prompts)]

    def _text(self, prompt: Any, params: Any, seed: int) -> Any:
        import numpy as np

        # By name: a type checker would take this file for it.
        ov: Any = import_module("openvino")
        ids, mask = (ov.Tensor(np.array([row])) for row in (prompt, [1] * len(prompt)))
        asked = self._genai.TokenizedInputs(ids, mask)
        made = self._pipeline.generate(asked, self._config(params, seed))
        return SimpleNamespace(token_ids=list(made.tokens[0]))

    def _config(self, params: Any, seed: int) -> Any:
        # Begun from the checkpoint's own, which knows where a text ends.
        config = self._pipeline.get_generation_config()
        config.apply_chat_template = False
        config.max_new_tokens = params.max_tokens
        for name, theirs in CONTROLS.items():
            asked = getattr(params, name)
            setattr(config, theirs, set(asked) if name == "stop_token_ids" else asked)
        config.do_sample = params.temperature > 0
        config.rng_seed = seed
        if not params.top_k:
            config.top_k = 2**31
        if not config.do_sample:
            config.temperature, config.top_k, config.top_p, config.min_p = 1.0, 2**31, 1.0, 0.0
        for name, value in self._guesses.items():
            setattr(config, name, value)
        return config
