"""Each row's controls see the text and the drafted tokens before it, and nothing else."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from outrider import SamplingParams
from outrider.engine.controls import Controls
from outrider.engine.places import Places
from outrider.sequence import Sequence
from outrider.tree import TokenTree
from outrider.types import Request
from tests.engine.control_rows import (
    AHEAD,
    COMBINATIONS,
    EACH,
    END,
    GRAMMARS,
    GUIDED,
    VOCAB,
    law_after,
    row_after,
)

CASES = [*EACH.values(), *COMBINATIONS, *GUIDED.values()]
IDS = [*EACH, *(f"combination{i}" for i in range(len(COMBINATIONS))), *GUIDED]


def text_of(prompt: list[int], output: list[int], given: dict[str, Any], key: int = 0) -> Sequence:
    params = SamplingParams(**given)
    grammar = GRAMMARS.compiled(params)
    return Sequence(
        key=key,
        request=Request(tuple(prompt), params, grammar=grammar),
        seed=1,
        rule="block",
        depth=4,
        max_tokens=50,
        end_tokens=frozenset({END}),
        tokens=[*prompt, *output],
        guide=grammar and grammar.guide(len(prompt), ()),
    )


def tokens(chance: random.Random, count: int) -> list[int]:
    """Few different ones, so that they come again."""
    return [chance.choice((0, 1, 2, 4, 8)) for _ in range(count)]


def random_tree(chance: random.Random, num: int, *, chain: bool) -> tuple[list[int], list[int]]:
    parents = list(range(num)) if chain else [chance.randint(0, j) for j in range(num)]
    return tokens(chance, num), parents


def logits(rows: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


@pytest.mark.parametrize("given", CASES, ids=IDS)
@pytest.mark.parametrize("chain", [True, False], ids=["chains", "trees"])
def test_every_row_is_that_of_its_own_prefix(given: dict[str, Any], chain: bool) -> None:
    """Over some rounds of three texts, one of which has no controls, as the texts grow."""
    chance = random.Random(repr(given)[:40] + str(chain))
    own = [given, {}, given]
    texts = [
        text_of(tokens(chance, chance.randint(2, 9)), tokens(chance, chance.randint(0, 4)), one)
        for one in own
    ]
    for step in range(4):
        controls = Controls(texts)  # Groups are made anew; counts stay with the texts.
        trees = [random_tree(chance, chance.randint(0, 5), chain=chain) for _ in texts]
        places = Places.of(TokenTree.of(*map(list, zip(*trees, strict=True))))
        rows = logits(len(places.owners), step)
        adjusted = controls.adjusted(rows, places)
        laws = controls.probs(adjusted, places.owners)
        for at, (owner, path) in enumerate(zip(places.owners, places.paths, strict=True)):
            text = texts[owner]
            prompt, output = text.request.prompt, [*text.tokens[text.num_prompt :], *path]
            wanted = row_after(rows[at], prompt, output, own[owner])
            torch.testing.assert_close(adjusted[at], wanted, rtol=1e-6, atol=1e-6)
            if wanted.isfinite().any():
                law = law_after(rows[at], prompt, output, own[owner])
                torch.testing.assert_close(laws[at], law, rtol=0, atol=1e-6)
        for text in texts:
            text.tokens += tokens(chance, chance.randint(1, 4))


@pytest.mark.parametrize(
    "own",
    [
        ({"logit_bias": {0: 2.0}}, {"logit_bias": {0: -1.0, 5: 1.0}}),
        ({"repetition_penalty": 1.7}, {"repetition_penalty": 1.2, "presence_penalty": 0.5}),
        ({"allowed_token_ids": [1, 2]}, {"allowed_token_ids": [4, 5, 6]}),
    ],
)
def test_neighbours_keep_their_own_settings(own: tuple[dict[str, Any], ...]) -> None:
    """What is applied together is what is alike."""
    prompt, output = [1, 2, 8], [4, 2]
    texts = [text_of(prompt, output, given) for given in own]
    places = Places.of(TokenTree.of([[6, 0]] * 2, [[0, 1]] * 2))
    rows = logits(6, 2)
    adjusted = Controls(texts).adjusted(rows, places)
    for at, (owner, path) in enumerate(zip(places.owners, places.paths, strict=True)):
        wanted = row_after(rows[at], prompt, [*output, *path], own[owner])
        torch.testing.assert_close(adjusted[at], wanted, rtol=1e-6, atol=1e-6)


def test_the_rows_of_a_tree_know_their_paths() -> None:
    tree = TokenTree.of([[5, 6, 7, 8], [], [9]], [[0, 1, 0, 3], [], [0]])
    places = Places.of(tree)
    assert places.owners == [0, 0, 0, 0, 0, 1, 2, 2]
    assert [*places.paths] == [(), (5,), (5, 6), (7,), (7, 8), (), (), (9,)]
    assert [*places.runs()] == [(0, slice(0, 5)), (1, slice(5, 6)), (2, slice(6, 8))]


@pytest.mark.parametrize("name", AHEAD)
def test_a_control_of_the_text_alone_is_found(name: str) -> None:
    """The negative control: the same comparison fails where paths are forgotten."""
    output, path = [4, 2, 0], [6, 0, 1]
    texts = [text_of([1, 2, 8, 4], output, EACH[name])]
    rows = logits(4, 3)
    blind = Places([0] * 4, [()] * 4)
    seeing = Places.of(TokenTree.of([path], [[0, 1, 2]]))
    wrong, right = (Controls(texts).adjusted(rows, places) for places in (blind, seeing))
    torch.testing.assert_close(wrong[0], right[0], rtol=0, atol=0)
    ends = range(1, 4)
    wanted = [row_after(rows[i], [1, 2, 8, 4], output + path[:i], EACH[name]) for i in ends]
    assert all(torch.allclose(right[i], wanted[i - 1]) for i in ends)
    assert not all(torch.allclose(wrong[i], wanted[i - 1]) for i in ends)


@pytest.mark.parametrize("name", ["allowed_token_ids", "logit_bias", "typical_p", "min_p"])
def test_a_control_left_out_is_found(name: str) -> None:
    rows = logits(1, 6)
    controls = Controls([text_of([1, 2], [], {})])
    law = controls.probs(controls.adjusted(rows, Places([0], [()])), [0])
    assert not torch.allclose(law[0], law_after(rows[0], [1, 2], [], EACH[name]))


def test_a_grammar_of_the_text_alone_is_found() -> None:
    """The negative control of grammars: a row that knows the text, and not its path."""
    given, output, path = GUIDED["regex"], [4, 2, 0], [5, 0, 6]
    rows, right = logits(4, 3), Places.of(TokenTree.of([path], [[0, 1, 2]]))
    found = [
        Controls([text_of([1, 2], output, given)]).adjusted(rows, places)
        for places in (right, Places([0] * 4, [()] * 4))
    ]
    wanted = [row_after(rows[i], [1, 2], output + path[:i], given) for i in range(4)]
    assert [torch.equal(found[0][i], wanted[i]) for i in range(4)] == [True] * 4
    assert [torch.equal(found[1][i], wanted[i]) for i in range(4)] == [True, False, False, False]


def test_presence_and_frequency_do_not_count_the_prompt() -> None:
    rows = logits(1, 6)
    for name in ("presence_penalty", "frequency_penalty"):
        controls = Controls([text_of([1, 2, 2], [], EACH[name])])
        assert torch.equal(controls.adjusted(rows, Places([0], [()])), rows)
        row = row_after(rows[0], [], [1, 2, 2], EACH[name])
        assert not torch.allclose(row, rows[0])


def test_another_order_is_found() -> None:
    """A bias before the repetition penalty is not one after it."""
    given = {"logit_bias": {1: 3.0}, "repetition_penalty": 1.8}
    rows = logits(1, 8)
    controls = Controls([text_of([1, 2], [], given)])
    row = controls.adjusted(rows, Places([0], [()]))[0]
    torch.testing.assert_close(row, row_after(rows[0], [1, 2], [], given))
    penalised = row_after(rows[0], [1, 2], [], {"repetition_penalty": 1.8})
    assert not torch.allclose(row, row_after(penalised, [1, 2], [], {"logit_bias": {1: 3.0}}))


def test_texts_without_such_controls_cost_nothing() -> None:
    plain = {"temperature": 0.7, "top_k": 3, "typical_p": 0.9}
    texts = [text_of([1], [2], plain), text_of([1], [2, 0, 4, 1], {"min_tokens": 4})]
    controls, rows = Controls(texts), logits(2, 1)
    assert not controls.act
    assert controls.adjusted(rows, Places([0, 1], [(), ()])) is rows
    early = Controls([text_of([1], [2, 0], {"min_tokens": 4})])
    assert early.act


def test_counts_are_kept_and_not_made_anew() -> None:
    """O(new tokens): a text is read once, also when its group changes."""

    class Watched(list):
        read = 0

        def __getitem__(self, at):
            found = super().__getitem__(at)
            self.read += len(found) if isinstance(at, slice) else 1
            return found

    given = {"repetition_penalty": 1.5, "no_repeat_ngram": 3, "logits_processors": (parity_of,)}
    text = text_of(list(range(VOCAB)) * 40, [], given)
    text.tokens = Watched(text.tokens)
    Controls([text]).adjusted(logits(1, 0), Places([0], [()]))
    assert text.tokens.read >= 40 * VOCAB
    for token in (3, 1, 4):
        text.tokens.append(token)
        text.tokens.read = 0
        Controls([text]).adjusted(logits(1, 0), Places([0], [()]))
        assert text.tokens.read < 20


def parity_of(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return scores * (1 + input_ids.shape[1] % 2)


def test_an_interrupted_count_is_made_anew() -> None:
    given = EACH["frequency_penalty"]
    text, rows, places = text_of([1, 2], [4, 4], given), logits(1, 0), Places([0], [()])
    Controls([text]).adjusted(rows, places)

    class Breaks(list):
        def __getitem__(self, at):
            if at == len(self) - 1:
                raise KeyboardInterrupt
            return super().__getitem__(at)

    text.tokens = Breaks([1, 2, 4, 4, 4, 0])
    with pytest.raises(KeyboardInterrupt):
        Controls([text]).adjusted(rows, places)
    text.tokens = list(text.tokens)
    row = Controls([text]).adjusted(rows, places)[0]
    torch.testing.assert_close(row, row_after(rows[0], [1, 2], [4, 4, 4, 0], given))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_rows_are_worked_on_in_float32_at_least(dtype: torch.dtype) -> None:
    rows = logits(2, 5).to(dtype)
    texts = [text_of([1, 2], [4], EACH["repetition_penalty"]), text_of([1], [], {})]
    adjusted = Controls(texts).adjusted(rows, Places([0, 1], [(), ()]))
    assert adjusted.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.equal(adjusted[1], rows[1].to(adjusted.dtype))
    wanted = row_after(rows[0].to(adjusted.dtype), [1, 2], [4], EACH["repetition_penalty"])
    assert torch.equal(adjusted[0], wanted)


@pytest.mark.parametrize("given", CASES, ids=IDS)
def test_a_row_has_the_same_bits_alone_and_among_others(given: dict[str, Any]) -> None:
    """What strict decoding rests on: the width of a round changes nothing."""
    path = [0, 4, 1, 2]
    rows = logits(5, 11)
    text = text_of([1, 2, 8], [4, 0], given)
    together = Controls([text]).adjusted(rows, Places.of(TokenTree.of([path], [[0, 1, 2, 3]])))
    for i in range(5):
        alone = text_of([1, 2, 8], [4, 0, *path[:i]], given)
        row = Controls([alone]).adjusted(rows[i : i + 1], Places([0], [()]))[0]
        assert torch.equal(row, together[i])
