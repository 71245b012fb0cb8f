"""GGUF models: rows of chains, trees and ragged batches are rows of separate plain passes."""

from __future__ import annotations

import gc
import random

import pytest
import torch

from outrider.bench import gguf_file
from outrider.errors import (
    InvalidConfig,
    MissingExtra,
    ModelError,
    OutOfMemory,
    TokenOutOfRange,
    UnsupportedModel,
)
from outrider.models.base import Rows
from outrider.models.libllama import LibllamaTarget, ModelFile, is_gguf, library
from outrider.models.libllama import library as library_module
from outrider.models.libllama import target as target_module
from outrider.models.libllama.memory import FIRST_CELLS, FIRST_IDS
from outrider.models.libllama.paths import Text
from tests.models import test_families
from tests.models.families import (
    ancestors_of,
    one_thread,
    plain_logits,
    plain_tree_logits,
    random_tokens,
    relative_error,
)
from tests.models.libllama_models import needs_libllama, random_file, windowed_file

# The contract of every target.
from tests.models.test_families import (  # noqa: F401
    PREFIXES,
    TREES,
    chain_of,
    read,
    test_chunks_equal_one_plain_forward,
    test_staged_rows_continue_a_chain_and_discard_forgets_them,
    test_tree_rows_equal_their_own_branches,
    test_wanted_rows_are_the_same_rows,
)

pytestmark = needs_libllama
TOLERANCE = 2e-2
"""Keys and values are kept in float16."""

single = pytest.fixture(scope="module", autouse=True)(one_thread)


@pytest.fixture(autouse=True)
def tolerance(monkeypatch):
    monkeypatch.setattr(test_families, "TOLERANCE", TOLERANCE)


@pytest.fixture(scope="module")
def pair():
    """The tiny Llama in transformers, and its file as a target."""
    model, file = random_file()
    return model, LibllamaTarget(file)


@pytest.mark.parametrize("shape", [chain_of, list], ids=["chain", "tree"])
@pytest.mark.parametrize("size", [1, 5], ids=["alone", "ragged"])
def test_every_node_equals_a_plain_forward_of_its_path(pair, size, shape):
    model, target = pair
    texts = [random_tokens(n, n) for n in PREFIXES[:size]]
    parents = [shape(tree) for tree in TREES[:size]]
    nodes = [random_tokens(len(tree), 50 + i) for i, tree in enumerate(parents)]
    seqs = [read(target, text) for text in texts]
    ancestors = None if shape is chain_of else torch.cat([ancestors_of(tree) for tree in parents])
    rows = Rows(tuple(seqs), tuple(len(tree) for tree in parents), torch.cat(nodes), ancestors)
    case = zip(texts, nodes, parents, strict=True)
    want = torch.cat([plain_tree_logits(model, *each) for each in case])
    got = target.score(rows)
    assert relative_error(got, want) < TOLERANCE
    for seq in seqs:
        target.close(seq)


def test_siblings_that_see_each_other_show(pair, monkeypatch):
    """The tolerance means something: a row of a wrong sequence exceeds it tenfold."""
    model, target = pair
    stage = Text.stage_tree

    def last_ids_first(text, ancestors, spare):
        staging = stage(text, ancestors, spare)
        # Rows 1 and 2 are siblings: the second comes to see the first, one place further.
        staging.ids[2], staging.positions[2] = staging.ids[1], staging.positions[2] + 1
        staging.tips.pop(next(reversed(staging.tips)))
        return staging

    prefix, nodes = random_tokens(12), random_tokens(3, 5)
    parents = [-1, 0, 0]
    want = plain_tree_logits(model, prefix, nodes, parents)
    for fault in (stage, last_ids_first):
        monkeypatch.setattr(Text, "stage_tree", fault)
        seq = read(target, prefix)
        error = relative_error(target.score(Rows((seq,), (3,), nodes, ancestors_of(parents))), want)
        assert error < TOLERANCE if fault is stage else error > 10 * TOLERANCE
        target.close(seq)


