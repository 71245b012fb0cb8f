"""An early-exit head as a drafter: plain decoding's tokens, the target's law, and a stop."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from outrider import LLM, SamplingParams
from outrider.decoding import Draft
from outrider.drafters import CombinedDrafter, EarlyExitDrafter, NgramDrafter, NoDrafter
from outrider.errors import (
    InvalidConfig,
    ModelError,
    TargetShapeMismatch,
    UnsupportedModel,
    VocabularyMismatch,
)
from outrider.llm.options import Speculation
from outrider.models.exit_head import ExitHead, ExitShape, load_exit_head, save_exit_head
from outrider.models.hf import HuggingFaceTarget
from outrider.train.recipe import ExitRecipe
from outrider.tree import TreeBudget
from outrider.types import Request
from tests.drafters.serving import RAGGED, TREES, laws, served, texts
from tests.drafters.test_early_exit import left
from tests.engine import test_law
from tests.models.families import SHAPE, VOCAB, one_thread, random_model, with_weights

single = pytest.fixture(scope="module", autouse=True)(one_thread)
LAWS = laws(16)
PLAIN = ExitShape(VOCAB, SHAPE["hidden_size"], 2, 16)


def random_exit_head(shape: ExitShape = PLAIN, seed: int = 0) -> ExitHead:
    """A head that changes what leaves the exit, and is of two minds about it."""
    draw = torch.Generator().manual_seed(seed)
    head = ExitHead(shape)
    with torch.no_grad():
        for parameter in (head.down.weight, head.up.weight):
            parameter.normal_(0.0, 0.7 * parameter.size(1) ** -0.5, generator=draw)
        head.sure.weight.normal_(0.0, 0.2, generator=draw)
        head.sure.bias.zero_()
    return head.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def llama() -> HuggingFaceTarget:
    return HuggingFaceTarget(random_model("llama"))


class Watched(EarlyExitDrafter):
    """Notes how many tokens each text asked for got, and how sure the exit was of each."""

    def __init__(self, *given, **options) -> None:
        super().__init__(*given, **options)
        self.lengths: Counter[int] = Counter()
        self.sure: list[list[bool]] = []
        self.rounds: list[tuple[list[int], list[int], list[list[bool]]]] = []

    def propose(self, texts, depths, draws) -> Draft:
        before = len(self.sure)
        draft = super().propose(texts, depths, draws)
        counts = draft.tree.counts_B.tolist()
        self.rounds.append((list(depths), counts, self.sure[before:]))
        self.lengths.update(n for n, depth in zip(counts, depths, strict=True) if depth == 3)
        return draft

    def _is_sure(self, guess) -> list[bool]:
        self.sure.append(super()._is_sure(guess))
        return self.sure[-1]


CASES = [
    pytest.param(None, False, id="chains"),
    pytest.param(TREES, False, id="trees"),
    pytest.param(None, True, id="chains, strict"),
    pytest.param(TREES, True, id="trees, strict", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("trees", "strict"), CASES)
def test_greedy_and_coupled_tokens_are_plain_decodings(trees, strict, llama) -> None:
    target = HuggingFaceTarget(random_model("llama"), strict=True) if strict else llama
    plain = served(target, NoDrafter())
    lengths: Counter[int] = Counter()
    for params in LAWS.values():
        params = replace(params, logprobs=2)
        wanted = plain.complete([Request(tuple(prompt), params) for prompt in RAGGED])
        drafter = Watched(2, head=random_exit_head(), exit_threshold=0.5)
        requests = served(target, drafter, trees)
        done = requests.complete([Request(tuple(prompt), params) for prompt in RAGGED])
        assert [d.token_ids for d in done] == [w.token_ids for w in wanted]
        if strict:
            assert [d.logprobs for d in done] == [w.logprobs for w in wanted], "equal bit for bit"
        assert left(requests) == 0
        lengths += drafter.lengths
    # Some chains were stopped at once, some later, and some never.
    assert len(lengths) >= 3 if trees is None else 1 <= min(lengths) <= 3 < max(lengths)


def test_beside_other_drafters(llama) -> None:
    prompts = [[3, 4] * 6, RAGGED[0]]
    params = SamplingParams(max_tokens=24, seed=5, repetition_penalty=1.1, top_p=0.9)
    wanted = texts(served(llama, NoDrafter()), params, prompts)
    exit_drafter = EarlyExitDrafter(2, head=random_exit_head(), exit_threshold=0.5)
    requests = served(llama, CombinedDrafter([NgramDrafter(1, 3), exit_drafter]))
    assert texts(requests, params, prompts) == wanted and left(requests) == 0


@pytest.mark.parametrize("head", [None, random_exit_head()], ids=["bare", "head"])
def test_drafting_stops_behind_the_token_of_low_confidence(head, llama) -> None:
    """What triggered the stop is kept; thresholds that are never or always met are the limits."""
    for threshold, due in ((0.0, {3}), (1.0, {1})):
        drafter = Watched(2, head=head, exit_threshold=threshold)
        texts(served(llama, drafter), LAWS["coupled"])
        assert set(drafter.lengths) == due
    drafter = Watched(2, head=head, exit_threshold=0.1 if head is None else 0.5)
    texts(served(llama, drafter), LAWS["coupled"], RAGGED[:1])
    assert len(drafter.lengths) > 1
    for (depth,), (length,), sure in drafter.rounds:
        assert [len(each) for each in sure] == [1] * length, "a pass for each token"
        assert all(each == [True] for each in sure[:-1])
        assert length == depth or sure[-1] == [False]


def test_verification_runs_the_remaining_layers(llama) -> None:
    """Also of chains that were stopped: no row passes a layer twice, none is left out."""
    passed = [0, 0, 0]

    def count(i: int):
        def hook(_, inputs) -> None:
            passed[i] += inputs[0].shape[-2]

        return hook

    drafter = Watched(2, head=random_exit_head(), exit_threshold=0.5)
    requests = served(llama, drafter)
    layers = llama.model.model.layers
    hooks = [layer.mlp.register_forward_pre_hook(count(i)) for i, layer in enumerate(layers)]
    texts(requests, LAWS["greedy"], RAGGED[:1])
    for hook in hooks:
        hook.remove()
    assert requests.engine.metrics.drafted > 10 and len(drafter.lengths) > 1
    assert passed[0] == passed[1] == passed[2]


class OfThree:
    """A Llama of which three tokens may come, and the law of what it writes."""

    vocab_size = 3

    def __init__(self) -> None:
        self.model = with_weights(LlamaConfig(**SHAPE), seed=5)
        self._laws: dict[tuple[int, ...], list[float]] = {}

    def law(self, prefix) -> list[float]:
        key = tuple(prefix)
        if key not in self._laws:
            with torch.no_grad():
                row = self.model(torch.tensor([key])).logits[0, -1, :3]
            self._laws[key] = row.double().softmax(-1).tolist()
        return self._laws[key]


class Fickle(Watched):
    """Stops behind every other text: a function of what was drawn before, not of the head."""

    def _is_sure(self, guess) -> list[bool]:
        told = (1000 * self._target.confidence(guess)).long() % 2 == 0
        self.sure.append(told.tolist())
        return self.sure[-1]


class Drops(EarlyExitDrafter):
    """Leaves out a last token that is not the likeliest: the stop that is not lossless."""

    def propose(self, texts, depths, draws) -> Draft:
        draft = super().propose(texts, depths, draws)
        tokens_BK, counts_B = draft.tree.tokens_BN, draft.tree.counts_B
        if draft.law is None or tokens_BK.shape[1] == 0:
            return draft
        probs_BKV = draft.law.probs.view(*tokens_BK.shape, -1)
        last_B = (counts_B - 1).clamp(min=0)
        rows = torch.arange(len(counts_B))
        best_B = probs_BKV[rows, last_B].argmax(-1) == tokens_BK[rows, last_B]
        counts_B = torch.where(best_B, counts_B, last_B)
        return Draft.chain(tokens_BK, counts_B, draft.law)


def another_mind() -> ExitHead:
    """A head that guesses quite another law than the target's."""
    head = random_exit_head()
    head.up.weight.mul_(10.0)
    return head


