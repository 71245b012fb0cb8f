"""Grammars in the engine: masks of every path, equal tokens, and the law of plain decoding."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import regex
import torch
from llguidance import LLMatcher, LLTokenizer

from outrider import SamplingParams, SpeculativeDecoder, SpeculativeDecoderConfig
from outrider.decoding import RULES
from outrider.drafters import CombinedDrafter, Drafter, GrammarDrafter, ModelDrafter, NgramDrafter
from outrider.drafters.none import NoDrafter
from outrider.engine import Emitter, Engine, Requests
from outrider.engine.settings import tree_budget
from outrider.errors import InvalidConfig, ModelError, NonFinite
from outrider.models.bundled import bundled_path
from outrider.models.grammar import Grammars, MatcherGuide
from outrider.models.protocol import ProtocolTarget
from outrider.models.tabular import MarkovModel
from outrider.models.text import TextTokenizer
from outrider.types import Request
from tests.engine.control_laws import blind, fit
from tests.engine.control_rows import END, GRAMMARS, PAIRS, SPELLED, VOCAB, may_come
from tests.engine.test_controls import DRAFT, TARGET, logits_after

FORCING = "(abcd){1,2}|x(za|zb)c*"
"""Mostly one way to go on."""
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 9},
        "sizes": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
        "kind": {"enum": ["file", "folder", "né ☃"]},
    },
    "required": ["name", "sizes", "kind"],
    "additionalProperties": False,
}
STATEMENTS = r"""start: stmt+
stmt: "if " NAME ":\n    " expr "\n" | "return " expr "\n"
expr: NAME "(" (expr ("," expr)*)? ")" | NAME
NAME: /[a-z_]{1,8}/
"""
ASKED = {
    "statements": SamplingParams(grammar=STATEMENTS),
    "json_schema": SamplingParams(json_schema=SCHEMA),
    "regex": SamplingParams(regex=r"(\w+ )*[a-f]{2,5}(☃|é)?"),
    "grammar": SamplingParams(grammar='start: "[" (start ("," start)*)? "]" | /[a-z]+/'),
    "choice": SamplingParams(choice=["approved", "approved by all", "rejected"]),
}


@pytest.fixture(scope="module")
def bundled() -> tuple[Grammars, LLTokenizer]:
    tokenizer = TextTokenizer(bundled_path("target"))
    return Grammars.of(tokenizer, 4096), LLTokenizer(tokenizer.serialised(), eos_token=[0])


def flags(bits: np.ndarray) -> np.ndarray:
    return np.unpackbits(bits, axis=-1, bitorder="little")[..., :4096].astype(bool)


def due_after(start: LLMatcher, output: list[int]) -> np.ndarray | None:
    """The mask after an output read from its beginning; None where it is no such text."""
    matcher = start.deep_copy()
    while output and output[-1] == 0 and len(output) > 1 and output[-2] == 0:
        output = output[:-1]
    over = bool(output) and output[-1] == 0
    if matcher.try_consume_tokens(output[:-1] if over else output) < len(output) - over:
        return None
    if over:
        return np.arange(4096) == 0 if matcher.is_accepting() else None
    return flags(np.frombuffer(matcher.compute_bitmask(), np.uint8))


@pytest.mark.parametrize("name", ASKED)
def test_every_mask_is_that_of_its_own_prefix(name: str, bundled) -> None:
    """Random texts and trees with branches the grammar forbids, rows in any order, twice."""
    chance = random.Random(name)
    grammar = bundled[0].compiled(ASKED[name])
    seen = Counter[str]()
    for _ in range(5):
        guide, text = grammar.guide(3, ()), [7, 0, 7]
        for _ in range(14):
            guide.follow(text)
            paths: list[list[int]] = [[]]
            for _ in range(6):
                path = chance.choice(paths)
                may = due_after(grammar.matcher(), text[3:] + path)
                legal = may is not None and chance.random() < 0.7
                token = int(chance.choice(np.flatnonzero(may))) if legal else chance.randrange(4096)
                paths.append([*path, token])
            chance.shuffle(paths)
            for _ in range(2):
                masks = flags(guide.allowed(paths))
                for mask, path in zip(masks, paths, strict=True):
                    wanted = due_after(grammar.matcher(), text[3:] + path)
                    seen["illegal" if wanted is None else "legal"] += 1
                    assert np.array_equal(mask, np.ones(4096) if wanted is None else wanted)
            may = np.flatnonzero(due_after(grammar.matcher(), text[3:]))
            assert guide.forced(1) == (may.tolist() if len(may) == 1 else [])
            text += [int(chance.choice(may))]
    assert min(seen.values()) > 30 and len(seen) == 2


def test_branches_of_equal_length_keep_their_own_masks(bundled) -> None:
    """llguidance 1.9.1, rolled back from the first of these, takes the second for it."""
    grammar, tokens = bundled[0].compiled(ASKED["statements"]), bundled[1]
    paths = [
        [token for part in parts for token in tokens.tokenize_str(part)]
        for parts in (("i", "f", " alias"), ("return", " files"))
    ]
    guide = grammar.guide(0, ())
    guide.follow([])
    for mask, path in zip(flags(guide.allowed(paths)), paths, strict=True):
        assert np.array_equal(mask, due_after(grammar.matcher(), path))


def test_a_guide_broken_off_anywhere_starts_anew(bundled, monkeypatch) -> None:
    grammar, tokens = bundled[0].compiled(ASKED["json_schema"]), bundled[1]
    text = tokens.tokenize_str('{"name": "abc", "sizes": [1, 2')
    go = MatcherGuide._go

    def breaks(self, matcher, path):
        go(self, matcher, path)
        raise KeyboardInterrupt

    guide = grammar.guide(0, ())
    guide.follow(text[:4])
    guide.allowed([text[4:6]])
    for follow in (lambda: guide.follow(text), lambda: guide.allowed([text[:1]])):
        with monkeypatch.context() as patch:
            patch.setattr(MatcherGuide, "_go", breaks)
            with pytest.raises(KeyboardInterrupt):
                follow()
        guide.follow(text)
        assert np.array_equal(flags(guide.allowed([[]]))[0], due_after(grammar.matcher(), text))


def test_a_text_is_read_once(bundled) -> None:
    class Watched(list):
        read = 0

        def __getitem__(self, at):
            found = super().__getitem__(at)
            self.read += len(found) if isinstance(at, slice) else 1
            return found

    guide = bundled[0].compiled(SamplingParams(regex="(ab|c)*")).guide(2, ())
    text = Watched([5, 6, *bundled[1].tokenize_str("ab" * 200)])
    guide.follow(text)
    for _ in range(3):
        text.append(bundled[1].tokenize_str("ab")[0])
        text.read = 0
        guide.follow(text)
        guide.follow(text)
        assert text.read < 5


def drafter(name: str) -> Drafter:
    if name == "model":
        return ModelDrafter(ProtocolTarget(DRAFT))
    if name == "grammar+model":
        return CombinedDrafter([GrammarDrafter(), drafter("model")])
    return {"ngram": lambda: NgramDrafter(1, 2), "grammar": GrammarDrafter, "none": NoDrafter}[
        name
    ]()


def request(prompt: list[int], rule: str | None = None, **given: Any) -> Request:
    params = SamplingParams(**given)
    return Request(tuple(prompt), params, rule=rule, grammar=GRAMMARS.compiled(params))


def served(draft: str, width: int = 1, target: MarkovModel = TARGET) -> Requests:
    engine = Engine(
        ProtocolTarget(target), drafter(draft), Emitter(None), trees=tree_budget(3, width)
    )
    return Requests(engine, depth=3, end_tokens=frozenset({END}))


MIXED = (
    {"regex": PAIRS},
    {},
    {"regex": FORCING},
    {"presence_penalty": 1.0},
    {"choice": ["abcd", "abxy", "dex"]},
    {"regex": PAIRS, "repetition_penalty": 1.4, "min_tokens": 3, "bad_words": [[0], [1, 2]]},
)


def mixed(law: dict[str, Any], num: int = 8) -> list[Request]:
    """Texts with grammars beside texts without."""
    kinds = [MIXED[i % len(MIXED)] for i in range(num)]
    return [
        request([8, i % 5, 4], **{"max_tokens": 11, **kind, **law}) for i, kind in enumerate(kinds)
    ]


@pytest.mark.parametrize("law", [{"temperature": 0}, {"seed": 5, "temperature": 1.3}])
@pytest.mark.parametrize("draft", ["model", "ngram", "grammar", "grammar+model"])
@pytest.mark.parametrize("width", [1, 3])
def test_mixed_batches_have_the_tokens_of_plain_decoding(law, draft: str, width: int) -> None:
    told = {"logprobs": 2, "logprobs_mode": "processed"} | law
    plain = served("none").complete(mixed(told))
    requests = served(draft, width)
    for ours, theirs in zip(requests.complete(mixed(told)), plain, strict=True):
        assert (ours.token_ids, ours.finish_reason) == (theirs.token_ids, theirs.finish_reason)
        for one, other in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-6)
            assert [t for t, _ in one.top] == [t for t, _ in other.top]
    assert requests.engine.metrics.accepted > 0


def spelled(tokens: tuple[int, ...]) -> str:
    return b"".join(SPELLED[token] for token in tokens if token != END).decode()


@pytest.mark.parametrize("rule", [name for name in RULES if name != "greedy"])
def test_the_texts_are_those_of_the_grammar(rule: str) -> None:
    """Under every rule, on trees where it takes trees."""
    asked = mixed({"seed": 8, "rule": rule}, 24)
    requests = served("grammar+model", 3 if RULES[rule].trees else 1)
    for one, done in zip(asked, requests.complete(asked), strict=True):
        if one.sampling.grammar_source is not None:
            cut, text = done.finish_reason == "length", spelled(done.token_ids)
            assert regex.fullmatch(one.sampling.grammar_source[1], text, partial=cut), text
    assert requests.engine.metrics.accepted > 0


def test_rows_blind_to_their_path_give_other_tokens() -> None:
    """The negative control of the equality above."""
    asked = mixed({"seed": 5, "temperature": 1.3})
    plain = [one.token_ids for one in served("none").complete(asked)]
    found: list[tuple[int, ...]] | None = None
    with blind():
        assert [one.token_ids for one in served("none").complete(asked)] == plain
        with suppress(ModelError):  # A text may leave its grammar, which is told.
            found = [one.token_ids for one in served("model").complete(asked)]
    assert found != plain


def law_of(output: tuple[int, ...]) -> list[float]:
    """The slow reference of one row: the target's, what may not come left out."""
    left_out = sorted(set(range(VOCAB)) - set(may_come(PAIRS, output)))
    row = logits_after([1, 2, *output]).index_fill(0, torch.tensor(left_out), -torch.inf)
    return row.softmax(0).tolist()


