"""Two hundred requests of all kinds at random times: each gets what it gets alone."""

from __future__ import annotations

import random

import pytest
from families import VOCAB, random_model

from outrider import SamplingParams
from outrider.drafters import Drafter, ModelDrafter, NgramDrafter
from outrider.engine import Emitter, Engine, Requests
from outrider.models import HuggingFaceTarget
from outrider.types import Completion, Request

NUM_REQUESTS, SLOTS, CHUNK, EOS = 200, 32, 96, 5


class Tokenizer:
    """Token i is a letter of its own."""

    def decode(self, ids) -> str:
        return "".join(chr(0x4E00 + i) for i in ids)


def served(target: HuggingFaceTarget, drafter: Drafter, max_texts: int) -> Requests:
    engine = Engine(target, drafter, Emitter(Tokenizer()), max_texts=max_texts, chunk=CHUNK)
    return Requests(engine, depth=3, end_tokens=frozenset({EOS}))


def draw_requests(chance: random.Random) -> list[Request]:
    """Requests of random lengths, laws and ends; some of one prompt, some of a common beginning."""
    systems = [[chance.randrange(VOCAB) for _ in range(count)] for count in (70, 130, 200)]
    requests: list[Request] = []
    while len(requests) < NUM_REQUESTS:
        prompt = [chance.randrange(VOCAB) for _ in range(chance.randrange(1, 60))]
        if chance.random() < 0.4:
            prompt = chance.choice(systems) + prompt
        greedy = chance.random() < 0.5
        most = chance.randrange(1, 14)
        params = SamplingParams(
            max_tokens=most,
            min_tokens=chance.choice((0, 0, most // 2)),
            temperature=0.0 if greedy else chance.choice((0.7, 1.0)),
            top_k=chance.choice((0, 10)),
            top_p=chance.choice((1.0, 0.9)),
            seed=chance.randrange(2**32),
            stop=chance.choice(((), (Tokenizer().decode([chance.randrange(VOCAB)]),))),
            stop_token_ids=chance.choice(((), tuple(chance.sample(range(VOCAB), 8)))),
            ignore_eos=chance.random() < 0.3,
            n=chance.choice((1, 1, 1, 4)),
        )
        depth = chance.choice((None, None, None, 0, 5))
        requests += [
            Request(tuple(prompt), params, sample, None, depth) for sample in range(params.n)
        ]
    return requests[:NUM_REQUESTS]


def end(done: Completion) -> tuple:
    return done.token_ids, done.text, done.finish_reason, done.stop_reason, done.stats.committed


@pytest.fixture(scope="module")
def requests_alone() -> tuple[list[Request], list[tuple]]:
    requests = draw_requests(random.Random(4))
    alone = served(
        HuggingFaceTarget(random_model("llama"), share_prefixes=False), NgramDrafter(), 1
    )
    return requests, [end(alone.complete([request])[0]) for request in requests]


@pytest.mark.parametrize("drafter", ["draft", "ngram"])
def test_each_of_two_hundred_gets_what_it_gets_alone(requests_alone, drafter: str) -> None:
    requests, wanted = requests_alone
    chance = random.Random(3)
    block = HuggingFaceTarget(random_model("llama")).block_bytes
    # Too little for 32 long texts: some are sent back to the queue.
    target = HuggingFaceTarget(random_model("llama"), cache_bytes=60 * block)
    draft = HuggingFaceTarget(random_model("llama", seed=1))
    several = served(target, ModelDrafter(draft) if drafter == "draft" else NgramDrafter(), SLOTS)
    engine = several.engine
    texts = [several.text(request) for request in requests]
    arriving, most_active = list(texts), 0
    while not engine.settled(texts):
        if arriving and chance.random() < 0.7:
            count = chance.randrange(1, 20)
            engine.submit(arriving[:count])
            del arriving[:count]
        engine.step()
        active = engine._scheduler.active
        most_active = max(most_active, len(active))
        assert len(active) <= SLOTS
    got = [end(Completion.of(text.outbox, text.stats, text.seed, text.rule)) for text in texts]
    assert got == wanted
    assert most_active > SLOTS // 2
    assert {text.stop_reason is None for text in texts} == {True, False}
    assert {text.finish_reason for text in texts} == {"stop", "length"}
    for model in (target, draft):
        cache = model._cache
        assert not cache._sequences
        assert cache.num_free_blocks + cache.num_idle_blocks == cache.num_blocks
    assert target._cache.cache_bytes <= 60 * block


def test_wrong_noise_is_found_out(requests_alone) -> None:
    """The negative control: the texts do depend on what each was asked for."""
    requests, wanted = requests_alone
    one = next(r for r in requests if r.sampling.temperature and r.sampling.max_tokens > 8)
    other = Request(one.prompt, one.sampling, one.sample + 1, one.rule, one.depth)
    alone = served(HuggingFaceTarget(random_model("llama")), NgramDrafter(), 1)
    assert end(alone.complete([one])[0]) == wanted[requests.index(one)]
    assert end(alone.complete([other])[0]) != wanted[requests.index(one)]
