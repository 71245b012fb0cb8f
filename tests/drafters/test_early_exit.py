"""A target that drafts with its own first layers: plain decoding's tokens, and nothing left."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from outrider import LLM, SamplingParams
from outrider.drafters import (
    CombinedDrafter,
    DrafterSpec,
    EarlyExitDrafter,
    NgramDrafter,
    NoDrafter,
)
from outrider.engine import Requests
from outrider.errors import InvalidConfig, UnsupportedModel
from outrider.models.base import Rows
from outrider.models.bundled import eval_prompts
from outrider.models.early_exit import EarlyExit
from outrider.models.hf import HuggingFaceTarget
from outrider.models.protocol import ProtocolTarget
from outrider.types import Request
from tests.drafters.serving import RAGGED, TREES, laws, served, texts
from tests.engine.toys import markov
from tests.models.families import FAMILIES, one_thread, random_model, random_tokens

single = pytest.fixture(scope="module", autouse=True)(one_thread)
LENGTH = 64
LAWS = laws(LENGTH)


def left(requests: Requests) -> int:
    """Sequences that are open still, and rows that are drafted."""
    early = requests.engine.target
    assert isinstance(early, EarlyExit)
    return len(early.target._cache._sequences) + len(early._drafted)


def families() -> list:
    """Windows in turn and the slab by default; or all."""
    by_default = ("gemma3", "falcon")
    return [
        pytest.param(family, marks=() if family in by_default else pytest.mark.slow)
        for family in FAMILIES
    ]


@pytest.mark.parametrize("family", families())
def test_greedy_and_coupled_tokens_are_plain_decodings(family: str) -> None:
    target = HuggingFaceTarget(random_model(family))
    plain = served(target, NoDrafter())
    rates: list[float] = []
    for law, trees in (("greedy", None), ("coupled", TREES)):
        wanted = texts(plain, LAWS[law])
        requests = served(target, EarlyExitDrafter(2), trees)
        assert texts(requests, LAWS[law]) == wanted
        assert texts(requests, LAWS[law], RAGGED[2:3]) == wanted[2:3]
        assert left(requests) == 0
        rates.append(requests.engine.metrics.acceptance_rate)
    # Some guesses were right and some wrong: rows were kept, and forgotten.
    assert max(rates) > 0 and min(rates) < 1


@pytest.mark.parametrize(
    ("law", "trees"), [("coupled", None), ("greedy", TREES)], ids=["chains", "trees"]
)
def test_beside_other_drafters_and_through_long_prompts(law: str, trees) -> None:
    target = HuggingFaceTarget(random_model("llama"))
    # Longer than a chunk and than a block; two begin alike and share what they can.
    long = random_tokens(150).tolist()
    prompts = [long, RAGGED[2], [*long[:140], 7], [3, 4] * 6]
    params = replace(LAWS[law], max_tokens=24)
    wanted = texts(served(target, NoDrafter()), params, prompts)
    both = CombinedDrafter([NgramDrafter(1, 3), EarlyExitDrafter(1, chunk=16)])
    requests = served(target, both, trees, chunk=16, max_texts=3)
    assert texts(requests, params, prompts) == wanted
    assert left(requests) == 0 and requests.engine.metrics.accepted > 0


def test_verification_runs_the_remaining_layers() -> None:
    """Layer calls over a whole text: rows of the first layer are as many as of the last."""
    target = HuggingFaceTarget(random_model("llama"))
    requests = served(target, EarlyExitDrafter(2))
    passed = [0, 0, 0]

    def count(i: int):
        def hook(_, inputs) -> None:
            passed[i] += inputs[0].shape[-2]

        return hook

    hooks = [
        layer.mlp.register_forward_pre_hook(count(i))
        for i, layer in enumerate(target.model.model.layers)
    ]
    texts(requests, LAWS["greedy"], RAGGED[:1])
    for hook in hooks:
        hook.remove()
    drafted = requests.engine.metrics.drafted
    assert drafted > 20
    assert passed[0] == passed[1] == passed[2], "no row passes a layer twice"


def test_tokens_and_logprobs_are_the_same_bits_in_strict() -> None:
    prompts = [prompt[: 40 * (i + 1)] for i, prompt in enumerate(eval_prompts("code")[:2])]
    plain = LLM.load("bundled", "none", strict=True)
    for width, rate in ((1, 0.5), (3, 0.2)):
        llm = LLM.load("bundled", "early-exit:2", strict=True, width=width)
        for sampling in ({"temperature": 0.0}, {"seed": 7}):
            params = SamplingParams(max_tokens=16, logprobs=2, **sampling)
            for ours, theirs in zip(
                llm.generate(prompts, params), plain.generate(prompts, params), strict=True
            ):
                assert ours.token_ids == theirs.token_ids
                assert ours.logprobs == theirs.logprobs
        assert llm.metrics.acceptance_rate > rate
    assert llm.info()["drafter"] == {"name": "early-exit:2", "trusted": False}


def test_no_number_of_layers_means_the_best_one(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="outrider"):
        llm = LLM.load("bundled", "early-exit")
    name = llm.info()["drafter"]["name"]
    assert name in {f"early-exit:{layers}" for layers in range(1, 6)}
    assert f"{name} promises" in caplog.text
    assert llm.info()["cache"]["bytes_per_token"] == 2 * 6 * 2 * 64 * (
        2 if llm.info()["dtype"] == "bfloat16" else 4
    ), "a token takes what the target's six layers take"


def test_a_text_given_up_leaves_nothing() -> None:
    target = HuggingFaceTarget(random_model("llama"))
    requests = served(target, EarlyExitDrafter(1))
    stream = requests.stream(Request(tuple(RAGGED[0]), LAWS["greedy"]))
    next(stream)
    assert left(requests) > 0
    stream.close()
    assert left(requests) == 0


@pytest.mark.parametrize("layer", [0, 2])
def test_a_round_that_breaks_off_can_be_made_again(layer: int, monkeypatch) -> None:
    target = HuggingFaceTarget(random_model("llama"))
    wanted = texts(served(target, NoDrafter()), LAWS["greedy"], RAGGED[:2])
    requests = served(target, EarlyExitDrafter(1))
    own = target.model.model.layers[layer].mlp.forward
    calls = iter(range(1000))

    def sometimes(hidden):
        if next(calls) % 5 == 4:
            raise MemoryError("no room for the moment")
        return own(hidden)

    monkeypatch.setattr(target.model.model.layers[layer].mlp, "forward", sometimes)
    assert texts(requests, LAWS["greedy"], RAGGED[:2]) == wanted
    assert left(requests) == 0


def test_it_drafts_with_new_weights_of_the_target() -> None:
    target = HuggingFaceTarget(random_model("llama"))
    requests = served(target, EarlyExitDrafter(2))
    texts(requests, LAWS["greedy"], RAGGED[:1])
    with requests.engine.without_caches():
        target.update_weights(dict(random_model("llama", seed=7).state_dict()))
    fresh = HuggingFaceTarget(random_model("llama", seed=7))
    plain = served(fresh, NoDrafter())
    assert texts(requests, LAWS["greedy"], RAGGED[:2]) == texts(plain, LAWS["greedy"], RAGGED[:2])
    other = served(fresh, EarlyExitDrafter(2))
    ours, theirs = (one.engine.target for one in (requests, other))
    logits = []
    for early in (ours, theirs):
        assert isinstance(early, EarlyExit)
        logits.append(early.draft(Rows((early.open(4),), (3,), torch.tensor([1, 2, 3]))))
    assert torch.equal(*logits)


def test_specs_name_a_number_of_layers_or_leave_it_to_a_search() -> None:
    assert DrafterSpec.parse("early-exit") == DrafterSpec("early-exit")
    assert DrafterSpec.parse_all("suffix+early-exit:12") == (
        DrafterSpec("suffix"),
        DrafterSpec("early-exit", layers=12),
    )
    assert DrafterSpec.parse("early-exit:runs/exit") == DrafterSpec("early-exit", "runs/exit")
    for wrong in ("early-exit:", "early-exit:0", "early-exit:-1", "early-exit:²"):
        with pytest.raises(InvalidConfig, match="a number of layers is due"):
            DrafterSpec.parse(wrong)
    with pytest.raises(InvalidConfig, match="has 6 layers; give a number from 1 to 5"):
        LLM.load("bundled", "early-exit:6")


def test_who_cannot_be_drafted_for_is_refused_before_any_text() -> None:
    with pytest.raises(UnsupportedModel, match="the target is a ProtocolTarget"):
        served(ProtocolTarget(markov(6, 2, seed=5)), EarlyExitDrafter(1))
    drafter = EarlyExitDrafter(1)
    target, other = (HuggingFaceTarget(random_model("llama")) for _ in range(2))
    assert served(target, drafter).engine.target is served(target, drafter).engine.target
    with pytest.raises(InvalidConfig, match="another target; make a drafter for each"):
        served(other, drafter)
    with pytest.raises(UnsupportedModel, match="the target is a EarlyExit"):
        served(target, CombinedDrafter([EarlyExitDrafter(1), EarlyExitDrafter(2)]))
    with pytest.raises(InvalidConfig, match="layers=0"):
        EarlyExitDrafter(0)
