"""transformers: plain `generate`, assisted generation, prompt lookup, and `generate_batch`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import transformers
import wire
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    StoppingCriteria,
    StoppingCriteriaList,
)


class Clock(StoppingCriteria):
    """Notes when it is first asked whether to stop, which is after the first round's tokens."""

    first: float | None = None

    def __call__(self, input_ids: Any, scores: Any, **more: Any) -> Any:
        """Nothing is to stop."""
        self.first = self.first or time.perf_counter()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class Transformers:
    """One model, and its draft model where an arm wants it."""

    def __init__(self, task: dict[str, Any]) -> None:
        torch.set_num_threads(task["threads"])
        transformers.logging.set_verbosity_error()
        self._k: int = task["k"]
        self._dtype = getattr(torch, task["dtype"])
        self._model = self._load(Path(task["target"]))
        self._draft = self._load(Path(task["draft"])) if "assistant" in task["arms"] else None
        self._forwards = 0
        self._model.register_forward_pre_hook(self._count)

    def about(self) -> dict[str, Any]:
        """Its version."""
        return {"version": f"transformers {transformers.__version__}, torch {torch.__version__}"}

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        """Decodes a job; see `wire.Worker`."""
        prompts, arm = job["prompts"], job["arm"]
        torch.manual_seed(job["seed"])
        if arm == "generate_batch":
            return self._batched(prompts, job)
        if len(prompts) > 1 and arm != "plain":
            # Its own refusal is in the words of a ValueError; not to be met once a round.
            raise wire.RefusedError("assisted generate is only supported for batch_size = 1")
        how: dict[str, Any] = {}
        if arm == "assistant":
            how = {"assistant_model": self._drafting()}
        elif arm == "lookup":
            how = {"prompt_lookup_num_tokens": self._k, "max_matching_ngram_size": 4}
        clock, self._forwards = Clock(), 0
        ids = torch.tensor(prompts)
        start = time.perf_counter()
        with torch.inference_mode():
            made = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                stopping_criteria=StoppingCriteriaList([clock]),
                **self._asked(job),
                **how,
            )
        seconds = time.perf_counter() - start
        texts = made[:, ids.shape[1] :].tolist()
        # It counts nothing itself: every forward of the target keeps what was accepted and one.
        known = arm != "plain"
        return {
            "texts": texts,
            "seconds": seconds,
            "first_s": None if clock.first is None else clock.first - start,
            "rounds": self._forwards if known else None,
            "drafted": None,
            "accepted": job["tokens"] - self._forwards if known else None,
        }

    def _batched(self, prompts: list[list[int]], job: dict[str, Any]) -> dict[str, Any]:
        config = GenerationConfig(**self._asked(job), eos_token_id=-1)
        rows = sum(map(len, prompts)) + len(prompts) * job["tokens"]
        start = time.perf_counter()
        # Kept from call to call, with room for these texts: setting up is not timed.
        made = self._model.generate_batch(
            inputs=prompts,
            generation_config=config,
            continuous_batching_config=ContinuousBatchingConfig(
                num_blocks=max(64, rows // 16), max_batch_tokens=2048
            ),
            persistent_manager=True,
        )
        seconds = time.perf_counter() - start
        keys = sorted(made, key=lambda key: int("".join(filter(str.isdigit, key))))
        return {
            "texts": [list(made[key].generated_tokens) for key in keys],
            "seconds": seconds,
            "first_s": None,
            "rounds": None,
            "drafted": None,
            "accepted": None,
        }

    def _asked(self, job: dict[str, Any]) -> dict[str, Any]:
        common = {"max_new_tokens": job["tokens"], "pad_token_id": 0}
        if job["temperature"] == 0:
            return {**common, "do_sample": False}
        chain = {"temperature": job["temperature"], "top_k": job["top_k"], "top_p": 1.0}
        return {**common, "do_sample": True, **chain}

    def _drafting(self) -> Any:
        assert self._draft is not None
        config = self._draft.generation_config
        config.num_assistant_tokens = self._k
        config.num_assistant_tokens_schedule = "constant"
        config.assistant_confidence_threshold = 0.0
        return self._draft

    def _load(self, folder: Path) -> Any:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=self._dtype).eval()
        # Every text has its full length.
        model.generation_config.eos_token_id = None
        return model

    def _count(self, *_: Any) -> None:
        self._forwards += 1


if __name__ == "__main__":
    wire.serve(Transformers)