def of_two_minds() -> ExitHead:
    """One of `another_mind`, with the trainer's threshold amid its confidences."""
    threshold = ExitRecipe().exit_threshold
    head = ExitHead(replace(PLAIN, exit_threshold=threshold))
    head.load_state_dict(another_mind().state_dict())
    with torch.no_grad():
        head.sure.bias.fill_(math.log(threshold / (1 - threshold)))
    return head.eval().requires_grad_(False)


def distance(drafter: EarlyExitDrafter, rule: str, count: int, trees=None) -> float:
    """Of the first tokens from their law, in standard deviations."""
    of_three = OfThree()
    target = HuggingFaceTarget(of_three.model, share_prefixes=False)
    requests = served(target, drafter, trees, max_texts=400)
    params = [
        SamplingParams(seed=seed, max_tokens=test_law.LENGTH, allowed_token_ids=(0, 1, 2))
        for seed in range(count)
    ]
    done = requests.complete([Request(test_law.PREFIX, own, rule=rule) for own in params])
    counts = Counter(one.token_ids for one in done)
    return test_law.chi_square(counts, of_three)  # type: ignore[arg-type]


def slow(rule: str, trees: TreeBudget | None = None):
    return pytest.param(rule, trees, marks=pytest.mark.slow)


PAIRS = TreeBudget(2, 5)
RULES = [
    ("token", None), slow("block"), slow("match"),
    ("recursive", PAIRS), slow("traversal", PAIRS), slow("hybrid-traversal", PAIRS),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "trees"), RULES)
