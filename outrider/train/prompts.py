"""The three evaluation sets: held-out code, prose, random identifiers, at exact lengths.

A prompt is kept only if its text splits into the very tokens it was cut from, so lengths are exact.
The share of its 8-grams found in the training text is stored with it.
"""

import ast
import inspect
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from outrider.train.chance import generator
from outrider.train.corpus import Document, stdlib_root
from outrider.train.evaluate import Prompt
from outrider.train.prepare import Prepared

LENGTHS = (64, 96, 128, 192)
NGRAM = 8
NUM_CODE = 220
NUM_PROSE = 24
"""Of each of three kinds: licence, help texts, docstrings."""
NUM_FOREIGN = 64


def write_prompts(prepared: Prepared, folder: Path, seed: int) -> None:
    """Write code.jsonl, prose.jsonl and foreign.jsonl."""
    seen = ngrams(prepared.train)
    root = stdlib_root()
    held_out = prepared.corpus.held_out
    prose = (_licence(root), _help_texts(root), _docstrings(held_out))
    sets = {
        "code": [(_code_starts(held_out), NUM_CODE)],
        "prose": [(_paragraph_starts(kind), NUM_PROSE) for kind in prose],
        "foreign": [(_foreign(seed), NUM_FOREIGN)],
    }
    for name, kinds in sets.items():
        prompts = [
            p
            for starts, count in kinds
            for p in _cut(starts, count, prepared.tokenizer, seen, seed)
        ]
        named = [replace(p, id=f"{name}-{i:03}") for i, p in enumerate(prompts)]
        lines = (json.dumps(asdict(p), ensure_ascii=False) for p in named)
        (folder / f"{name}.jsonl").write_text("".join(line + "\n" for line in lines), "utf-8")


def ngrams(documents: Iterable[Sequence[int]], n: int = NGRAM) -> set[tuple[int, ...]]:
    """Every run of n tokens of the documents."""
    return {tuple(ids[i : i + n]) for ids in documents for i in range(len(ids) - n + 1)}


def overlap(ids: Sequence[int], seen: set[tuple[int, ...]], n: int = NGRAM) -> float:
    """Share of the n-grams of `ids` that are among `seen`."""
    grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    return sum(g in seen for g in grams) / max(1, len(grams))


def _cut(
    starts: Sequence[Document], count: int, tokenizer: Any, seen: set[tuple[int, ...]], seed: int
) -> Iterator[Prompt]:
    """The first `count` stretches, in an order of the seed, that can be cut at their length."""
    order = torch.randperm(len(starts), generator=generator(seed, "prompts")).tolist()
    found = 0
    for i in order:
        length = LENGTHS[found % len(LENGTHS)]
        # A word is rarely longer than eight characters a token: what follows cannot change the
        # first tokens.
        ids = tokenizer.encode(starts[i].text[: 16 * length]).ids[:length]
        text = tokenizer.decode(ids)
        if len(ids) < length or tokenizer.encode(text).ids != ids:
            continue
        yield Prompt("", starts[i].path, text, length, round(overlap(ids, seen), 4))
        found += 1
        if found == count:
            return
    raise AssertionError(f"only {found} of {count} prompts")


def _code_starts(documents: Iterable[Document]) -> list[Document]:
    """The rest of a file from every function, method and class on."""
    starts: list[Document] = []
    for document in documents:
        lines = document.text.splitlines(keepends=True)
        for node in ast.walk(ast.parse(document.text)):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                starts.append(Document(document.path, "".join(lines[node.lineno - 1 :])))
    return starts


def _licence(root: Path) -> Iterator[Document]:
    """Python's licence, which no file of the corpus contains."""
    yield Document("LICENSE.txt", (root / "LICENSE.txt").read_text("utf-8"))


def _help_texts(root: Path) -> Iterator[Document]:
    """The language reference as the interactive help shows it; pydoc_data is not trained on."""
    tree = ast.parse((root / "pydoc_data" / "topics.py").read_text("utf-8"))
    (table,) = (n.value for n in tree.body if isinstance(n, ast.Assign))
    for topic, text in ast.literal_eval(table).items():
        yield Document(f"pydoc_data/topics.py:{topic}", text)


def _docstrings(documents: Iterable[Document]) -> Iterator[Document]:
    """Long docstrings of held-out files."""
    for document in documents:
        for node in ast.walk(ast.parse(document.text)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (
                text := ast.get_docstring(node)
            ):
                yield Document(document.path, inspect.cleandoc(text))


def _paragraph_starts(documents: Iterable[Document]) -> list[Document]:
    """Texts from every second paragraph on."""
    return [
        Document(document.path, "\n\n".join(paragraphs[i:]))
        for document in documents
        for paragraphs in [document.text.split("\n\n")]
        for i in range(0, len(paragraphs), 2)
    ]


def _foreign(seed: int) -> list[Document]:
    """Code-like lines whose every name is random."""
    draw = generator(seed, "foreign")

    def pick(n: int) -> int:
        return int(torch.randint(n, (), generator=draw))

    def name() -> str:
        letters = "".join(chr(97 + pick(26)) for _ in range(4 + pick(6)))
        return letters.title() if pick(5) == 0 else letters

    def line() -> str:
        forms = (
            f"{name()} = {name()}({name()}, {pick(1000)})",
            f"{name()}_{name()}.{name()}['{name()}'] = {name()}",
            f"for {name()} in {name()}.{name()}({name()}):",
            f"    {name()} += {name()}[{pick(100)}] - {name()}_{name()}",
            f"def {name()}_{name()}({name()}, {name()}=None):",
        )
        return forms[pick(len(forms))]

    return [
        Document("generated", "".join(line() + "\n" for _ in range(40)))
        for _ in range(4 * NUM_FOREIGN)
    ]
