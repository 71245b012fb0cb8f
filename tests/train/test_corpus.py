"""The corpus is pinned, the tokenizer loses nothing, the stream leaves nothing out."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.errors import InvalidConfig
from outrider.models.tokenizer import END_OF_TEXT_ID, load_tokenizer
from outrider.train.corpus import list_sources, load_corpus, write_manifest
from outrider.train.prompts import ngrams, overlap
from outrider.train.stream import TokenStream
from tests.train.train_recipes import RECIPE, change_manifest, prepared_in, write_library


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    prepared_in(folder)
    return folder


def test_parts_follow_the_recipe(folder: Path) -> None:
    assert list_sources(folder / "library", RECIPE.corpus) == {
        "held.py": "held_out",
        "one.py": "train",
        "two.py": "train",
    }
    few = dataclasses.replace(RECIPE.corpus, max_files=1)
    assert list(list_sources(folder / "library", few)) == ["held.py", "one.py"]


def test_changed_missing_and_new_files_are_named(tmp_path: Path) -> None:
    root, manifest = write_library(tmp_path / "library"), tmp_path / "manifest.json"
    write_manifest(RECIPE.corpus, manifest, root)
    assert len(load_corpus(RECIPE.corpus, manifest, root).train) == 2

    (root / "one.py").write_text("changed = True\n", "utf-8")
    (root / "new.py").write_text("new = True\n", "utf-8")
    change_manifest(manifest, **{"gone.py": {"part": "train", "sha256": "0"}})
    with pytest.raises(InvalidConfig, match=r"gone\.py, new\.py, one\.py differ; run Python"):
        load_corpus(RECIPE.corpus, manifest, root)


def test_a_moved_boundary_is_a_mismatch(tmp_path: Path) -> None:
    root, manifest = write_library(tmp_path / "library"), tmp_path / "manifest.json"
    write_manifest(RECIPE.corpus, manifest, root)
    other = dataclasses.replace(RECIPE.corpus, held_out=("two.py",))
    with pytest.raises(InvalidConfig, match=r"held\.py, two\.py differ"):
        load_corpus(other, manifest, root)


def test_missing_manifest(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="no corpus manifest"):
        load_corpus(RECIPE.corpus, tmp_path / "manifest.json", tmp_path)


def test_tokenizer_loses_nothing(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    assert tokenizer.token_to_id("<|endoftext|>") == END_OF_TEXT_ID

    @settings(max_examples=100, deadline=None, database=None)
    @given(st.text(st.characters(codec="utf-8"), max_size=60))
    def round_trip(text: str) -> None:
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text

    round_trip()
    for text in (
        "    x = 1\r\n\t\ty\n\n\n",
        "a  b ",
        " def f(self):\n        pass",
        "é\u2028日本 \x00",
    ):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_indentation_and_line_breaks_are_tokens_of_their_own(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    whole = tokenizer.encode("def f(self):\n    return").ids
    head, tail = tokenizer.encode("def f(self):\n").ids, tokenizer.encode("    return").ids
    assert whole == head + tail


def test_stream_reads_every_document_once_an_epoch_in_another_order() -> None:
    documents = [[i] * 3 for i in range(1, 9)]
    stream = TokenStream(documents, 0, seed=5)
    first, second = (stream.read(epoch * 32, 32) for epoch in (0, 1))
    assert first.sort().values.equal(second.sort().values)
    assert not first.equal(second)
    assert stream.read(30, 4).equal(torch.cat([first[30:], second[:2]]))
    inputs_BT, targets_BT = stream.rows(1, 16, 8)
    assert inputs_BT.flatten()[1:].equal(targets_BT.flatten()[:-1])


def test_overlap_counts_shared_ngrams() -> None:
    seen = ngrams([[1, 2, 3, 4, 5]], n=3)
    assert seen == {(1, 2, 3), (2, 3, 4), (3, 4, 5)}
    assert overlap([1, 2, 3, 9, 9], seen, n=3) == pytest.approx(1 / 3)