def test_texts_follow_the_target_whatever_stops_the_drafts(rule: str, trees, monkeypatch) -> None:
    monkeypatch.setattr(test_law, "LENGTH", 3)
    drafter = Fickle(2, head=another_mind())
    assert distance(drafter, rule, 400, trees) < 4.5
    decided = {sure for round_ in drafter.sure for sure in round_}
    assert decided == {True, False}, "some were stopped and some were not"


@pytest.mark.parametrize(
    ("rule", "trees"), [("token", None), slow("block"), slow("traversal", PAIRS)]
)
def test_texts_follow_the_target_at_the_threshold_that_heads_are_written_with(
    rule: str, trees, monkeypatch
) -> None:
    """The stop as it is served: the head's own confidence against the trainer's own threshold."""
    monkeypatch.setattr(test_law, "LENGTH", 3)
    drafter = Watched(2, head=of_two_minds())
    assert drafter.exit_threshold == ExitRecipe().exit_threshold > 0
    assert distance(drafter, rule, 400, trees) < 4.5
    decided = Counter(sure for round_ in drafter.sure for sure in round_)
    assert min(decided[True], decided[False]) > 0.05 * decided.total()


def test_a_stop_that_drops_its_token_is_found(monkeypatch) -> None:
    monkeypatch.setattr(test_law, "LENGTH", 2)
    assert distance(Drops(2, head=another_mind()), "token", 1500) > 8


def test_a_folder_is_served_and_checked(tmp_path: Path) -> None:
    head = random_exit_head(ExitShape(4096, 384, 2, 8, exit_threshold=0.25))
    save_exit_head(
        head, tmp_path, verifier="bundled", architecture="LlamaForCausalLM", dtype=torch.float32
    )
    again = load_exit_head(tmp_path)
    assert again.shape == head.shape
    for name, value in head.state_dict().items():
        assert torch.equal(value, again.state_dict()[name])
    params = SamplingParams(max_tokens=8, temperature=0.0)
    llm = LLM.load("bundled", f"early-exit:{tmp_path}")
    (due,) = llm.generate("import os\n", params, depth=0)
    assert llm.generate("import os\n", params)[0].token_ids == due.token_ids
    assert llm.info()["drafter"] == {"name": "early-exit", "trusted": False}
    drafter = llm.drafter
    assert isinstance(drafter, EarlyExitDrafter) and drafter.exit_threshold == 0.25
    llm = LLM.load("bundled", f"early-exit:{tmp_path}", exit_threshold=1.0)
    (done,) = llm.generate("import os\n", params)
    assert done.token_ids == due.token_ids and done.stats.drafted == done.stats.rounds > 0


