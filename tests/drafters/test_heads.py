"""Heads of every kind as drafters: plain decoding's tokens, the target's law, nothing left."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import pytest
import torch

from outrider import SamplingParams
from outrider.decoding import Draft
from outrider.decoding.laws import Law
from outrider.drafters import (
    Drafter,
    EagleDrafter,
    EarlyExitDrafter,
    MedusaDrafter,
    NoDrafter,
)
from outrider.engine import Emitter, Engine, Requests, propose_from_hidden
from outrider.errors import (
    DraftShapeMismatch,
    InvalidConfig,
    TargetShapeMismatch,
    UnsupportedModel,
)
from outrider.models.base import Rows
from outrider.models.head import Head
from outrider.models.hf import HuggingFaceTarget
from outrider.models.medusa import MedusaHeads
from outrider.models.protocol import ProtocolTarget
from outrider.models.recurrent import RecurrentTarget
from outrider.tree import TokenTree, TreeBudget
from outrider.types import Request
from tests.drafters.heads import KINDS, TOYS, ToyMedusa, drafter_of, random_head, tiny_target
from tests.drafters.serving import RAGGED, TREES, laws, served, texts
from tests.drafters.tapped import TappedTarget
from tests.drafters.test_exit_head import random_exit_head
from tests.engine.test_law import LENGTH, PREFIX, TARGET, chi_square
from tests.engine.toys import markov
from tests.models.families import one_thread, random_model, random_tokens
from tests.models.recurrent_families import random_recurrent

single = pytest.fixture(scope="module", autouse=True)(one_thread)
LAWS = laws(10)
PROMPTS = RAGGED[1:4]


@pytest.fixture(scope="module")
def targets():
    made = {strict: tiny_target(strict) for strict in (False, True)}
    return {
        strict: (
            target,
            {law: _done(served(target, NoDrafter()), own) for law, own in LAWS.items()},
        )
        for strict, target in made.items()
    }


def _done(requests: Requests, params: SamplingParams):
    params = replace(params, logprobs=2)
    return requests.complete([Request(tuple(prompt), params) for prompt in PROMPTS])


def left(drafter: Drafter) -> int:
    """Texts that something is kept of still."""
    if isinstance(drafter, MedusaDrafter):
        return len(drafter._last)
    assert isinstance(drafter, EagleDrafter)
    return drafter.model.num_open + len(drafter._texts)


ALWAYS = {("eagle", TREES, True), ("medusa", TREES, False), ("mtp of two", TREES, False)}
"""The others are marked slow."""


@pytest.mark.parametrize(
    ("kind", "trees", "strict"),
    [
        pytest.param(*case, marks=() if case in ALWAYS else pytest.mark.slow)
        for case in itertools.product(KINDS, (None, TREES), (False, True))
    ],
)
def test_greedy_and_coupled_tokens_are_plain_decodings(kind, trees, strict, targets) -> None:
    target, wanted = targets[strict]
    for law, params in LAWS.items():
        drafter = drafter_of(random_head(kind, target))
        requests = served(target, drafter, trees)
        done = _done(requests, params)
        assert [d.token_ids for d in done] == [w.token_ids for w in wanted[law]]
        if strict:
            assert [d.logprobs for d in done] == [w.logprobs for w in wanted[law]]
        assert left(drafter) == 0
        metrics = requests.engine.metrics
        assert metrics.drafted > 0 and metrics.acceptance_rate < 1


@pytest.mark.parametrize("kind", ["medusa", "mtp of two"])
def test_long_prompts_interrupts_and_given_up_texts(kind, targets, monkeypatch) -> None:
    target, _ = targets[False]
    long = random_tokens(60).tolist()
    prompts = [long, RAGGED[2], [*long[:50], 7]]
    params = SamplingParams(max_tokens=12, seed=5, repetition_penalty=1.3, top_p=0.9)
    wanted = texts(served(target, NoDrafter()), params, prompts)
    drafter = drafter_of(random_head(kind, target))
    requests = served(target, drafter, chunk=16, max_texts=2)
    assert texts(requests, params, prompts) == wanted
    assert requests.engine.metrics.drafted > 0
    stream = requests.stream(Request(tuple(RAGGED[0]), params))
    next(stream)
    assert left(drafter) > 0
    stream.close()
    assert left(drafter) == 0
    own, calls = drafter.model.score if kind != "medusa" else drafter.model.logits, iter(range(999))

    def sometimes(*args):
        if next(calls) % 5 == 4:
            raise MemoryError("no room for the moment")
        return own(*args)

    name = "logits" if kind == "medusa" else "score"
    monkeypatch.setattr(drafter.model, name, sometimes)
    assert texts(requests, params, prompts) == wanted
    assert left(drafter) == 0


@pytest.mark.parametrize("trees", [None, TREES], ids=["chains", "trees"])
def test_prompts_of_any_length_are_read_in_parts(trees, targets) -> None:
    """What a later module reads never runs out before a draft begins."""
    target, _ = targets[False]
    prompts = [random_tokens(size).tolist() for size in (8, 9, 10)]
    params = SamplingParams(max_tokens=5, temperature=0.0)
    wanted = texts(served(target, NoDrafter()), params, prompts)
    head = random_head("mtp of two", target)
    assert isinstance(head, Head)
    for chunk in (4, 64):
        requests = served(target, EagleDrafter(head.copied(), chunk=4), trees, chunk=chunk)
        assert texts(requests, params, prompts) == wanted
        assert requests.engine.metrics.drafted > 0


@pytest.mark.parametrize("kind", ["eagle", "mtp", "mtp of two", "mtp behind recurrent state"])
def test_laws_are_those_of_a_plain_reading_of_the_text(kind) -> None:
    """Chains and trees: each node's law from all rows of all modules, read anew along its path.

    The target's states are those of transformers' own forward of the same model.
    """
    if kind == "mtp behind recurrent state":
        stock = uneven(random_recurrent("qwen3_next"))
        target = RecurrentTarget(uneven(random_recurrent("qwen3_next")))
    else:
        stock, target = (
            uneven(random_model("llama")),
            HuggingFaceTarget(uneven(random_model("llama"))),
        )
    head = random_head(kind, target)
    seen: list[tuple[list[int], list[int], list[int], torch.Tensor]] = []

    class Kept(EagleDrafter):
        def propose(self, texts, depths, draws) -> Draft:
            draft = super().propose(texts, depths, draws)
            count = int(draft.tree.counts_B[0])
            if count:
                tree, law = draft.tree, draft.law
                tokens, parents = (
                    part[0, :count].tolist() for part in (tree.tokens_BN, tree.parents_BN)
                )
                rows = draft.law_rows()[0, :count]
                probs = law.select(rows).probs
                seen.append((list(texts[0].tokens), tokens, parents, probs))
            return draft

    shapes = ((None, "block"), (TREES, "recursive"))
    for trees, rule in shapes if target.scores_trees else shapes[:1]:
        drafter = Kept(head.copied())
        requests = served(target, drafter, trees)
        params = SamplingParams(max_tokens=9, seed=2)
        requests.complete([Request(tuple(RAGGED[0]), params, rule=rule)])
        own = drafter.model.head
        assert len(seen) >= 3
        for text, tokens, parents, probs in seen[1:3]:
            for node, parent in enumerate(parents):
                path: list[int] = []
                while parent:
                    path.insert(0, tokens[parent - 1])
                    parent = parents[parent - 1]
                wanted = _law_after(stock, own, text, path)
                torch.testing.assert_close(probs[node], wanted, rtol=1e-3, atol=1e-4)
        seen.clear()


def _law_after(stock, head: Head, text: list[int], path: list[int]) -> torch.Tensor:
    """What the head says after a text and some drafted tokens, by whole passes of its modules."""
    tokens = torch.tensor([*text, *path])

    def read(module: int, h: torch.Tensor) -> torch.Tensor:
        own = tokens[module + 1 : module + 1 + h.shape[1]][None]
        return head.step(own, h, torch.arange(h.shape[1])[None], causal, module)

    h = last_states(stock, text[:-1])[None]
    last = min(len(path), head.num_modules - 1)
    for module in range(last):
        h = read(module, h)
    for _ in range(len(path) - last):
        h = torch.cat((h, read(last, h)[:, -1:]), 1)
    return head.logits(read(last, h)[0, -1]).softmax(-1)


def causal(query, keys, values, options=None, layer=0) -> torch.Tensor:
    """torch's own attention of one text's rows."""
    scale = None if options is None else options.scaling
    sdpa = torch.nn.functional.scaled_dot_product_attention
    out = sdpa(query, keys, values, is_causal=True, scale=scale, enable_gqa=True)
    return out.transpose(1, 2)


class Liar(ToyMedusa):
    """Draws from one law and says it was another: the negative control."""

    def propose(self, texts, depths, draws) -> Draft:
        draft = super().propose(texts, depths, draws)
        if draft.law is None:
            return draft
        flat = torch.full_like(draft.law.probs, 1 / draft.law.probs.shape[1])
        return replace(draft, law=Law(flat, draft.law.ids))


def _samples(drafter: Drafter, rule: str) -> Counter[tuple[int, ...]]:
    trees = None if rule in ("token", "block") else TreeBudget(2, 5)
    engine = Engine(TappedTarget(TARGET), drafter, Emitter(None), max_texts=500, trees=trees)
    requests = Requests(engine, depth=3, end_tokens=frozenset())
    params = [SamplingParams(seed=seed, max_tokens=LENGTH) for seed in range(1000)]
    done = requests.complete([Request(PREFIX, own, rule=rule) for own in params])
    assert engine.metrics.drafted > 1000
    return Counter(one.token_ids for one in done)


QUICK = {("medusa", "traversal"), ("mtp of two", "token")}
CASES = [
    pytest.param(kind, rule, marks=() if (kind, rule) in QUICK else pytest.mark.slow)
    for kind in TOYS
    for rule in ("token", "block", "recursive", "traversal")
]


@pytest.mark.parametrize(("kind", "rule"), CASES)
def test_first_five_tokens_follow_the_target(kind: str, rule: str) -> None:
    assert chi_square(_samples(TOYS[kind](3, 1), rule), TARGET) < 4.5


@pytest.mark.parametrize("rule", ["token", pytest.param("traversal", marks=pytest.mark.slow)])
def test_heads_that_lie_about_their_law_are_found(rule: str) -> None:
    try:
        distance = chi_square(_samples(Liar(3, 1), rule), TARGET)
    except AssertionError:
        return
    assert distance > 8


def test_targets_that_cannot_be_are_refused(targets) -> None:
    target, _ = targets[False]
    for kind in KINDS:
        drafter = drafter_of(random_head(kind, target))
        with pytest.raises(UnsupportedModel, match="the target is a ProtocolTarget"):
            served(ProtocolTarget(markov(6, 2, seed=5)), drafter)
        served(target, drafter)
        with pytest.raises(InvalidConfig, match="another target; make a drafter for each"):
            served(targets[True][0], drafter)


@pytest.mark.parametrize("kind", [*KINDS, "early-exit"])
def test_one_head_drafts_for_two_targets(kind, targets) -> None:
    """What is attached is a copy: the head's own weights, dtype and parts stay as they were."""
    target, wanted = targets[False]
    head = random_exit_head() if kind == "early-exit" else random_head(kind, target)
    before = {name: value.clone() for name, value in head.state_dict().items()}

    def drafter() -> Drafter:
        return EarlyExitDrafter(2, head=head) if kind == "early-exit" else drafter_of(head)

    requests = served(target, drafter())
    served(HuggingFaceTarget(random_model("llama").to(torch.bfloat16)), drafter())
    done = _done(requests, LAWS["greedy"])
    assert [d.token_ids for d in done] == [w.token_ids for w in wanted["greedy"]]
    assert requests.engine.metrics.drafted > 0
    assert head.dtype == torch.float32 and not head._borrowed
    assert all(torch.equal(value, before[name]) for name, value in head.state_dict().items())


