"""A head that Outrider exported, served by vLLM: the same texts, the same acceptance."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path

import pytest

from benchmarks.arena.home import Home, default_home
from outrider import LLM, SamplingParams
from outrider.interop.export import export_head
from outrider.models.bundled import bundled_path, eval_prompts
from tests.interop import vllm_head

PARAMS = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
APART = 0.03
"""How far acceptance may be apart."""


@pytest.mark.slow
def test_vllm_keeps_as_many_of_its_tokens(tmp_path: Path) -> None:
    home = Home(default_home())
    if (why := home.missing("vllm")) is not None:
        pytest.skip(f"vllm: {why}")
    exported = export_head(bundled_path("eagle"), to="vllm", out=tmp_path / "head", k=4)
    words = shlex.split(exported.commands[0].replace("\\\n", " "))
    config = json.loads(words[words.index("--speculative-config") + 1])
    llm = LLM.load("bundled", drafter="eagle:bundled", k=4, dtype="float32")
    prompts = [llm.tokenizer.encode(text)[:60] for text in eval_prompts("code")[:48]]
    texts = llm.generate(prompts, PARAMS)
    ask = {
        "prompts": prompts,
        "target": str(bundled_path("target")),
        "speculative_config": config,
        "max_tokens": PARAMS.max_tokens,
    }
    (tmp_path / "ask.json").write_text(json.dumps(ask))
    python = str(home.python("vllm"))
    subprocess.run([python, vllm_head.__file__, str(tmp_path)], check=True, timeout=900)
    told = json.loads((tmp_path / "told.json").read_text())
    same = sum(list(o.token_ids) == t for o, t in zip(texts, told["texts"], strict=True))
    # Rounding may part a few texts that plain decoding would part as well.
    assert same >= 0.9 * len(texts), same
    ours, drafted = (sum(getattr(o.stats, name) for o in texts) for name in ("accepted", "drafted"))
    theirs = told["accepted"] / told["drafted"]
    print(f"vllm {told['version']}: {theirs:.4f}, Outrider: {ours / drafted:.4f}, {same} texts")
    assert abs(ours / drafted - theirs) < APART, (ours / drafted, theirs)
