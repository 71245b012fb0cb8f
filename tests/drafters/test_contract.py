"""The contract of every drafter: the tokens of plain decoding, and nothing left behind."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest
import torch

from outrider import SamplingParams, SpeculativeDecoder, SpeculativeDecoderConfig
from outrider.drafters import (
    CombinedDrafter,
    Drafter,
    GrammarDrafter,
    ModelDrafter,
    NgramDrafter,
    NoDrafter,
    ProtocolDrafter,
    RecycleDrafter,
    SuffixDrafter,
    SuffixStore,
)
from outrider.engine import Emitter, Engine, Requests
from outrider.models.protocol import ProtocolTarget
from outrider.tree import TreeBudget
from outrider.types import Request
from tests.drafters.tapped import TappedTarget, ToyEagle
from tests.engine.toys import blurred, decoder, markov

VOCAB = 6
TARGET = markov(VOCAB, 2, seed=5, zeros=0.5)
MAKERS: dict[str, Callable[[], Drafter]] = {
    "none": NoDrafter,
    "ngram": NgramDrafter,
    "suffix": SuffixDrafter,
    "suffix, stored": lambda: SuffixDrafter(spec_factor=4.0, store=SuffixStore(max_requests=8)),
    "recycle": RecycleDrafter,
    "grammar": GrammarDrafter,
    "model": lambda: ModelDrafter(ProtocolTarget(blurred(TARGET, 3, 0.2))),
    "protocol": lambda: ProtocolDrafter(blurred(TARGET, 3, 0.2)),
    "eagle": lambda: ToyEagle(VOCAB, seed=5),
    "suffix+recycle": lambda: CombinedDrafter([SuffixDrafter(), RecycleDrafter()]),
    "suffix+model": lambda: CombinedDrafter([SuffixDrafter(), made("model")]),
    "ngram+protocol+model": lambda: CombinedDrafter(
        [NgramDrafter(), made("protocol"), made("model")]
    ),
}
SILENT = ("none", "grammar")
"""Those that draft nothing for texts without a grammar."""
RAGGED = [[1], [2, 3, 4, 2, 3], [0, 0, 1, 2, 1, 0, 0], [5, 4], [3]]
PARAMS = {
    "greedy": SamplingParams(max_tokens=25, temperature=0.0),
    "coupled": SamplingParams(max_tokens=25, seed=11, temperature=0.7),
}


def made(name: str) -> Drafter:
    return MAKERS[name]()


every_drafter = pytest.mark.parametrize("name", MAKERS)


def served(drafter: Drafter, trees: TreeBudget | None = None) -> Requests:
    engine = Engine(TappedTarget(TARGET), drafter, Emitter(None), trees=trees)
    return Requests(engine, depth=5, end_tokens=frozenset())


def asked(params: SamplingParams, prompts: list[list[int]]) -> list[Request]:
    return [Request(tuple(prompt), params) for prompt in prompts]


def by_text(drafter: Drafter) -> list[str]:
    """Names of what a drafter still holds by text: dictionaries that are not empty."""
    if isinstance(drafter, CombinedDrafter):
        return [name for part in drafter.drafters for name in by_text(part)]
    return [
        name
        for name, value in vars(drafter).items()
        if isinstance(value, dict) and value and all(isinstance(key, int) for key in value)
    ]


@every_drafter
@pytest.mark.parametrize("law", PARAMS)
@pytest.mark.parametrize("prompts", [RAGGED[2:3], RAGGED], ids=["one", "ragged five"])
def test_it_gives_the_tokens_of_plain_decoding(name: str, law: str, prompts) -> None:
    params = PARAMS[law]
    plain = [c.token_ids for c in served(NoDrafter()).complete(asked(params, prompts))]
    requests = served(made(name))
    # Twice, because some remember.
    for _ in range(2):
        done = requests.complete(asked(params, prompts))
        assert [c.token_ids for c in done] == plain
    assert requests.engine.metrics.accepted > 0 or name in SILENT


@pytest.mark.parametrize("name", [name for name in MAKERS if name != "protocol"])
@pytest.mark.parametrize("law", PARAMS)
def test_its_trees_give_the_tokens_of_plain_decoding(name: str, law: str) -> None:
    plain = [c.token_ids for c in served(NoDrafter()).complete(asked(PARAMS[law], RAGGED))]
    requests = served(made(name), TreeBudget(3, 12))
    done = requests.complete(asked(PARAMS[law], RAGGED))
    assert [c.token_ids for c in done] == plain
    assert by_text(requests.engine.drafter) == []
    assert requests.engine.metrics.accepted > 0 or name in SILENT


def test_a_draft_that_is_taken_unseen_is_noticed() -> None:
    """The comparison can fail: other noise gives other tokens."""
    plain = served(NoDrafter()).complete(asked(PARAMS["coupled"], RAGGED))
    other = SamplingParams(max_tokens=25, seed=12, temperature=0.7)
    done = served(SuffixDrafter()).complete(asked(other, RAGGED))
    assert [c.token_ids for c in done] != [c.token_ids for c in plain]


@every_drafter
def test_it_keeps_nothing_of_texts_that_are_over(name: str) -> None:
    drafter = made(name)
    requests = served(drafter)
    requests.complete(asked(PARAMS["greedy"], RAGGED))
    assert by_text(drafter) == []
    if isinstance(drafter, ModelDrafter):
        assert not drafter.model._texts
    if isinstance(drafter, ToyEagle):
        assert drafter.model.num_open == 0


@every_drafter
def test_a_cancelled_text_leaves_nothing_and_the_others_go_on(name: str) -> None:
    drafter = made(name)
    requests = served(drafter)
    stream = requests.stream(Request((1, 2, 3, 1, 2), PARAMS["greedy"]))
    for _ in range(3):
        next(stream)
    assert by_text(drafter) or name in (*SILENT, "recycle", "protocol")
    stream.close()
    assert by_text(drafter) == []
    plain = served(NoDrafter()).complete(asked(PARAMS["greedy"], RAGGED))
    done = requests.complete(asked(PARAMS["greedy"], RAGGED))
    assert [c.token_ids for c in done] == [c.token_ids for c in plain]


@every_drafter
@pytest.mark.parametrize("rule", ["block", "token", "match"])
def test_it_goes_with_every_rule_at_temperature_zero(name: str, rule: str) -> None:
    ours = decoder(made(name), TappedTarget(TARGET), 4, rule, temperature=0.0).generate_batch(
        RAGGED, 20
    )
    assert ours == decoder(None, TARGET, temperature=0.0).generate_batch(RAGGED, 20)


@every_drafter
def test_an_interrupted_round_changes_no_token(name: str) -> None:
    """Ctrl-C in the target's forward: what was drafted is drafted anew, the text is the same."""
    drafter = made(name)
    requests = served(drafter)
    target = requests.engine.target
    plain = served(NoDrafter()).complete(asked(PARAMS["coupled"], RAGGED))
    with requests.running(asked(PARAMS["coupled"], RAGGED)) as texts:
        score, calls = target.score, 0

        def interrupted(rows):
            nonlocal calls
            calls += 1
            if calls % 3 == 0:
                raise KeyboardInterrupt
            return score(rows)

        target.score = interrupted  # type: ignore[method-assign]
        for _ in range(300):
            with suppress(KeyboardInterrupt):
                requests.engine.step()
        assert requests.engine.settled(texts)
        tokens = [tuple(text.tokens[text.num_prompt :]) for text in texts]
    assert tokens == [c.token_ids for c in plain]