def due() -> dict[tuple[int, ...], float]:
    """The probability of every beginning of three tokens, fewer where the text ends."""
    growing, law = {(): 1.0}, {}
    for _ in range(3):
        longer: dict[tuple[int, ...], float] = {}
        for text, mass in growing.items():
            for token, p in enumerate(law_of(text)):
                if p > 0:
                    (law if token == END else longer)[(*text, token)] = mass * p
        growing = longer
    return law | growing


def fitted(rule: str, draft: str, count: int) -> float:
    """How often chance alone gives such counts of the first three tokens of `count` texts."""
    requests = served(draft, 3 if "traversal" in rule else 1)
    asked = [request([1, 2], rule, seed=s, max_tokens=4, regex=PAIRS) for s in range(count)]
    made = requests.complete(asked)
    assert requests.engine.metrics.accepted > count / 8
    return fit(Counter(one.token_ids[:3] for one in made), due()).p


IN_LAW = ["block", "hybrid-traversal"]


@pytest.mark.parametrize("rule", IN_LAW)
def test_the_law_is_that_of_plain_decoding(rule: str) -> None:
    assert fitted(rule, "model", 500) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["token", *IN_LAW])
@pytest.mark.parametrize("draft", ["model", "ngram"])
def test_the_law_is_that_of_plain_decoding_at_full_counts(rule: str, draft: str) -> None:
    assert fitted(rule, draft, 20_000) > 1e-4


