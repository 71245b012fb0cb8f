"""Prompts are read a chunk in each step: whoever is decoding meanwhile waits for no more."""

from __future__ import annotations

import pytest

from outrider import SamplingParams
from outrider.drafters import Drafter, ModelDrafter, NoDrafter
from outrider.engine import Emitter, Engine, Requests
from outrider.engine.settings import tree_budget
from outrider.errors import OutOfMemory
from outrider.models.protocol import ProtocolTarget
from outrider.types import Request
from tests.engine.toys import blurred, decoder, markov

TARGET = markov(5, 1, seed=8)
DRAFT = blurred(TARGET, 9, 0.3)
CHUNK, DEPTH, LENGTH = 256, 3, 70
LONG = tuple(i * i % 5 for i in range(2048))


class Counting(ProtocolTarget):
    """Counts the rows it reads, and its passes."""

    rows = passes = 0

    def score(self, rows):
        self.rows += len(rows.tokens_R)
        self.passes += 1
        return super().score(rows)


def served(target, drafter: Drafter, chunk: int = CHUNK) -> Requests:
    engine = Engine(target, drafter, Emitter(None), chunk=chunk)
    return Requests(engine, depth=DEPTH, end_tokens=frozenset())


def join(chunk: int, *, drafted: bool) -> tuple[list[int], list[int], list[bool], list[list[int]]]:
    """31 texts decode, then one of 2,048 tokens joins: rows of target and draft in each step from
    then on, whether each decoding text gained a token in it, and the texts."""
    target, draft = Counting(TARGET), Counting(DRAFT)
    requests = served(target, ModelDrafter(draft) if drafted else NoDrafter(), chunk)
    short = [Request((i % 5,), SamplingParams(max_tokens=LENGTH, seed=i)) for i in range(31)]
    long = Request(LONG, SamplingParams(max_tokens=8, seed=99))
    rows, draft_rows, gained = [], [], []
    with requests.running(short) as decoding:
        for _ in range(3):
            requests.engine.step()
        with requests.running([long]) as (joining,):
            while not joining.finished:
                before = [text.num_output for text in decoding]
                target.rows = draft.rows = 0
                requests.engine.step()
                rows.append(target.rows)
                draft_rows.append(draft.rows)
                after = [text.num_output for text in decoding]
                gained.append(all(a < b for a, b in zip(before, after, strict=True)))
            texts = [list(joining.tokens[len(LONG) :])]
        while not requests.engine.settled(decoding):
            requests.engine.step()
        texts += [text.tokens[1:] for text in decoding]
    assert not target._texts and not draft._texts
    return rows, draft_rows, gained, texts


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    """The texts of `join`, each made plainly and by itself."""
    plain = decoder(None, TARGET)
    return [
        plain.generate(LONG, 8, seed=99),
        *[plain.generate([i % 5], LENGTH, seed=i) for i in range(31)],
    ]


@pytest.mark.parametrize("drafted", [False, True])
def test_a_long_prompt_is_read_one_chunk_per_step_while_others_decode(alone, drafted) -> None:
    rows, draft_rows, gained, texts = join(CHUNK, drafted=drafted)
    decoding = 32 * (DEPTH + 1)
    assert all(gained) and len(rows) >= len(LONG) // CHUNK
    assert max(rows) <= CHUNK + decoding and max(draft_rows) <= CHUNK + decoding
    assert sum(count > CHUNK for count in rows) >= len(LONG) // CHUNK - 1
    assert texts == alone


def test_without_chunks_the_others_would_wait() -> None:
    """The negative control: the counts above are those of reading in chunks."""
    rows, draft_rows, _, _ = join(4096, drafted=True)
    assert max(rows) > len(LONG) and max(draft_rows) > len(LONG)


def test_many_prompts_share_a_chunk_first_come_first_served() -> None:
    target, draft = Counting(TARGET), Counting(DRAFT)
    requests = served(target, ModelDrafter(draft))
    lengths = [200, 600, 40, 1000, 120, 200, 256, 257, 1, 180]
    prompts = [
        Request(LONG[:n], SamplingParams(max_tokens=20, seed=i)) for i, n in enumerate(lengths)
    ]
    begun: list[int] = []
    with requests.running(prompts) as texts:
        while not requests.engine.settled(texts):
            target.rows = draft.rows = 0
            requests.engine.step()
            assert max(target.rows, draft.rows) <= CHUNK + len(texts) * (DEPTH + 1)
            begun += [i for i, t in enumerate(texts) if t.num_output and i not in begun]
        made = [text.tokens[text.num_prompt :] for text in texts]
    # One that fits into what is left of a chunk may pass one that does not.
    assert [i for i in begun if lengths[i] > CHUNK] == [1, 3, 7]
    assert begun.index(0) < begun.index(1) and begun[-1] == 9
    plain = decoder(None, TARGET)
    assert made == [plain.generate(LONG[:n], 20, seed=i) for i, n in enumerate(lengths)]


