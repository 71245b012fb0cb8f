"""Bad words given as text become token ids where the tokenizer is."""

from __future__ import annotations

import pytest

from outrider import LLM, SamplingParams

PROMPT = "class Stack:\n    def push(self, item):\n        "
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM.load("bundled", strict=True)


def without(*words: str) -> SamplingParams:
    return SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, bad_words=words)


def test_a_word_is_spelled_as_it_stands_and_after_a_space(llm: LLM) -> None:
    spellings = llm.tokenizer.spellings("self")
    assert [llm.tokenizer.decode(ids) for ids in spellings] == ["self", " self"]
    assert [llm.tokenizer.decode(ids) for ids in llm.tokenizer.spellings("\n")] == ["\n"]


def test_bad_words_do_not_come(llm: LLM) -> None:
    spelled = {ids[0] for ids in llm.tokenizer.spellings("self") if len(ids) == 1}
    assert spelled & set(llm.generate(PROMPT, GREEDY)[0].token_ids)
    clean = llm.generate(PROMPT, without("self"))[0]
    assert not spelled & set(clean.token_ids)
    assert clean.token_ids == llm.generate(PROMPT, without("self"), depth=0)[0].token_ids


def test_text_and_token_ids_are_the_same_words(llm: LLM) -> None:
    spelled = SamplingParams(
        max_tokens=24,
        temperature=0.0,
        ignore_eos=True,
        bad_words=[*llm.tokenizer.spellings("self"), *llm.tokenizer.spellings("item")],
    )
    theirs = llm.generate(PROMPT, without("self", "item"))[0]
    assert theirs.token_ids == llm.generate(PROMPT, spelled)[0].token_ids
    assert list(llm.stream(PROMPT, without("self", "item")))[-1].finish_reason == "length"
