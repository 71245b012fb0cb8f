"""Requests that name their drafter: mixed batches in one engine, parts of a combination, off."""

from __future__ import annotations

import pytest

from outrider import SamplingParams
from outrider.drafters import (
    CombinedDrafter,
    Drafter,
    EarlyExitDrafter,
    ModelDrafter,
    NgramDrafter,
    NoDrafter,
    SuffixDrafter,
)
from outrider.engine import Emitter, Engine, Requests
from outrider.engine.choice import Choice
from outrider.errors import InvalidConfig
from outrider.models.protocol import ProtocolTarget
from outrider.tree import TreeBudget
from outrider.types import Request
from tests.drafters.test_contract import by_text
from tests.engine.toys import blurred, markov

TARGET = markov(6, 2, seed=5, zeros=0.5)
PROMPT = (2, 3, 4, 2, 3, 1, 0, 2, 3)
GREEDY = SamplingParams(max_tokens=30, temperature=0.0)
COUPLED = SamplingParams(max_tokens=30, seed=11, temperature=0.7)
ASKED: dict[str | None, set[str]] = {
    None: {"ngram", "draft"},
    "auto": {"ngram", "draft"},
    "none": set(),
    "draft": {"draft"},
    "ngram": {"ngram"},
    "suffix": {"suffix"},
    "recycle": {"recycle"},
    "suffix+draft": {"suffix", "draft"},
    "recycle+ngram": {"recycle", "ngram"},
}


def combined() -> CombinedDrafter:
    return CombinedDrafter([NgramDrafter(), ModelDrafter(ProtocolTarget(blurred(TARGET, 3, 0.2)))])


def served(drafter: Drafter, trees: TreeBudget | None = None) -> Requests:
    engine = Engine(ProtocolTarget(TARGET), drafter, Emitter(None), trees=trees)
    return Requests(engine, depth=4, end_tokens=frozenset())


def test_a_drafter_of_so_many_layers_goes_by_its_kind_too() -> None:
    own = EarlyExitDrafter(2)
    choice = Choice(CombinedDrafter([NgramDrafter(), own]))
    assert choice.of("early-exit") is choice.of("early-exit:2") is own
    with pytest.raises(InvalidConfig, match="'early-exit:3' is not loaded"):
        choice.of("early-exit:3")


@pytest.mark.parametrize("params", [GREEDY, COUPLED], ids=["greedy", "coupled"])
@pytest.mark.parametrize("trees", [None, TreeBudget(3, 12)], ids=["chains", "trees"])
def test_a_batch_of_all_kinds_gives_the_tokens_of_plain_decoding(params, trees) -> None:
    (plain,) = served(NoDrafter()).complete([Request(PROMPT, params)])
    requests = served(combined(), trees)
    for _ in range(2):
        done = requests.complete([Request(PROMPT, params, drafter=spec) for spec in ASKED])
        assert {one.token_ids for one in done} == {plain.token_ids}
        for one, able in zip(done, ASKED.values(), strict=True):
            guessed = {told.drafter for told in one.provenance} - {None}
            assert guessed <= able and bool(guessed) == bool(able)
            assert bool(one.stats.drafted) == bool(able)
    choice = requests.engine.choice
    assert choice.of("draft") is combined_part(requests, 1) is not choice.of("suffix")
    for spec in ASKED:
        assert by_text(choice.of(spec)) == []


def combined_part(requests: Requests, which: int) -> Drafter:
    own = requests.engine.drafter
    assert isinstance(own, CombinedDrafter)
    return own.drafters[which]


