"""An EAGLE-3 head as a drafter: plain decoding's tokens, the target's law, and nothing left."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from outrider import LLM, SamplingParams
from outrider.decoding import Draft
from outrider.decoding.laws import Law
from outrider.drafters import (
    CombinedDrafter,
    DrafterSpec,
    EagleDrafter,
    ModelDrafter,
    NgramDrafter,
    NoDrafter,
)
from outrider.engine import Emitter, Engine, Requests
from outrider.errors import InvalidConfig, ModelError, UnsupportedModel, VocabularyMismatch
from outrider.models.eagle import EagleHead, EagleShape
from outrider.models.hf import HuggingFaceTarget
from outrider.models.protocol import ProtocolTarget
from outrider.models.speculators import save_head
from outrider.train.eagle import Lines
from outrider.tree import TreeBudget
from outrider.types import Request
from tests.drafters.serving import RAGGED, TREES, laws, served, texts
from tests.drafters.tapped import TappedTarget, ToyEagle
from tests.engine.test_law import LENGTH, PREFIX, TARGET, chi_square
from tests.engine.toys import markov
from tests.models.families import one_thread, random_model, random_tokens
from tests.models.test_eagle import SHAPE, random_head
from tests.models.test_taps import plain_states

single = pytest.fixture(scope="module", autouse=True)(one_thread)
LAWS = laws(24)


def left(requests: Requests) -> int:
    """Sequences of the head's that are open still."""
    drafter = requests.engine.drafter
    assert isinstance(drafter, EagleDrafter)
    return drafter.model.num_open + len(drafter._texts)


@pytest.fixture(scope="module")
def llama() -> HuggingFaceTarget:
    return HuggingFaceTarget(random_model("llama"))


@pytest.mark.parametrize("strict", [False, True], ids=["", "strict"])
@pytest.mark.parametrize("trees", [None, TREES], ids=["chains", "trees"])
def test_greedy_and_coupled_tokens_are_plain_decodings(trees, strict, llama) -> None:
    target = HuggingFaceTarget(random_model("llama"), strict=True) if strict else llama
    plain = served(target, NoDrafter())
    rates: list[float] = []
    for params in LAWS.values():
        params = replace(params, logprobs=2)
        wanted = plain.complete([Request(tuple(prompt), params) for prompt in RAGGED])
        requests = served(target, EagleDrafter(random_head()), trees)
        done = requests.complete([Request(tuple(prompt), params) for prompt in RAGGED])
        assert [d.token_ids for d in done] == [w.token_ids for w in wanted]
        if strict:
            assert [d.logprobs for d in done] == [w.logprobs for w in wanted], "equal bit for bit"
        assert left(requests) == 0
        rates.append(requests.engine.metrics.acceptance_rate)
    # Some guesses were right and some wrong.
    assert max(rates) > 0 and min(rates) < 1


def test_sampling_controls_and_other_drafters_go_with_it(llama) -> None:
    """Penalties look at whole rows, laws are over part of the vocabulary; long prompts in parts."""
    long = random_tokens(150).tolist()
    prompts = [long, RAGGED[2], [*long[:140], 7], [3, 4] * 6]
    params = SamplingParams(
        max_tokens=24, seed=5, repetition_penalty=1.3, top_p=0.9, min_tokens=3, bad_words=[(9,)]
    )
    wanted = texts(served(llama, NoDrafter()), params, prompts)
    for drafter in (
        EagleDrafter(random_head(), chunk=16),
        CombinedDrafter([NgramDrafter(1, 3), EagleDrafter(random_head(), chunk=16)]),
    ):
        for trees in (None, TREES):
            requests = served(llama, drafter, trees, chunk=16, max_texts=3)
            assert texts(requests, params, prompts) == wanted
            assert requests.engine.metrics.drafted > 0


def test_its_chains_keep_their_law_beside_anothers(llama) -> None:
    """Rows over the draft vocabulary and whole rows in one round's draft."""

    class Some(EagleDrafter):
        def propose(self, texts, depths, draws) -> Draft:
            first = [depth if i % 2 else 0 for i, depth in enumerate(depths)]
            return super().propose(texts, first, draws)

    both = CombinedDrafter(
        [Some(random_head()), ModelDrafter(HuggingFaceTarget(random_model("llama")))]
    )
    wanted = texts(served(llama, NoDrafter()), LAWS["coupled"])
    assert texts(served(llama, both), LAWS["coupled"]) == wanted


class Liar(ToyEagle):
    """Draws from one law and says it was another: the negative control."""

    def propose(self, texts, depths, draws) -> Draft:
        draft = super().propose(texts, depths, draws)
        if draft.law is None:
            return draft
        flat = torch.full_like(draft.law.probs, 1 / draft.law.probs.shape[1])
        return replace(draft, law=Law(flat, draft.law.ids))


@pytest.mark.parametrize("rule", ["token", pytest.param("recursive", marks=pytest.mark.slow)])
def test_a_head_that_lies_about_its_law_is_found(rule: str) -> None:
    """Heads that do not are among the drafters of test_law and test_trees."""
    trees = TreeBudget(2, 5) if rule == "recursive" else None
    engine = Engine(TappedTarget(TARGET), Liar(3, 1), Emitter(None), max_texts=500, trees=trees)
    requests = Requests(engine, depth=3, end_tokens=frozenset())
    params = [SamplingParams(seed=seed, max_tokens=LENGTH) for seed in range(1000)]
    done = requests.complete([Request(PREFIX, own, rule=rule) for own in params])
    try:
        distance = chi_square(Counter(one.token_ids for one in done), TARGET)
    except AssertionError:
        return
    assert distance > 8


