"""The documents of a run: a user's own text, or the corpus that its recipe names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from outrider.errors import InvalidConfig
from outrider.models.text import TextTokenizer
from outrider.train.corpus import load_corpus
from outrider.train.prepare import sha256_of
from outrider.train.recipe import CorpusRecipe
from outrider.train.texts import Texts, read_texts


def texts_of(
    text: Sequence[str | Path],
    corpus: CorpusRecipe | None,
    manifest: Path | None,
    tokenizer: TextTokenizer,
) -> Texts:
    """The files of `text`; without any the corpus, whose manifest lies at `manifest`.

    Raises:
        InvalidConfig: neither, or what cannot be read.
    """
    if text:
        return read_texts(text, tokenizer)
    if corpus is None or manifest is None:
        raise InvalidConfig("no text to train on; give files, folders or JSONL with --text")
    found = load_corpus(corpus, manifest)
    train, held_out = (
        tuple(tuple(tokenizer.encode(document.text)) for document in documents)
        for documents in (found.train, found.held_out)
    )
    return Texts(train, held_out, sha256_of(manifest))