class Fails(Counting):
    """Fails while it reads a prompt: from its `after`-th score on, for `times` calls."""

    def __init__(self, model, error: Exception, times: int) -> None:
        super().__init__(model)
        self.error, self.times = error, times

    def score(self, rows):
        if len(rows.tokens_R) == CHUNK and self.times:
            self.times -= 1
            raise self.error
        return super().score(rows)


@pytest.mark.parametrize("drafts", [False, True], ids=["target", "draft"])
@pytest.mark.parametrize("times", [1, 10_000])
def test_no_memory_for_a_prompt_is_survived(drafts: bool, times: int) -> None:
    """A target without room lets the newest wait; a draft without room is done without."""
    error = OutOfMemory("no block left")
    target = Counting(TARGET) if drafts else Fails(TARGET, error, times)
    draft = Fails(DRAFT, error, times) if drafts else Counting(DRAFT)
    requests = served(target, ModelDrafter(draft))
    prompts = [Request(prompt, SamplingParams(max_tokens=9, seed=4)) for prompt in ((1,), LONG)]
    with requests.running(prompts) as texts:
        while not requests.engine.settled(texts):
            requests.engine.step()
        made = [text.tokens[text.num_prompt :] for text in texts]
        errors = [text.error for text in texts]
    assert not target._texts and not draft._texts
    plain = decoder(None, TARGET)
    assert made[0] == plain.generate([1], 9, seed=4) and errors[0] is None
    if drafts or times == 1:
        assert made[1] == plain.generate(LONG, 9, seed=4) and errors[1] is None
    else:
        assert isinstance(errors[1], OutOfMemory)


@pytest.mark.parametrize("drafts", [False, True], ids=["target", "draft"])
@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()], ids=repr)
def test_what_breaks_while_reading_hurts_nobody_else(drafts: bool, error: Exception) -> None:
    target = Counting(TARGET) if drafts else Fails(TARGET, error, 1)
    draft = Fails(DRAFT, error, 1) if drafts else Counting(DRAFT)
    requests = served(target, ModelDrafter(draft))
    prompts = [Request(prompt, SamplingParams(max_tokens=9, seed=4)) for prompt in ((1,), LONG)]
    with requests.running(prompts) as texts:
        while not requests.engine.settled(texts):
            try:
                requests.engine.step()
            except KeyboardInterrupt:
                assert isinstance(error, KeyboardInterrupt)
        made = [text.tokens[text.num_prompt :] for text in texts]
        errors = [text.error for text in texts]
    assert not target._texts and not draft._texts
    plain = decoder(None, TARGET)
    assert made[0] == plain.generate([1], 9, seed=4)
    if isinstance(error, KeyboardInterrupt):
        assert made[1] == plain.generate(LONG, 9, seed=4) and errors[1] is None
    else:
        assert errors[1] is error


def test_after_an_idle_moment_as_many_are_served_as_before() -> None:
    target = Fails(TARGET, OutOfMemory("no block left"), 1)
    requests = served(target, NoDrafter())
    prompts = [Request(prompt, SamplingParams(max_tokens=4, seed=4)) for prompt in ((1,), LONG)]
    requests.complete(prompts)
    assert requests.engine._scheduler.limit == 1
    requests.complete(prompts)
    assert requests.engine._scheduler.limit == 64


def test_where_trees_are_drafted_many_prompts_are_read_in_one_pass() -> None:
    """A tree hangs from a text's last token: all before it goes first, of all texts at once."""
    target = Counting(TARGET)
    engine = Engine(
        target,
        ModelDrafter(ProtocolTarget(DRAFT)),
        Emitter(None),
        chunk=CHUNK,
        trees=tree_budget(DEPTH, 2, 5),
    )
    requests = Requests(engine, depth=DEPTH, end_tokens=frozenset())
    lengths = [30, 2, 17, 45, 1]
    prompts = [
        Request(LONG[:n], SamplingParams(max_tokens=20, seed=i)) for i, n in enumerate(lengths)
    ]
    with requests.running(prompts) as texts:
        requests.engine.step()
        assert target.passes == 2
        while not requests.engine.settled(texts):
            requests.engine.step()
        made = [text.tokens[text.num_prompt :] for text in texts]
    plain = decoder(None, TARGET)
    assert made == [plain.generate(LONG[:n], 20, seed=i) for i, n in enumerate(lengths)]