def test_what_it_drafts_is_its_own_law_over_the_draft_vocabulary() -> None:
    """Read anew from nothing but the text, by plain passes of model and head."""
    head = random_head()
    target = HuggingFaceTarget(random_model("llama"))
    seen: list[tuple[list[int], list[int], torch.Tensor]] = []

    class Kept(EagleDrafter):
        def propose(self, texts, depths, draws) -> Draft:
            draft = super().propose(texts, depths, draws)
            count = int(draft.tree.counts_B[0])
            if count:
                assert draft.law is not None and draft.law.ids is not None
                assert set(draft.law.ids[0].tolist()) == set(head.tokens.tolist())
                tokens = draft.tree.tokens_BN[0, :count].tolist()
                seen.append((list(texts[0].tokens), tokens, draft.law.probs[:count]))
            return draft

    params = SamplingParams(max_tokens=30, seed=2)
    requests = served(target, Kept(head))
    request = Request(tuple(RAGGED[0]), params, rule="block")
    requests.complete([request])
    assert len(seen) > 8
    for text, drafted, probs in seen:
        h = head.fused(plain_states(target.model, torch.tensor(text[:-1])))
        lines = Lines(len(h), h.device)
        rows = torch.tensor([text[1:]])
        h = head.step(rows, h[None], torch.arange(len(text) - 1)[None], lines.attend)
        torch.testing.assert_close(
            head.logits(h[0, -1]).softmax(-1), probs[0], rtol=1e-3, atol=1e-5
        )
        assert len(drafted) <= 3


def test_a_text_given_up_or_interrupted_leaves_nothing(llama, monkeypatch) -> None:
    requests = served(llama, EagleDrafter(random_head()))
    stream = requests.stream(Request(tuple(RAGGED[0]), LAWS["greedy"]))
    next(stream)
    assert left(requests) > 0
    stream.close()
    assert left(requests) == 0
    wanted = texts(served(llama, NoDrafter()), LAWS["greedy"], RAGGED[:2])
    head = requests.engine.drafter.model.head
    own, calls = head.logits, iter(range(1000))

    def sometimes(h):
        if next(calls) % 5 == 4:
            raise MemoryError("no room for the moment")
        return own(h)

    monkeypatch.setattr(head, "logits", sometimes)
    assert texts(requests, LAWS["greedy"], RAGGED[:2]) == wanted
    assert left(requests) == 0


def test_a_beginning_held_of_an_earlier_text_is_left_out(llama) -> None:
    """Its states were never seen: the head's view begins behind it, and drafts go on."""
    long = random_tokens(140).tolist()
    wanted = texts(served(llama, NoDrafter()), LAWS["greedy"], [long])
    requests = served(llama, EagleDrafter(random_head()))
    assert texts(requests, LAWS["greedy"], [long]) == wanted
    drafted = requests.engine.metrics.drafted
    assert texts(requests, LAWS["greedy"], [long]) == wanted
    assert requests.engine.metrics.drafted > drafted > 0 and left(requests) == 0


def test_specs_and_targets_that_cannot_be_are_refused(llama) -> None:
    assert DrafterSpec.parse("eagle:runs/head") == DrafterSpec("eagle", "runs/head")
    with pytest.raises(UnsupportedModel, match="the target is a ProtocolTarget"):
        served(ProtocolTarget(markov(6, 2, seed=5)), EagleDrafter(random_head()))
    with pytest.raises(VocabularyMismatch, match="of 99 tokens, the target has 97"):
        served(llama, EagleDrafter(random_head(shape=replace(SHAPE, vocab_size=99))))
    drafter = EagleDrafter(random_head())
    with pytest.raises(InvalidConfig, match="has no target yet"):
        drafter.model  # noqa: B018
    served(llama, drafter)
    with pytest.raises(InvalidConfig, match="another target; make a drafter for each"):
        served(HuggingFaceTarget(random_model("llama")), drafter)


def test_a_folder_is_served_and_checked(tmp_path: Path) -> None:
    shape = EagleShape(4096, 40, 384, 32, 6, 2, 64, (1, 3, 5))
    head = EagleHead(shape, torch.arange(40) * 3, own_embeddings=True)
    save_head(head, tmp_path, verifier="bundled", architecture="LlamaForCausalLM")
    params = SamplingParams(max_tokens=8, temperature=0.0)
    plain = LLM.load("bundled", "none", compile=False)
    (due,) = plain.generate("import os\n", params)
    llm = LLM.load("bundled", f"eagle:{tmp_path}", compile=False)
    (done,) = llm.generate("import os\n", params)
    assert done.token_ids == due.token_ids and done.stats.drafted > 0
    assert llm.info()["drafter"] == {"name": "eagle", "trusted": False}
    with pytest.raises(ModelError, match="no folder is there; give that of a head"):
        LLM.load("bundled", f"eagle:{tmp_path / 'nowhere'}")
    save_head(head, tmp_path, verifier="some/other", architecture="Qwen3ForCausalLM")
    with pytest.raises(ModelError, match="made for 'some/other', a Qwen3ForCausalLM"):
        LLM.load("bundled", f"eagle:{tmp_path}")