def test_what_does_not_fit_is_refused_before_any_forward(tmp_path: Path, llama) -> None:
    def saved(shape: ExitShape = PLAIN, architecture: str = "LlamaForCausalLM") -> Path:
        save_exit_head(
            random_exit_head(shape), tmp_path, verifier="some/other", architecture=architecture
        )
        return tmp_path

    for shape, error, says in (
        (replace(PLAIN, vocab_size=99), VocabularyMismatch, "of 99 tokens, the target has 97"),
        (replace(PLAIN, hidden_size=32), TargetShapeMismatch, "of width 32, those of the target"),
        (replace(PLAIN, layers=3), TargetShapeMismatch, "behind layer 3, the target has 3 layers"),
        (
            replace(PLAIN, depth=6),
            TargetShapeMismatch,
            "for a target of 6 layers, and this one has 3",
        ),
    ):
        with pytest.raises(error, match=says):
            load_exit_head(saved(shape), llama)
        with pytest.raises(error, match=says):
            served(llama, EarlyExitDrafter(shape.layers, head=random_exit_head(shape)))
    with pytest.raises(ModelError, match="made for 'some/other', a Qwen3ForCausalLM"):
        load_exit_head(saved(architecture="Qwen3ForCausalLM"), llama)
    assert load_exit_head(saved(replace(PLAIN, depth=3)), llama).shape.depth == 3
    config = json.loads((saved() / "config.json").read_text())
    for verifier, says in (
        ("x", "says of its target 'x', where an object"),
        (["a"], r"says of its target \['a'\], where an object"),
        ({"architectures": "LlamaForCausalLMX"}, "architectures='LlamaForCausalLMX', where a list"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**config, "verifier": verifier}))
        with pytest.raises(ModelError, match=says):
            load_exit_head(tmp_path, llama)
    for change, error, says in (
        (
            {"rank": 8},
            ModelError,
            r"down.weight in .* has shape \(16, 64\), and",
        ),
        ({"rank": "x"}, ModelError, "is none of an early-exit head"),
        ({"depth": 2}, ModelError, "is none of an early-exit head"),
        ({"version": 9}, UnsupportedModel, "is of version 9, and 1 is read here"),
        ({"outrider_head": "other"}, ModelError, "holds no early-exit head"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(error, match=says):
            load_exit_head(tmp_path)
    (saved() / "model.safetensors").write_bytes(b"no")
    with pytest.raises(ModelError, match=r"the weights in .* cannot be read"):
        load_exit_head(tmp_path)


def test_options_that_cannot_be_meant_are_refused() -> None:
    with pytest.raises(InvalidConfig, match=r"layers=1 with a head that reads behind layer 2"):
        EarlyExitDrafter(1, head=random_exit_head())
    with pytest.raises(InvalidConfig, match="exit_threshold"):
        EarlyExitDrafter(1, exit_threshold=1.5)
    with pytest.raises(InvalidConfig, match=r"exit_threshold=0.5 is for the drafters early-exit"):
        LLM.load("bundled", "ngram", exit_threshold=0.5)
    with pytest.raises(InvalidConfig, match=r"not for 'eagle:/x/early-exit-head'; leave one out"):
        Speculation("eagle:/x/early-exit-head", exit_threshold=0.5)
    for spec in ("early-exit", "ngram+early-exit:2", "auto,early-exit:/x/head"):
        assert Speculation(spec, exit_threshold=0.5).exit_threshold == 0.5
    with pytest.raises(ModelError, match="no folder is there; give that of a head, or a number"):
        LLM.load("bundled", "early-exit:nowhere")
