"""Every family's flat rows equal separate plain forwards: chains, trees, ragged batches."""

from functools import cache
from pathlib import Path

import pytest
import torch

from outrider.models import hf
from outrider.models.base import Rows
from outrider.models.hf import HuggingFaceTarget
from outrider.models.reach import Chunk, Window
from tests.models.families import (
    EXPERTS,
    FAMILIES,
    TELLING,
    ancestors_of,
    one_thread,
    plain_logits,
    plain_tree_logits,
    random_model,
    random_tokens,
    relative_error,
)

TOLERANCE = 1e-5
PARENTS = [-1, 0, 0, 1, 1, 2, 5, 3]
TREES = [PARENTS, [-1, 0, 1], [-1], [-1, 0, 0, 0], [-1, -1, 0, 1]]
PREFIXES = (17, 26, 3, 9, 1)
NO_LOGITS = torch.empty(0, dtype=torch.int64)


single = pytest.fixture(scope="module", autouse=True)(one_thread)


@cache
def pair_of(family):
    """The family's eager model and a target over a second copy of it."""
    return random_model(family), HuggingFaceTarget(random_model(family))


@pytest.fixture(params=TELLING)
def pair(request):
    return pair_of(request.param)


def read(target, tokens):
    """Open a sequence and commit the tokens."""
    seq = target.open(len(tokens) + 64)
    target.score(Rows((seq,), (len(tokens),), tokens, None, NO_LOGITS))
    target.commit(seq, len(tokens))
    return seq


def chain_of(tree):
    """Return the parents of a chain of as many nodes."""
    return list(range(-1, len(tree) - 1))


def cases():
    """Every family in a ragged batch of five; alone by default those that tell most."""
    for family in FAMILIES:
        alone = () if family in TELLING else pytest.mark.slow
        yield pytest.param(family, 1, id=f"{family}-alone", marks=alone)
        yield pytest.param(family, 5, id=f"{family}-ragged")


@pytest.mark.parametrize("shape", [chain_of, list], ids=["chain", "tree"])
@pytest.mark.parametrize(("family", "size"), list(cases()))
def test_every_node_equals_a_plain_forward_of_its_path(family, size, shape):
    model, target = pair_of(family)
    assert target.info()["attention"] == FAMILIES[family].path
    texts = [random_tokens(n, n) for n in PREFIXES[:size]]
    parents = [shape(tree) for tree in TREES[:size]]
    nodes = [random_tokens(len(tree), 50 + i) for i, tree in enumerate(parents)]
    seqs = [read(target, text) for text in texts]
    ancestors = None if shape is chain_of else torch.cat([ancestors_of(tree) for tree in parents])
    rows = Rows(tuple(seqs), tuple(len(tree) for tree in parents), torch.cat(nodes), ancestors)
    case = zip(texts, nodes, parents, strict=True)
    want = torch.cat([plain_tree_logits(model, *each) for each in case])
    assert relative_error(target.score(rows), want) < TOLERANCE
    for seq in seqs:
        target.close(seq)


def test_the_page_names_every_family_under_its_path():
    """docs/own-models.md has what is tested here, and nothing else."""
    page = Path("docs/own-models.md").read_text()
    rows = [line.split("|")[1:4] for line in page.splitlines() if line.startswith("| ")]
    named = {path.strip(): set(names.strip().split(", ")) for path, names, _ in rows}
    slab = {name for name, family in FAMILIES.items() if family.path == "slab"}
    assert named["slab"] == slab
    assert named["attention interface, experts"] == set(EXPERTS)
    assert named["attention interface"] == set(FAMILIES) - slab - set(EXPERTS)


def test_chunks_equal_one_plain_forward(pair):
    model, target = pair
    tokens = random_tokens(140)
    want = plain_logits(model, tokens)
    seq = target.open(20)
    got, first = [], 0
    for count in (37, 8, 1, 8, 20, 1, 1, 64):
        got.append(target.score(Rows((seq,), (count,), tokens[first : first + count])))
        target.commit(seq, count)
        first += count
    assert relative_error(torch.cat(got), want) < TOLERANCE
    target.close(seq)


def test_staged_rows_continue_a_chain_and_discard_forgets_them(pair):
    model, target = pair
    tokens = random_tokens(40)
    want = plain_logits(model, tokens)
    seq = read(target, tokens[:23])
    for rubbish in (True, False):
        rows = [random_tokens(17, 9) if rubbish else tokens[23:]]
        got = [
            target.score(Rows((seq,), (len(part),), part)) for part in rows[0].split([1, 1, 9, 6])
        ]
        assert target.num_staged(seq) == 17
        if rubbish:
            target.discard(seq)
    assert target.length(seq) == 23
    assert relative_error(torch.cat(got), want[23:]) < TOLERANCE
    target.close(seq)


def test_tree_rows_equal_their_own_branches(pair):
    model, target = pair
    prefix, nodes = random_tokens(26), random_tokens(len(PARENTS), 2)
    want = plain_tree_logits(model, prefix, nodes, PARENTS)
    seq = read(target, prefix)
    ancestors = ancestors_of(PARENTS)
    got = [
        target.score(Rows((seq,), (3,), nodes[:3], ancestors[:3])),
        target.score(Rows((seq,), (5,), nodes[3:], ancestors[3:])),
    ]
    assert relative_error(torch.cat(got), want) < TOLERANCE
    # Committing a path moves its slots together: the branch is now the text.
    target.commit(seq, [0, 2, 5, 6])
    after = random_tokens(3, 3)
    text = torch.cat((prefix, nodes[[0, 2, 5, 6]], after))
    got = target.score(Rows((seq,), (3,), after))
    assert relative_error(got, plain_logits(model, text)[-3:]) < TOLERANCE
    target.close(seq)


def test_wanted_rows_are_the_same_rows(pair):
    _, target = pair
    tokens = random_tokens(12)
    seq = read(target, tokens[:5])
    every = target.score(Rows((seq,), (7,), tokens[5:]))
    target.discard(seq)
    some = target.score(Rows((seq,), (7,), tokens[5:], None, torch.tensor([0, 3, 6])))
    assert relative_error(some, every[[0, 3, 6]]) < TOLERANCE
    target.close(seq)


def test_a_hidden_key_and_a_shifted_position_show(pair, monkeypatch):
    """The tolerance means something: both faults exceed it a hundredfold."""
    model, target = pair
    tokens = random_tokens(30)
    want = plain_logits(model, tokens)[25:]
    make = hf.make_plan

    def hide_one_key(*args, **kwargs):
        plan = make(*args, **kwargs)
        span = plan.spans[0]
        for reach in (None, Window(7), Window(9), Chunk(8)):
            seen = span.visible(reach, torch.device("cpu"))
            hidden = torch.zeros(span.num_rows, span.slots.count - seen.first, dtype=torch.bool)
            if seen.hidden is not None:
                hidden[:, seen.masked - seen.first :] = seen.hidden
            hidden[:, 24 - seen.first] = True
            faulty = type(seen)(seen.first, seen.first, hidden, seen.length)
            span._visible[reach, torch.device("cpu")] = faulty
        return plan

    def shift_positions(*args, **kwargs):
        plan = make(*args, **kwargs)
        return type(plan)(plan.spans, plan.positions + 1)

    seq = read(target, tokens[:25])
    for fault in (None, hide_one_key, shift_positions):
        monkeypatch.setattr(hf, "make_plan", fault or make)
        error = relative_error(target.score(Rows((seq,), (5,), tokens[25:])), want)
        assert error > 100 * TOLERANCE if fault else error < TOLERANCE
        target.discard(seq)
    target.close(seq)
