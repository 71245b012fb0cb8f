"""A checkpoint's tokenizer: text as transformers makes it, or as a family makes it itself."""

from __future__ import annotations

import random

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from outrider.models.bundled import bundled_path, eval_prompts
from outrider.models.text import TextTokenizer

AS_IT_STANDS = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}


def test_it_decodes_as_transformers_does() -> None:
    folder = bundled_path("target")
    tokenizer, theirs = TextTokenizer(folder), AutoTokenizer.from_pretrained(folder)
    chance = random.Random(0)
    texts = [tokenizer.encode(text) for text in eval_prompts("prose")[:5]]
    texts += [[chance.randrange(len(theirs)) for _ in range(20)] for _ in range(50)]
    texts += [[], list(tokenizer.end_tokens()), list(theirs.all_special_ids)]
    for ids in texts:
        assert tokenizer.decode(ids) == theirs.decode(ids, **AS_IT_STANDS)
        assert tokenizer.decode(tuple(ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("name", ["decode", "_decode"])
def test_a_family_that_decodes_by_itself_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Shouting(PreTrainedTokenizerFast):
        pass

    plain = getattr(PreTrainedTokenizerFast, name)
    setattr(Shouting, name, lambda self, *given, **named: plain(self, *given, **named).upper())
    folder = bundled_path("target")
    made = Shouting.from_pretrained(folder)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *given, **named: made)
    tokenizer = TextTokenizer(folder)
    assert tokenizer.decode(tokenizer.encode("def parse(")) == "DEF PARSE("
