"""Run by vLLM's Python: greedy texts with an EAGLE-3 head, and how many drafted tokens it kept.

`python vllm_head.py FOLDER`, which holds `ask.json` of token ids, head and target; `told.json` is
written there. Imports nothing of Outrider.
"""

import json
import os
import sys
from importlib import import_module
from pathlib import Path

COUNTS = "vllm:spec_decode_num_"


def main(folder: Path) -> None:
    """Asks and writes what came."""
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }
    vllm = import_module("vllm")
    ask = json.loads((folder / "ask.json").read_text())
    llm = vllm.LLM(
        model=ask["target"],
        dtype="float32",
        max_model_len=512,
        max_num_seqs=8,
        enforce_eager=True,
        disable_log_stats=False,
        speculative_config=ask["speculative_config"],
    )
    params = vllm.SamplingParams(
        temperature=0.0, max_tokens=ask["max_tokens"], ignore_eos=True, detokenize=False
    )
    prompts = [{"prompt_token_ids": ids} for ids in ask["prompts"]]
    made = llm.generate(prompts, params, use_tqdm=False)
    counts = {
        m.name.removeprefix(COUNTS): m.value for m in llm.get_metrics() if hasattr(m, "value")
    }
    told = {
        "version": vllm.__version__,
        "texts": [list(one.outputs[0].token_ids) for one in made],
        "drafted": counts["draft_tokens"],
        "accepted": counts["accepted_tokens"],
    }
    (folder / "told.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