def test_levels_of_medusa_are_the_heads_in_their_order() -> None:
    """Level i is drawn from head i's law behind the state of the last token but one."""
    stock, target = uneven(random_model("llama")), HuggingFaceTarget(uneven(random_model("llama")))
    heads = random_head("medusa", target)
    assert isinstance(heads, MedusaHeads)
    seen: list[tuple[list[int], int, torch.Tensor]] = []

    class Kept(MedusaDrafter):
        def propose(self, texts, depths, draws) -> Draft:
            draft = super().propose(texts, depths, draws)
            if draft.law is not None:
                count = int(draft.tree.counts_B[0])
                probs = draft.law.select(draft.law_rows()[0, :count]).probs
                seen.append((list(texts[0].tokens), count, probs))
            return draft

    requests = served(target, Kept(heads))
    params = SamplingParams(max_tokens=9, seed=2)
    requests.complete([Request(tuple(RAGGED[0]), params, rule="block")])
    assert any(count == 3 for _, count, _ in seen)
    for text, count, probs in seen:
        state_D = last_states(stock, text[:-1])[-1]
        wanted = torch.stack([heads.heads[level](state_D) for level in range(count)]).softmax(-1)
        torch.testing.assert_close(probs, wanted, rtol=1e-3, atol=1e-4)