def test_random_rounds_equal_plain_forwards(pair):
    """Chains and trees in turn, in several calls, kept in part, with texts opened and closed."""
    model, target = pair
    chance = random.Random(3)
    texts: dict[int, list[int]] = {}
    for _ in range(25):
        if len(texts) < 4:
            tokens = random_tokens(chance.randrange(1, 30), chance.randrange(99)).tolist()
            texts[read(target, torch.tensor(tokens))] = tokens
        seqs = chance.sample(list(texts), chance.randrange(1, len(texts) + 1))
        chain = chance.random() < 0.4
        parents: dict[int, list[int]] = {seq: [] for seq in seqs}
        nodes: dict[int, list[int]] = {seq: [] for seq in seqs}
        for _ in range(2):
            counts = [chance.randrange(1, 5) for _ in seqs]
            for seq, count in zip(seqs, counts, strict=True):
                for _ in range(count):
                    at = len(parents[seq])
                    parents[seq].append(at - 1 if chain else chance.randrange(-1, at))
                    nodes[seq].append(chance.randrange(97))
            ancestors = [
                ancestors_of(parents[seq])[-n:] for seq, n in zip(seqs, counts, strict=True)
            ]
            flat = [t for seq, n in zip(seqs, counts, strict=True) for t in nodes[seq][-n:]]
            given = None if chain else torch.cat(ancestors)
            got = target.score(Rows(tuple(seqs), tuple(counts), torch.tensor(flat), given))
            for seq, count, rows in zip(seqs, counts, got.split(counts), strict=True):
                prefix, own = torch.tensor(texts[seq]), torch.tensor(nodes[seq])
                want = plain_tree_logits(model, prefix, own, parents[seq])[-count:]
                assert relative_error(rows, want) < TOLERANCE
        for seq in seqs:
            path = [chance.randrange(len(nodes[seq]))]
            while parents[seq][path[0]] >= 0:
                path.insert(0, parents[seq][path[0]])
            if chance.random() < 0.2:
                target.discard(seq)
                continue
            target.commit(seq, len(path) if chain else path)
            texts[seq] += [nodes[seq][row] for row in path]
            assert target.length(seq) == len(texts[seq])
            if chance.random() < 0.2 or len(texts[seq]) > 80:
                target.close(seq)
                del texts[seq]
    for seq in texts:
        target.close(seq)


def test_thousands_of_texts_leave_nothing_behind(pair):
    _, target = pair
    tokens = random_tokens(9)
    parents = [-1, 0, 0, 1]
    before = None
    for i in range(2000):
        seq = target.open(16)
        target.score(Rows((seq,), (5,), tokens[:5]))
        target.commit(seq, 5)
        if i % 3 == 0:
            target.score(Rows((seq,), (4,), tokens[5:], ancestors_of(parents)))
        if i % 2 == 0:
            target.commit(seq, 2 if i % 3 else [0, 2]) if i % 6 == 0 else target.discard(seq)
        target.close(seq)
        if i == 10:
            before = (target._memory.cells, sorted(target._memory._free_ids))
    assert (target._memory.cells, sorted(target._memory._free_ids)) == before
    assert not target._texts


def test_it_grows_with_its_texts_and_holds_what_it_held():
    """More tokens than the first context has, more paths than ids, in the midst of a tree."""
    model, file = random_file()
    target = LibllamaTarget(file)
    held = target.cache_plan()["held_bytes"]
    texts = [random_tokens(900, seed) for seed in range(3)]
    seqs = [read(target, text) for text in texts]
    assert target._memory.cells > FIRST_CELLS and target.cache_plan()["held_bytes"] > held
    nodes, parents = random_tokens(24, 8), [-1, *[0] * 11, *range(1, 13)]
    ancestors = ancestors_of(parents)
    first = target.score(Rows((seqs[0],), (12,), nodes[:12], ancestors[:12]))
    assert target._memory._num_ids > FIRST_IDS
    target._memory._grow(2 * target._memory.cells, target._memory._num_ids)
    then = target.score(Rows((seqs[0],), (12,), nodes[12:], ancestors[12:]))
    want = plain_tree_logits(model, texts[0], nodes, parents)
    assert relative_error(torch.cat((first, then)), want) < TOLERANCE
    target.commit(seqs[0], [0, 3, 14])
    text = torch.cat((texts[0], nodes[[0, 3, 14]], random_tokens(2)))
    got = target.score(Rows((seqs[0],), (2,), text[-2:]))
    assert relative_error(got, plain_logits(model, text)[-2:]) < TOLERANCE