@pytest.mark.parametrize("rule", IN_LAW)
def test_masks_blind_to_their_path_have_another_law(
    rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control; a text that leaves its grammar is no longer followed either."""
    allowed, follow = MatcherGuide.allowed, MatcherGuide.follow
    monkeypatch.setattr(
        MatcherGuide, "allowed", lambda self, paths: allowed(self, [()] * len(paths))
    )

    def lenient(self, tokens) -> None:
        try:
            follow(self, tokens)
        except ModelError:
            self._matcher, self._read = self._start(), len(tokens)

    monkeypatch.setattr(MatcherGuide, "follow", lenient)
    assert fitted(rule, "model", 500) < 1e-9


def test_forced_tokens_are_drafted_and_save_rounds() -> None:
    asked = [request([1], max_tokens=12, temperature=0, regex="(abcd)+x|yz")]
    plain, requests = served("none").complete(asked)[0], served("grammar")
    done = requests.complete(asked)[0]
    assert done.token_ids == plain.token_ids
    stats = done.stats
    assert stats.accepted == stats.drafted > 0
    assert stats.rounds + stats.plain_rounds < plain.stats.plain_rounds


def test_the_grammar_drafter_leaves_other_texts_alone() -> None:
    requests = served("grammar")
    requests.complete([request([1, 2], max_tokens=9, seed=3), request([1], max_tokens=1, seed=3)])
    assert requests.engine.metrics.drafted == 0


def test_a_text_sent_back_to_the_queue_keeps_its_grammar() -> None:
    asked = mixed({"seed": 5})
    plain = [one.token_ids for one in served("none").complete(asked)]
    requests = served("grammar+model")
    with requests.running(asked) as texts:
        for _ in range(3):
            requests.engine.step()
            with requests.engine.without_caches():
                pass
        while not requests.engine.settled(texts):
            requests.engine.step()
        assert [tuple(text.tokens[text.num_prompt :]) for text in texts] == plain


@pytest.mark.parametrize("draft", ["none", "model", "grammar"])
def test_ends_come_where_the_grammar_may_end(draft: str) -> None:
    def made(**given: Any):
        return served(draft).complete([request([1], seed=2, regex="a?b", **given)])[0]

    short = made(max_tokens=9)
    assert spelled(short.token_ids) in ("ab", "b") and short.token_ids[-1] == END
    assert short.finish_reason == "stop" and short.stop_reason is None
    # An end that is a token like others comes again and again: nothing else may.
    padded = made(max_tokens=9, ignore_eos=True)
    assert padded.token_ids[: len(short.token_ids)] == short.token_ids
    assert set(padded.token_ids[len(short.token_ids) :]) == {END}
    assert padded.finish_reason == "length"
    # A stop token is an end too, and may come where the grammar may end.
    stopped = made(max_tokens=9, ignore_eos=True, stop_token_ids=[11], bad_words=[[END]])
    assert stopped.token_ids[-1] == stopped.stop_reason == 11
    assert spelled(stopped.token_ids[:-1]) in ("ab", "b")


@pytest.mark.parametrize("draft", ["none", "model", "grammar"])
def test_a_grammar_that_must_end_too_early_says_so(draft: str) -> None:
    requests = served(draft)
    asked = [
        request([1], max_tokens=9, min_tokens=5, seed=2, regex="a?b"),
        request([1], max_tokens=9, seed=2, regex="a?b"),
    ]
    with pytest.raises(NonFinite, match="grammars") as caught:
        requests.complete(asked)
    assert caught.value.completions[0] is None
    assert caught.value.completions[1].finish_reason == "stop"


def test_a_grammar_too_hard_to_follow_ends_its_own_request(monkeypatch) -> None:
    requests = served("model")
    asked = [request([1], max_tokens=9, seed=2, regex=one) for one in ("(a|b)*c", "a?b")]
    go = MatcherGuide._go

    class TooHard:
        def is_error(self) -> bool:
            return True

        def get_error(self) -> str:
            return "too many states"

    with requests.running(asked) as (hard, easy):
        hard.guide._start = TooHard
        monkeypatch.setattr(
            MatcherGuide,
            "_go",
            lambda self, m, path: (
                go(self, m, path) if self is easy.guide else go(self, TooHard(), ())
            ),
        )
        while not requests.engine.settled([hard, easy]):
            requests.engine.step()
        assert isinstance(hard.error, ModelError) and "too many states" in str(hard.error)
        assert easy.finish_reason == "stop"


def test_a_decoder_without_a_tokenizer_refuses() -> None:
    for given in ({"regex": "a"}, {"choice": ["a", "b"]}, {"json_schema": True}):
        config = SpeculativeDecoderConfig(sampling=SamplingParams(**given))
        with pytest.raises(InvalidConfig, match="needs a tokenizer"):
            SpeculativeDecoder(None, TARGET, config).generate([1], 3)


@pytest.mark.parametrize(
    "options",
    [
        {"json_schema": "{"},
        {"json_schema": "[1]"},
        {"json_schema": 3},
        {"json_schema": {"a": object()}},
        {"regex": ""},
        {"regex": 5},
        {"grammar": ["start"]},
        {"choice": "yes"},
        {"choice": [""]},
        {"choice": [1]},
        {"regex": "a", "grammar": 'start: "a"'},
        {"json_schema": {}, "choice": ["a"]},
    ],
)
def test_grammars_that_cannot_be_meant_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig, match=next(iter(options))):
        SamplingParams(**options)


def test_grammars_are_kept_as_text() -> None:
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    params = SamplingParams(json_schema=schema)
    assert params.json_schema == '{"type": "object", "properties": {"b": {}, "a": {}}}'
    assert hash(params) == hash(SamplingParams(json_schema=params.json_schema))
    assert SamplingParams(choice=["é", "b"]).grammar_source == ("regex", r"\x{e9}|b")
    assert SamplingParams(choice=None) == SamplingParams()