def uneven(model):
    """The model with a final norm that is seen: of equal weights it is lost in any norm behind."""
    weight = model.get_decoder().norm.weight
    with torch.no_grad():
        weight.uniform_(0.2, 2.0, generator=torch.Generator().manual_seed(8))
    return model


def last_states(model, tokens: list[int]) -> torch.Tensor:
    """What enters the output layer, by transformers' own forward."""
    with torch.no_grad():
        return model.get_decoder()(torch.tensor([tokens])).last_hidden_state[0]


@pytest.mark.parametrize("kind", ["eagle", "medusa"])
def test_hidden_states_alone_give_the_engines_tree(kind, targets) -> None:
    """The tree that a round would verify, no deeper than asked for."""
    target, _ = targets[False]
    head = random_head(kind, target)
    seen: list[tuple[list[int], TokenTree]] = []
    watched = drafter_of(head.copied())
    propose = watched.propose

    def noting(texts, depths, draws) -> Draft:
        draft = propose(texts, depths, draws)
        seen.append((list(texts[0].tokens), draft.tree))
        return draft

    watched.propose = noting  # type: ignore[method-assign]
    requests = served(target, watched, TREES)
    requests.complete([Request(tuple(RAGGED[0]), LAWS["greedy"], rule="greedy")])
    text, due = seen[1]
    seq = target.open(len(text))
    with target.tapping(head.taps) as taps:
        target.score(Rows((seq,), (len(text) - 1,), torch.tensor(text[:-1])))
    hidden_BSD = taps.of(seq)[None]
    target.close(seq)
    drafter = drafter_of(head.copied())
    given = torch.tensor([text[1:]])
    for depth in (3, 1):
        tree = propose_from_hidden(drafter, target, hidden_BSD, given, trees=TREES, max_depth=depth)
        if depth == 3:
            assert torch.equal(tree.tokens_BN, due.tokens_BN)
            assert torch.equal(tree.parents_BN, due.parents_BN)
        assert tree.depth <= depth
    # The text being the target's own greedy one, its last token needs no saying.
    alone = propose_from_hidden(drafter, target, hidden_BSD[:, -1:], trees=TREES, max_depth=2)
    assert int(alone.counts_B[0]) > 2 and left(drafter) == 0
    with pytest.raises(TargetShapeMismatch, match="hidden states 63 wide, and drafter"):
        propose_from_hidden(drafter, target, hidden_BSD[..., 1:], trees=TREES, max_depth=2)
    with pytest.raises(DraftShapeMismatch, match=r"shape \(1, 2\), \(1, \d+\) is due"):
        propose_from_hidden(drafter, target, hidden_BSD, given[:, :2], trees=TREES, max_depth=2)
    with pytest.raises(InvalidConfig, match="the states of 0 tokens, and each of drafter"):
        propose_from_hidden(drafter, target, hidden_BSD[:, :0], trees=TREES, max_depth=2)
    # One child of every row: the best path's first token is the tree's likeliest.
    chain = propose_from_hidden(drafter, target, hidden_BSD, given, trees=None, max_depth=3)
    assert chain.parents_BN.tolist() == [[0, 1, 2]] and chain.depth == 3
    assert chain.tokens_BN[0, 0] in due.tokens_BN[0, due.parents_BN[0] == 0]


def test_hidden_states_are_as_many_as_modules(targets) -> None:
    target, _ = targets[False]
    drafter = drafter_of(random_head("mtp of two", target))
    states_BSD = torch.randn(1, 2, 64, generator=torch.Generator().manual_seed(2))
    given = torch.tensor([[3, 5]])
    tree = propose_from_hidden(drafter, target, states_BSD, given, trees=TREES, max_depth=2)
    assert int(tree.counts_B[0]) > 2
    with pytest.raises(InvalidConfig, match=r"states of 1 tokens.*mtp's 2 modules.*at least 2"):
        propose_from_hidden(
            drafter, target, states_BSD[:, 1:], given[:, 1:], trees=TREES, max_depth=2
        )