def test_a_bound_is_kept_and_a_full_cache_stages_nothing():
    model, file = random_file()
    target = LibllamaTarget(file)
    target.limit_cache(2 * target.block_bytes)
    assert target.cache_plan()["max_bytes"] == target.cache_plan()["held_bytes"]
    tokens = random_tokens(600)
    seqs = [read(target, tokens[:250]), read(target, tokens[:240])]
    target.score(Rows((seqs[0],), (2,), tokens[250:252]))
    with pytest.raises(OutOfMemory, match="512 tokens is full"):
        target.score(Rows(tuple(seqs), (10, 20), tokens[240:270]))
    assert [target.num_staged(seq) for seq in seqs] == [2, 0]
    got = target.score(Rows((seqs[0],), (2,), tokens[252:254]))
    assert relative_error(got, plain_logits(model, tokens[:254])[-2:]) < TOLERANCE
    target.close(seqs[1])
    target.score(Rows((seqs[0],), (20,), tokens[254:274]))
    with pytest.raises(InvalidConfig, match="cache_bytes=100: 256 tokens take"):
        LibllamaTarget(file, cache_bytes=100)
    with pytest.raises(InvalidConfig, match="texts are open"):
        target.limit_cache(10 * target.block_bytes)


def test_more_paths_than_libllama_has_sequences_are_out_of_memory():
    _, file = random_file()
    target = LibllamaTarget(file)
    tree = [-1, *[0] * 62]
    seqs = [target.open(70) for _ in range(6)]
    for seq in seqs[:4]:
        target.score(Rows((seq,), (63,), random_tokens(63), ancestors_of(tree)))
    with pytest.raises(OutOfMemory, match="no sequence left"):
        target.score(Rows((seqs[4],), (63,), random_tokens(63), ancestors_of(tree)))
    assert target.num_staged(seqs[4]) == 0
    # A text between rounds can do without the ids of its last tree.
    target.commit(seqs[0], 1)
    rows = target.score(Rows((seqs[4],), (63,), random_tokens(63), ancestors_of(tree)))
    assert rows.shape == (63, 97)
    target.score(Rows((seqs[0],), (3,), random_tokens(3), ancestors_of([-1, 0, 0])))


def test_open_texts_share_their_beginning(pair):
    model, target = pair
    tokens = random_tokens(200)
    first = read(target, tokens[:150])
    same = target.open(200, tokens[:140].tolist())
    part = target.open(200, [*tokens[:80].tolist(), 1, 2, 3])
    none = target.open(200, tokens[1:140].tolist())
    assert [target.length(seq) for seq in (same, part, none)] == [140, 80, 0]
    target.close(first)
    for seq, known in ((same, 140), (part, 80)):
        text = torch.cat((tokens[:known], random_tokens(3, known)))
        got = target.score(Rows((seq,), (3,), text[known:]))
        assert relative_error(got, plain_logits(model, text)[-3:]) < TOLERANCE
    for seq in (same, part, none):
        target.close(seq)
    alone = LibllamaTarget(target.file, share_prefixes=False)
    assert alone.prefix_block is None


def test_bad_rows_end_in_typed_errors(pair):
    _, target = pair
    seq = target.open(4)
    for bad in (97, -1):
        with pytest.raises(TokenOutOfRange, match=f"token {bad} "):
            target.score(Rows((seq,), (2,), torch.tensor([1, bad])))
    with pytest.raises(InvalidConfig, match="context of 1024"):
        target.score(Rows((seq,), (1025,), torch.zeros(1025, dtype=torch.int64)))
    with pytest.raises(InvalidConfig, match="name one twice"):
        target.score(Rows((seq, seq), (1, 1), torch.tensor([1, 2])))
    with pytest.raises(InvalidConfig, match=r"rows \[0, 1, 2\] to commit where 0"):
        target.commit(seq, 3)
    target.close(seq)
    with pytest.raises(InvalidConfig, match="not open"):
        target.length(seq)


