"""OpenVINO GenAI: one pipeline, plain, with a draft model, or with prompt lookup."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai
import wire

CACHE_GB = 1


class OpenVino:
    """The pipeline of one arm in the asked arithmetic; the arm `int8` has 8-bit weights."""

    def __init__(self, task: dict[str, Any]) -> None:
        (arm,) = task["arms"]
        self._k: int = task["k"]
        self._arm = arm
        precision = "int8" if arm == "int8" else "fp32"
        props = {
            "INFERENCE_PRECISION_HINT": task["kind"],
            "KV_CACHE_PRECISION": task["kind"],
            "INFERENCE_NUM_THREADS": task["threads"],
        }
        more: dict[str, Any] = {}
        if arm == "draft":
            more["draft_model"] = genai.draft_model(
                converted(task["draft"], "fp32"), "CPU", **props
            )
        elif arm == "lookup":
            more["prompt_lookup"] = True
        self._pipeline = genai.LLMPipeline(
            converted(task["target"], precision),
            "CPU",
            scheduler_config=_scheduler(task),
            **more,
            **props,
        )

    def about(self) -> dict[str, Any]:
        """Its version."""
        return {"version": f"openvino-genai {genai.__version__}, openvino {ov.__version__}"}

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        """Decodes a job; see `wire.Worker`."""
        config = self._config(job)
        ids = ov.Tensor(np.asarray(job["prompts"], dtype=np.int64))
        mask = ov.Tensor(np.ones((len(job["prompts"]), len(job["prompts"][0])), dtype=np.int64))
        start = time.perf_counter()
        made = self._pipeline.generate(genai.TokenizedInputs(ids, mask), config)
        seconds = time.perf_counter() - start
        first_ms = made.perf_metrics.get_ttft().mean
        rounds, drafted, accepted = self._counts(made, job)
        return {
            "texts": [list(text)[: job["tokens"]] for text in made.tokens],
            "seconds": seconds,
            "first_s": first_ms / 1000 if first_ms > 0 else None,
            "rounds": rounds,
            "drafted": drafted,
            "accepted": accepted,
        }

    def _counts(self, made: Any, job: dict[str, Any]) -> tuple[int | None, int | None, int | None]:
        """It tells of drafts by a model, and not of lookups."""
        told = made.extended_perf_metrics if self._arm == "draft" else None
        if told is None:
            return None, None, None
        accepted = told.get_num_accepted_tokens()
        # Each round adds one token of the target's own; the first one comes with the prompt.
        total = len(job["prompts"]) * job["tokens"]
        return total - accepted, None, accepted

    def _config(self, job: dict[str, Any]) -> Any:
        config = genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = job["tokens"]
        config.ignore_eos, config.apply_chat_template = True, False
        config.do_sample = job["temperature"] > 0
        if config.do_sample:
            config.temperature, config.top_k, config.top_p = job["temperature"], job["top_k"], 1.0
            config.rng_seed = job["seed"]
        if self._arm in ("draft", "lookup"):
            config.num_assistant_tokens = self._k
        if self._arm == "lookup":
            config.max_ngram_size = 4
        return config


def converted(folder: str, precision: str) -> str:
    """Where the arena has put the converted model."""
    model = Path(folder)
    return str(model.parent / "openvino" / f"{model.name}-{precision}")


def _scheduler(task: dict[str, Any]) -> Any:
    found = genai.SchedulerConfig()
    found.cache_size = CACHE_GB
    # Every run reads its prompts.
    found.enable_prefix_caching = False
    found.max_num_batched_tokens = 2048
    return found


if __name__ == "__main__":
    wire.serve(OpenVino)