def test_depth_and_rule_go_with_it() -> None:
    requests = served(combined())
    how = [("suffix", 2, "match"), ("draft", 1, "token"), ("ngram", 0, None), ("none", 0, None)]
    params = SamplingParams(max_tokens=30)
    done = requests.complete(
        [Request(PROMPT, params, 0, rule, depth, spec, True) for spec, depth, rule in how]
    )
    for one, (_, depth, rule) in zip(done, how, strict=True):
        assert one.rule == (rule or "block")
        assert max(len(t.tokens) for t in one.trace or ()) == depth


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            {"drafter": "int8"},
            "'int8' is not loaded.* none, draft, grammar, ngram, recycle, suffix",
        ),
        ({"drafter": "draft:/x"}, "'draft:/x' is not loaded"),
        ({"drafter": "ngram+int8"}, "'int8' is not loaded"),
        ({"drafter": "sufix"}, "did you mean 'suffix'"),
        ({"drafter": "ngram,sufix"}, "'sufix' in .*did you mean 'suffix'"),
        (
            {"drafter": "draft,ngram"},
            "'draft,ngram': one request .* none, draft, .* as a.b, or give",
        ),
        ({"drafter": "none+ngram"}, "leave it out"),
        ({"drafter": NgramDrafter()}, "names its drafter by a spec"),
        ({"drafter": "none", "depth": 2}, "contradict"),
        ({"trace": 1}, "True or False is due"),
    ],
)
def test_what_a_request_cannot_ask(asked: dict, message: str) -> None:
    requests = served(ModelDrafter(ProtocolTarget(TARGET)))
    with pytest.raises(InvalidConfig, match=message):
        requests.check(Request(PROMPT, GREEDY, **asked))


def test_new_weights_are_told_to_each_drafter_once() -> None:
    told: list[str] = []

    class Told(SuffixDrafter):
        def target_changed(self) -> None:
            told.append("own")

    requests = served(CombinedDrafter([Told(), NgramDrafter()]))
    choice = requests.engine.choice
    for spec in ("suffix", "recycle", "recycle+suffix", "ngram"):
        choice.of(spec)
    recycle = choice.of("recycle")
    recycle.target_changed = lambda: told.append("recycle")  # type: ignore[method-assign]
    with requests.running([Request(PROMPT, COUPLED, drafter="recycle+suffix")]) as (text,):
        requests.engine.step()
        with requests.engine.without_caches():
            assert by_text(choice.of("suffix")) == []
        while not requests.engine.settled([text]):
            requests.engine.step()
    assert sorted(told) == ["own", "recycle"]
    (plain,) = served(NoDrafter()).complete([Request(PROMPT, COUPLED)])
    assert text.tokens[text.num_prompt :] == list(plain.token_ids)


@pytest.mark.parametrize(
    ("beside", "more"),
    [({}, 0), ({"drafter": "none"}, 9), ({"drafter": "ngram"}, 9), ({"rule": "coupled"}, 9)],
)
def test_a_text_s_last_token_comes_with_the_others_round(beside: dict, more: int) -> None:
    """Texts end one after another, each with a round that drafts nothing for it."""
    requests = served(ModelDrafter(ProtocolTarget(blurred(TARGET, 3, 0.6))))
    engine, forwards, steps = requests.engine, [], []
    score, step = engine.target.score, engine.step
    engine.target.score = lambda rows: (forwards.append(rows), score(rows))[1]
    engine.step = lambda: (steps.append(None), step())[1]
    asked = [
        Request(PROMPT, SamplingParams(max_tokens=most, temperature=0.0), depth=1)
        for most in (6, 9, 12, 15)
    ]
    given = beside if "drafter" in beside else {"depth": 1, **beside}
    asked += [Request(PROMPT, SamplingParams(max_tokens=9, temperature=0.0), **given)]
    done = requests.complete(asked)
    assert [len(one.token_ids) for one in done] == [6, 9, 12, 15, 9]
    assert all(one.token_ids == done[3].token_ids[: len(one.token_ids)] for one in done)
    # Who is drafted for by somebody else, or verified otherwise, has forwards of its own.
    alone = len(forwards) - len(steps)
    assert alone == 0 if not more else 4 < alone <= more


def test_who_is_to_have_one_token_is_nobody_s() -> None:
    """No look-up indexes its prompt, and no ledger counts its round, for what it cannot have."""
    drafter = NgramDrafter()
    requests, seen = served(drafter), set[int]()
    propose = drafter.propose
    drafter.propose = lambda texts, *more: (
        seen.update(text.num_prompt for text in texts),
        propose(texts, *more),
    )[1]
    asked = [
        Request(prompt, SamplingParams(max_tokens=most, temperature=0.0))
        for prompt, most in ((PROMPT, 9), (PROMPT[1:], 1), (PROMPT[2:], 5))
    ]
    requests.complete(asked)
    assert seen == {len(PROMPT), len(PROMPT) - 2}