def test_a_failure_of_the_library_stages_nothing(pair, monkeypatch):
    model, target = pair
    tokens = random_tokens(14)
    seqs = [read(target, tokens[:8]) for _ in range(2)]
    bindings = target.file.bindings
    decode = bindings.llama_decode

    def fails_afterwards(context, batch):
        decode(context, batch)
        return -3

    monkeypatch.setattr(bindings, "llama_decode", fails_afterwards)
    with pytest.raises(ModelError, match="code -3"):
        target.score(Rows(tuple(seqs), (2, 2), tokens[8:12]))
    monkeypatch.undo()
    assert [target.num_staged(seq) for seq in seqs] == [0, 0]
    want = plain_logits(model, tokens)[8:]
    for seq in seqs:
        assert relative_error(target.score(Rows((seq,), (6,), tokens[8:])), want) < TOLERANCE
        target.close(seq)


@pytest.mark.parametrize("guarded", [True, False])
def test_what_a_window_has_left_is_there_after_a_rollback(monkeypatch, guarded):
    """libllama gives such cells away where one sequence alone holds them.

    A freed cell before the text's own makes it look for room from the front.
    """
    model, file = windowed_file()
    if not guarded:
        monkeypatch.setattr(ModelFile, "window", 0)
    target = LibllamaTarget(file)
    other = read(target, random_tokens(1))
    tokens = random_tokens(90)
    seq = read(target, tokens[:75])
    target.close(other)
    for row in random_tokens(40, 4).split(1):
        target.score(Rows((seq,), (1,), row))
    target.discard(seq)
    error = relative_error(
        target.score(Rows((seq,), (15,), tokens[75:])), plain_logits(model, tokens)[75:]
    )
    assert error < TOLERANCE if guarded else error > 5 * TOLERANCE


def test_trees_behind_a_window_equal_their_branches():
    model, file = windowed_file()
    target = LibllamaTarget(file)
    assert target.scores_trees
    prefix, nodes = random_tokens(150), random_tokens(len(test_families.PARENTS), 2)
    want = plain_tree_logits(model, prefix, nodes, test_families.PARENTS)
    seq = read(target, prefix)
    ancestors = ancestors_of(test_families.PARENTS)
    assert relative_error(target.score(Rows((seq,), (8,), nodes, ancestors)), want) < TOLERANCE
    target.commit(seq, [0, 2, 5, 6])
    text = torch.cat((prefix, nodes[[0, 2, 5, 6]], random_tokens(3, 3)))
    got = target.score(Rows((seq,), (3,), text[-3:]))
    assert relative_error(got, plain_logits(model, text)[-3:]) < TOLERANCE


@pytest.mark.parametrize("moment", ["staged_now", "path"])
def test_an_interrupt_at_any_moment_is_made_good_by_discard(pair, monkeypatch, moment):
    model, target = pair
    tokens = random_tokens(20)
    seq = read(target, tokens[:10])

    def interrupted(*_):
        raise KeyboardInterrupt

    def a_round():
        target.score(Rows((seq,), (4,), random_tokens(4), ancestors_of([-1, 0, 0, 1])))
        target.commit(seq, [0, 2])

    monkeypatch.setattr(Text, moment, interrupted)
    with pytest.raises(KeyboardInterrupt):
        a_round()
    monkeypatch.undo()
    target.discard(seq)
    got = target.score(Rows((seq,), (10,), tokens[10:]))
    assert relative_error(got, plain_logits(model, tokens)[10:]) < TOLERANCE
    target.close(seq)


def test_a_model_whose_rows_are_wrong_is_refused(monkeypatch):
    _, file = random_file()
    discard = LibllamaTarget.discard
    monkeypatch.setattr(
        LibllamaTarget, "discard", lambda target, seq: (target.commit(seq, 2), discard(target, seq))
    )
    with pytest.raises(UnsupportedModel, match=r"llama model .* after a rollback differ"):
        LibllamaTarget(file)


