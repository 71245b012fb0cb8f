"""Imposed acceptance: drafts pass with probability alpha and cost a real draft's forwards."""

from __future__ import annotations

import importlib

import pytest
import torch
from outrider_models import path

from benchmarks.arena.oracle import OracleDrafter
from benchmarks.arena.process import WORKERS
from outrider import LLM, SamplingParams
from outrider.drafters import ModelDrafter, NoDrafter
from outrider.llm.load import Placement
from outrider.models.hf import HuggingFaceTarget
from outrider.models.text import TextTokenizer

PROMPTS = [[5, 90, 300, 7 + i] for i in range(4)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)


@pytest.fixture(scope="module")
def target() -> HuggingFaceTarget:
    return HuggingFaceTarget.load(path("target"), dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return TextTokenizer(path("target"))


@pytest.fixture(scope="module")
def texts(target, tokenizer) -> list[list[int]]:
    done = LLM(target, tokenizer, NoDrafter()).generate(PROMPTS, GREEDY)
    return [list(one.token_ids) for one in done]


def taught(target: HuggingFaceTarget, texts: list[list[int]], alpha: float) -> OracleDrafter:
    oracle = OracleDrafter(ModelDrafter(target), alpha)
    for prompt, text in zip(PROMPTS, texts, strict=True):
        oracle.learn(prompt, text)
    return oracle


@pytest.fixture
def draft() -> HuggingFaceTarget:
    return HuggingFaceTarget.load(path("draft"), dtype=torch.float32)


@pytest.mark.parametrize("alpha", [0.6, 0.9])
def test_acceptance_is_alpha(alpha, target, draft, tokenizer, texts):
    oracle = taught(draft, texts, alpha)
    llm = LLM(target, tokenizer, oracle, k=4)
    done = llm.generate(PROMPTS, GREEDY)
    assert [list(one.token_ids) for one in done] == texts
    metrics = llm.metrics
    # Each round tests what it accepts, and one more where not all of a draft was.
    passed = metrics.accepted
    tested = passed + metrics.rounds - round(metrics.rounds * metrics.acceptance_per_pos[-1])
    deviation = (alpha * (1 - alpha) / tested) ** 0.5
    assert tested > 80
    assert abs(passed / tested - alpha) < 4 * deviation


def test_a_corrupted_token_is_another_one_and_the_others_are_the_targets(draft, texts):
    oracle = taught(draft, texts, 0.7)
    replayed = [oracle._texts[tuple(prompt)] for prompt in PROMPTS]
    same = [
        a == b
        for text, copy in zip(texts, replayed, strict=True)
        for a, b in zip(text, copy, strict=True)
    ]
    assert 0.5 < sum(same) / len(same) < 0.9
    assert all(0 <= token < oracle.vocab_size for copy in replayed for token in copy)
    sure, never = taught(draft, texts, 1.0), taught(draft, texts, 0.0)
    assert sure._texts[tuple(PROMPTS[0])] == texts[0]
    assert all(a != b for a, b in zip(never._texts[tuple(PROMPTS[0])], texts[0], strict=True))


def test_a_real_draft_forward_is_paid_for(target, draft, tokenizer, texts, monkeypatch):
    """As many forwards of the draft as when it drafts for itself and all of it is kept."""
    rows: list[int] = []
    score = draft.score

    def counted(given):
        rows.append(len(given.tokens_R))
        return score(given)

    monkeypatch.setattr(draft, "score", counted)
    llm = LLM(target, tokenizer, taught(draft, texts, 1.0), k=4)
    llm.generate([PROMPTS[0]], GREEDY)
    # The first reads the prompt; each further drafted token is a forward of its own.
    assert len(rows) >= llm.metrics.drafted
    assert llm.metrics.accepted == llm.metrics.drafted


@pytest.fixture
def worker(monkeypatch):
    """Outrider's arms as they run, but with the model's own forward."""
    monkeypatch.syspath_prepend(str(WORKERS))
    module = importlib.import_module("outrider_worker")

    class Eager(module.Outrider):
        def _placement(self, task):
            return Placement(dtype=torch.float32, share_prefixes=False)

    return Eager


TASK = {
    "target": str(path("target")),
    "draft": str(path("draft")),
    "k": 4,
    "threads": torch.get_num_threads(),
    "dtype": "float32",
}
JOB = {
    "prompts": [list(range(5, 25))],
    "seed": 0,
    "tokens": 16,
    "temperature": 0.0,
    "top_k": 40,
}


def test_an_arm_that_is_alone_in_its_process_is_taught_there(worker) -> None:
    """As over GGUF files, where every arm has a process of its own."""
    answer = worker({**TASK, "arms": ["draft"], "alpha": 1.0}).run({**JOB, "arm": "draft"})
    assert len(answer["texts"][0]) == 16
    assert answer["accepted"] == answer["drafted"] > 8, "what is replayed is the target's own text"


def test_auto_chooses_between_the_draft_model_and_looking_up(worker) -> None:
    arms = worker({**TASK, "arms": ["none", "auto", "draft"]})
    plain, auto = (arms.run({**JOB, "arm": arm}) for arm in ("none", "auto"))
    assert auto["texts"] == plain["texts"] and auto["drafted"] > 0