class Mute(NgramDrafter):
    """A look-up of one's own, which says nothing."""

    name = "mute"

    def propose(self, texts, depths, draws):
        """Nothing, whatever the text repeats."""
        return draws.points([[] for _ in texts])


class Louder(Mute):
    """One below it, which says what both of its methods say."""

    def propose(self, texts, depths, draws):
        """The token 5, once."""
        return draws.points(self.chains(texts, depths))

    def chains(self, texts, depths):
        """The same in plain numbers."""
        return [[5][:depth] for depth in depths]


def test_who_overrides_what_is_proposed_is_asked_that() -> None:
    """A class below one that says its chains in plain numbers, too, and the class below that."""
    assert Mute().chains([], []) is None
    assert Louder().chains([], [1, 0]) == [[5], []]


# Where two draw, the first has always enough for a chain.
@pytest.mark.filterwarnings("ignore:.* draft was loaded and has guessed in none")
@every_drafter
def test_no_draft_is_longer_than_asked_for(name: str) -> None:
    drafter = made(name)
    config = SpeculativeDecoderConfig(k=3, sampling=SamplingParams(temperature=0.0))
    spec = SpeculativeDecoder(drafter, TappedTarget(TARGET), config)
    seen = []
    propose = drafter.propose

    def watched(texts, depths, draws):
        draft = propose(texts, depths, draws)
        seen.append((list(depths), draft.tree.counts_B.tolist()))
        return draft

    drafter.propose = watched  # type: ignore[method-assign]
    for length in (1, 2, 3, 9):
        spec.generate_batch(RAGGED, length)
    assert all(n <= d for depths, counts in seen for d, n in zip(depths, counts, strict=True))
    assert seen and all(max(depths) <= 3 for depths, _ in seen)


def test_rows_are_shown_to_those_who_ask_and_to_nobody_else() -> None:
    """Token by token: each row shown is the target's law after the token it is shown for."""

    class Watches(RecycleDrafter):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[tuple[list[int], torch.Tensor]] = []

        def observe(self, text, tokens, logits_nV) -> None:
            before = list(text.tokens)
            assert tokens[0] == before[-1] and len(tokens) == len(logits_nV)
            for i in range(len(tokens)):
                law = TARGET.law([*before, *tokens[1 : i + 1]])
                wanted = torch.from_numpy(law)
                assert torch.allclose(logits_nV[i].double().softmax(0), wanted, atol=1e-5)
            self.seen.append((list(tokens), logits_nV))
            super().observe(text, tokens, logits_nV)

    class Silent(Watches):
        wants_rows = False

    for drafter, shown in ((Watches(), True), (Silent(), False)):
        requests = served(drafter)
        requests.complete(asked(PARAMS["coupled"], RAGGED))
        assert bool(drafter.seen) == shown
        if shown:
            accepted = requests.engine.metrics.accepted
            assert sum(len(tokens) - 1 for tokens, _ in drafter.seen) >= accepted > 0