def test_files_that_are_none_are_refused(tmp_path):
    with pytest.raises(ModelError, match=r"no file; give the path of a GGUF file"):
        ModelFile(tmp_path / "nothing.gguf")
    _, good = random_file()
    bytes_of = good.read_bytes()
    for name, damaged in {
        "short": bytes_of[: len(bytes_of) // 2],
        "head": bytes_of[:40],
        "other": b"PK\x03\x04" + bytes(100),
        "empty": b"",
    }.items():
        file = tmp_path / f"{name}.gguf"
        file.write_bytes(damaged)
        with pytest.raises(ModelError, match=rf"{name}.gguf.* cannot be loaded as a GGUF file: "):
            ModelFile(file)
    assert is_gguf(good) and is_gguf("no/such.gguf") and not is_gguf(tmp_path)


def test_what_was_said_to_standard_error_is_logged(tmp_path, capfd, caplog):
    _, file = random_file()
    LibllamaTarget(file)
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUF" + bytes(3))
    with caplog.at_level("INFO", logger=library.log.name), pytest.raises(ModelError):
        ModelFile(bad)
    assert capfd.readouterr() == ("", "")
    assert caplog.records


def test_a_package_that_is_missing_says_how_to_install_it(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    library.library.cache_clear()
    try:
        with pytest.raises(MissingExtra, match=r"pip install 'outrider\[gguf\]'"):
            library.library()
    finally:
        library.library.cache_clear()


def test_a_target_that_is_dropped_frees_its_context_and_its_file():
    _, path = random_file()
    target = LibllamaTarget(path)
    context, file = target._memory._close, target.file.close
    assert context.alive and file.alive
    del target
    gc.collect()
    assert not context.alive and not file.alive


def test_a_pass_during_which_the_cache_grows_reads_every_row_once(monkeypatch) -> None:
    """A larger context takes more rows at a time, also from the middle of a pass on."""
    monkeypatch.setattr(target_module, "FIRST_CELLS", 256)
    _, file = random_file()
    target = LibllamaTarget(file)
    texts = {target.open(200): random_tokens(180, seed).tolist() for seed in range(5)}
    target.read_all(texts)
    assert [target.length(seq) for seq in texts] == [180] * 5
    alone = LibllamaTarget(file)
    for seq, tokens in texts.items():
        other = alone.open(200)
        alone.read(other, tokens)
        rows = [
            one.score(Rows((handle,), (1,), torch.tensor([7])))
            for one, handle in ((target, seq), (alone, other))
        ]
        assert relative_error(*rows) < TOLERANCE


def test_longrope_keeps_to_the_context_it_was_first_trained_for(tmp_path, monkeypatch) -> None:
    """All texts together: beyond it libllama would rotate what is cached otherwise."""
    facts = gguf_file._facts
    scaled = {
        "llama.rope.scaling.type": "longrope",
        "llama.rope.scaling.original_context_length": 256,
    }
    monkeypatch.setattr(gguf_file, "_facts", lambda *given: facts(*given) | scaled)
    file = tmp_path / "longrope.gguf"
    gguf_file.write_gguf(random_file()[0], file, tokenizer=None)
    target = LibllamaTarget(file)
    assert target.max_length == 256
    first, second = (target.open(200) for _ in range(2))
    tokens = random_tokens(200).tolist()
    target.read(first, tokens)
    with pytest.raises(OutOfMemory, match="rotary"):
        target.read(second, tokens)
    target.close(first)
    target.read(second, tokens)
    assert target.length(second) == 200


def test_an_interrupt_while_a_file_loads_is_raised(monkeypatch) -> None:
    """Python would print and forget what is raised while the library tells its log."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(library_module.log, "log", interrupt)
    with pytest.raises(KeyboardInterrupt):
        ModelFile(random_file()[1])
    monkeypatch.undo()
    assert ModelFile(random_file()[1]).vocab_size > 0


def test_a_text_that_cannot_be_opened_keeps_no_sequence(monkeypatch) -> None:
    target = LibllamaTarget(windowed_file()[1])
    take, taken = target._memory.take_id, list[int]()

    def once() -> int:
        if taken:
            raise OutOfMemory("no more")
        taken.append(take())
        return taken[0]

    free = len(target._memory._free_ids)
    monkeypatch.setattr(target._memory, "take_id", once)
    with pytest.raises(OutOfMemory, match="no more"):
        target.open(8)
    assert len(target._memory._free_ids) == free


def test_a_bound_that_cannot_be_had_leaves_the_cache_as_it_was(monkeypatch) -> None:
    target = LibllamaTarget(random_file()[1])

    def full(*_: object) -> None:
        raise OutOfMemory("no context")

    monkeypatch.setattr(target._memory, "_make", full)
    with pytest.raises(OutOfMemory, match="no context"):
        target.limit_cache(target.block_bytes)
    monkeypatch.undo()
    seq = target.open(8)
    assert target.score(Rows((seq,), (1,), torch.tensor([7]))).isfinite().all()
