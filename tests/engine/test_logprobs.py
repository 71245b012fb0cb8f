"""Log-probabilities: the target's own, of the row each token was emitted from, whoever guessed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from outrider import LLM, Completion, SamplingParams
from outrider.drafters import Drafter, ModelDrafter, NgramDrafter, NoDrafter
from outrider.engine import Emitter, Engine, Requests, logprobs
from outrider.engine.settings import tree_budget
from outrider.models.protocol import ProtocolTarget
from outrider.types import Request, TokenLogprob
from tests.engine.control_rows import EACH, END, VOCAB, law_after
from tests.engine.toys import blurred, markov

TARGET = markov(VOCAB, 1, seed=2)
DRAFT = blurred(TARGET, 3, 0.3)
PROMPTS = [(1, 2), (8, 4, 4, 0, 1, 2), (5,)]
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "coupled": {"seed": 7, "temperature": 0.8},
    "controlled": {"seed": 7} | EACH["frequency_penalty"] | EACH["bad_words"] | EACH["top_k"],
}


def drafter() -> ModelDrafter:
    return ModelDrafter(ProtocolTarget(DRAFT))


def made(draft: Drafter, rule: str | None = None, width: int = 1, **given: Any) -> list[Completion]:
    trees = tree_budget(3, width)
    engine = Engine(ProtocolTarget(TARGET), draft, Emitter(None), trees=trees)
    requests = Requests(engine, depth=3, end_tokens=frozenset({END}))
    params = SamplingParams(max_tokens=12, **given)
    return requests.complete(
        [Request(prompt, params, sample, rule) for prompt in PROMPTS for sample in range(2)]
    )


def told(done: list[Completion]) -> list[tuple[TokenLogprob, ...]]:
    assert all(one.logprobs is not None for one in done)
    return [one.logprobs or () for one in done]


@pytest.mark.parametrize("mode", ["raw", "processed"])
@pytest.mark.parametrize("kind", KINDS)
def test_they_are_those_of_plain_decoding(kind: str, mode: str) -> None:
    """Two samples of ragged prompts; float64 rows of a table are the same whoever drafts."""
    given = KINDS[kind] | {"logprobs": 3, "logprobs_mode": mode}
    plain = told(made(NoDrafter(), **given))
    for draft, width in ((drafter(), 1), (drafter(), 3), (NgramDrafter(1, 2), 1)):
        assert told(made(draft, width=width, **given)) == plain


@pytest.mark.parametrize("rule", ["block", "token", "coupled", "match", "hybrid-traversal"])
@pytest.mark.parametrize("kind", ["coupled", "controlled"])
def test_they_are_the_targets_at_the_tokens_parent(kind: str, rule: str) -> None:
    given = KINDS[kind]
    for mode in ("raw", "processed"):
        width = 3 if rule in ("match", "hybrid-traversal") else 1
        done = made(drafter(), rule, width, **given, logprobs=VOCAB, logprobs_mode=mode)
        assert any("draft" in one.sources for one in done)
        for i, one in enumerate(done):
            prompt = list(PROMPTS[i // 2])
            for n, record in enumerate(told([one])[0]):
                row = torch.from_numpy(np.log(TARGET.law([*prompt, *one.token_ids[:n]])))
                if mode == "processed":
                    row = law_after(row, prompt, one.token_ids[:n], given).log()
                assert record.token == one.token_ids[n]
                check(record, row)


def check(record: TokenLogprob, row: torch.Tensor) -> None:
    assert record.logprob == pytest.approx(float(row[record.token]), abs=1e-7)
    assert record.rank == 1 + int((row > row[record.token]).sum())
    found = torch.full_like(row, -torch.inf)
    for token, value in record.top:
        found[token] = value
    torch.testing.assert_close(found, row, atol=1e-7, rtol=0)
    values = [value for _, value in record.top]
    assert values == sorted(values, reverse=True)


def test_the_drafts_own_would_be_found() -> None:
    """The negative control: the draft's rows are no substitute."""
    one = made(drafter(), **KINDS["coupled"], logprobs=0)[0]
    drafts = [float(np.log(DRAFT.law([*PROMPTS[0], *one.token_ids[:n]])[token]))
              for n, token in enumerate(one.token_ids)]  # fmt: skip
    assert [record.logprob for record in told([one])[0]] != pytest.approx(drafts, abs=1e-3)


def test_tokens_behind_an_end_have_none() -> None:
    given = {"seed": 2, "logprobs": 1, "stop_token_ids": (12, 7)}
    done = made(drafter(), **given)
    assert any(one.finish_reason == "stop" for one in done)
    assert all(len(told([one])[0]) == len(one.token_ids) for one in done)
    assert told(done) == told(made(NoDrafter(), **given))


def test_who_does_not_ask_pays_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("nobody asked")

    monkeypatch.setattr(logprobs, "of_rows", refuse)
    assert all(one.logprobs is None for one in made(drafter(), seed=1))
    with pytest.raises(Exception, match="nobody asked"):
        made(drafter(), seed=1, logprobs=0)


def test_a_stream_carries_them_too() -> None:
    engine = Engine(ProtocolTarget(TARGET), drafter(), Emitter(None))
    requests = Requests(engine, depth=3, end_tokens=frozenset())
    deltas = [*requests.stream(Request((1,), SamplingParams(max_tokens=9, seed=1, logprobs=2)))]
    assert [len(delta.logprobs or ()) for delta in deltas] == [len(d.token_ids) for d in deltas]


def test_equals_stand_by_their_ids_and_what_has_no_mass_is_left_out() -> None:
    row = torch.tensor([[-1.0, -torch.inf, -0.5, -1.0, -0.5, -1.0]])
    (record,) = logprobs.of_rows(row, [3], 4)
    assert record == TokenLogprob(3, -1.0, 3, ((2, -0.5), (4, -0.5), (0, -1.0), (3, -1.0)))
    (everything,) = logprobs.of_rows(row, [2], 99)
    assert [token for token, _ in everything.top] == [2, 4, 0, 3, 5]
    assert logprobs.of_rows(row, [2], 0)[0].top == ()


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def strict(request) -> LLM:
    return LLM.load("bundled", "draft", strict=True, dtype=request.param)


TEXTS = ["def mean(values):\n    ", "import os\n", "class Stack:\n    def push(self, item):\n"]


@pytest.mark.parametrize("kind", KINDS)
def test_strict_ones_are_equal_in_every_bit(strict: LLM, kind: str) -> None:
    for mode in ("raw", "processed"):
        params = SamplingParams(
            max_tokens=10, n=2, logprobs=3, logprobs_mode=mode, **KINDS[kind], ignore_eos=True
        )
        plain = strict.generate(TEXTS, params, depth=0)
        drafted = strict.generate(TEXTS, params)
        assert sum(one.stats.accepted for one in drafted) > 0
        assert told(drafted) == told(plain)


@pytest.mark.parametrize("kind", KINDS)
def test_loose_ones_are_near_plain_decodings(kind: str) -> None:
    llm = LLM.load("bundled", "draft", dtype="float32")
    params = SamplingParams(max_tokens=16, n=2, logprobs=1, **KINDS[kind], ignore_eos=True)
    plain, drafted = (llm.generate(TEXTS, params, depth=depth) for depth in (0, None))
    for one, other in zip(drafted, plain, strict=True):
        assert one.token_ids == other.token_ids
        ours, theirs = ([record.logprob for record in told([c])[0]] for c in (one, other))
        assert ours == pytest.approx(theirs, abs=1e-4)
