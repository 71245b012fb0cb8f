"""Rounds whose outcome is known: whether noise, laws and rules do here what they were proved to do.

They take a fraction of a second and need nothing but this package. The answers are those of the
rational references; a test holds them to each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextvars import Context
from itertools import pairwise

import torch

from outrider import noise
from outrider.decoding.draft import Draft, Kind, RoundNoise
from outrider.decoding.laws import Law, processed_probs
from outrider.decoding.rows import TargetLaws
from outrider.decoding.rules import RULES
from outrider.tree import TokenTree

TEXTS, WIDTH, GRAIN = 16, 4, 128
"""Rounds of each rule, tokens there are, and the fractions that laws are whole multiples of."""
SEED = 2**63 + 12345
CHAIN, TREE, PATHS = (0, 1, 2), (0, 0, 1, 1, 2), (0, 1, 0, 3)
SHAPES = {"token": CHAIN, "block": CHAIN, "gbv": PATHS}
"""Parents of the nodes a rule is given; those of every other rule are `TREE`."""
_PHILOX = (
    ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)
"""Counter, key and words of Philox4x32-10, of its authors' distribution."""
_LOGITS = (2.0, -1.0, 0.5, 3.0, 0.0, 2.5)
_CONTROLLED = (0.1385913, 0.0, 0.0, 0.5783045, 0.0, 0.2831042)
"""The law of `_LOGITS` at temperature 0.7, top_k 4 and min_p 0.1."""
ANSWERS = {
    "greedy": ":1 :0 1:1 1:0 2:0 :1 1:1 :3 :2 :3 2:3 2:2 :3 2:2 1:2 2:1",
    "match": ":1 :0 1:1 :3 :1 :1 1:3 :3 :2 1-3:3 2:0 2:2 :2 2:2 1:2 2-5:0",
    "token": ":1 1-2:3 1:1 1-2:3 1-2:1 :1 1-2-3:1 1-2:3 :2 1-2:1 1-2-3:3 1-2-3:1 :3 :0 1:2 1-2:3",
    "block": ":1 1-2:3 1:1 1-2:0 1-2:1 :1 1-2-3:1 1-2:3 :2 1:1 1:2 1-2-3:1 :3 :0 1:2 1-2:3",
    "coupled": "1-3:3 :0 :2 1:0 :1 :1 1:1 :3 :2 :3 2:3 2:2 :3 2:0 :0 :1",
    "recursive": ":1 1-3:3 1:1 1:2 1-4:0 :1 1-3:1 1-3:2 :2 1:1 1-3:1 1-3:0 :3 2:1 1:2 1-3:1",
    "hybrid": ":1 1-3:3 1:1 1:2 1-4:0 :1 1-3:1 1-3:2 :2 1:1 1-3:1 1-3:0 :3 2:1 1:2 1-3:1",
    "traversal": ":1 1-3:3 1:1 1:2 1-4:0 :1 1-3:1 1-3:2 1-3:1 1:1 1-4:0 1-3:0 :3 2:1 1:2 1-3:1",
    "hybrid-traversal": ":1 1-3:3 1:1 1:2 1-4:0 :1 1-3:1 1-3:2 "
    "1-3:1 1:1 1-4:0 1-3:0 :3 2:1 1:2 1-3:1",
    "kseq": ":1 1-3:3 1:1 1:2 1-4:0 :1 1-3:1 1-3:2 :2 1:1 1-4:0 1-3:0 2-5:0 2:1 1:2 1-4:1",
    "gbv": "3:2 1-2:3 1:1 1-2:2 1-2:1 :1 1-2:1 1-2:3 3-4:1 1-2:1 3-4:1 1-2:0 :3 :0 1:2 1-2:3",
}
"""Of each rule what `answer` says: the rows kept, and the token added, round by round."""


def fault() -> str | None:
    """The first thing that is not as it should be, in words; None where all is.

    Whatever the caller has set (default dtype and device, autocast, a ledger) has no part in it.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"), torch.autocast("cpu", enabled=False):
            return Context().run(_fault)
    finally:
        torch.set_default_dtype(before)


def _fault() -> str | None:
    for name, check in (("noise", _noise), ("laws", _laws), ("rules", _rules)):
        try:
            found = check()
        except Exception as error:  # Whatever a new release of torch may raise.
            found = f"{type(error).__name__}: {error}"
        if found is not None:
            return f"{name}: {found}"
    return None


def _noise() -> str | None:
    counter, key, due = (torch.tensor(part) for part in zip(*_PHILOX, strict=True))
    return None if torch.equal(noise.philox4x32(counter, key), due) else "not Philox4x32-10"


def _laws() -> str | None:
    law_V = processed_probs(torch.tensor([_LOGITS]), 0.7, 4, 1.0, 0.1)[0]
    due_V = torch.tensor(_CONTROLLED)
    right = torch.allclose(law_V, due_V, atol=1e-6) and torch.equal(law_V > 0, due_V > 0)
    return None if right else f"{law_V.tolist()} came, {due_V.tolist()} was due"


def _rules() -> str | None:
    wrong = [name for name in ANSWERS if answer(name) != ANSWERS[name]]
    return f"{', '.join(wrong)} decided otherwise than proved" if wrong else None


def answer(rule: str) -> str:
    """What a rule decides in `rounds(rule)`: `1-3:2` keeps rows 1 and 3 and adds token 2."""
    draft, target, chance = rounds(rule)
    verdict = RULES[rule].verify(draft, target, chance)
    parts = (verdict.num_accepted_B, verdict.path_BD, verdict.token_B)
    return " ".join(
        f"{'-'.join(map(str, path[:kept]))}:{token}"
        for kept, path, token in zip(*(part.tolist() for part in parts), strict=True)
    )


def rounds(rule: str) -> tuple[Draft, TargetLaws, RoundNoise]:
    """Trees of `SHAPES`, drawn i.i.d.; the laws of a text are a function of its tokens alone."""
    parents = SHAPES.get(rule, TREE)
    texts = [_text(b, parents) for b in range(TEXTS)]
    tokens, draft_laws, target_laws = zip(*texts, strict=True)
    rows = [[b * (len(parents) + 1) + row for row in parents] for b in range(TEXTS)]
    draft = Draft(
        TokenTree.of(list(tokens), [parents] * TEXTS),
        Law.dense(torch.tensor(draft_laws).flatten(0, 1)),
        torch.tensor(rows),
        torch.full((TEXTS, len(parents)), int(Kind.IID)),
        frozenset({Kind.IID}),
    )
    zeros, anchors = torch.zeros(TEXTS, dtype=torch.int64), torch.arange(1, TEXTS + 1)
    chance = RoundNoise(noise.as_key([SEED + b for b in range(TEXTS)]), zeros, anchors)
    return draft, TargetLaws(torch.tensor(target_laws)), chance


def _text(
    b: int, parents: tuple[int, ...]
) -> tuple[list[int], list[list[float]], list[list[float]]]:
    """Tokens of the tree's nodes, and the laws of draft and target at its rows."""
    draw = _words(b)
    paths: list[int] = [0]
    tokens: list[int] = []
    for node, parent in enumerate(parents):
        tokens.append(_drawn(_whole(draw, 8 * paths[parent]), draw(10_000 + node) % GRAIN))
        paths.append(paths[parent] * WIDTH + tokens[-1] + 1)
    q = [_whole(draw, 8 * path) for path in paths]
    # Now and then both laws are one.
    own = [8 * path + 4 * (draw(8 * path + 7) % 4 > 0) for path in paths]
    p = [_whole(draw, at) for at in own]
    q_rows, p_rows = ([[x / GRAIN for x in law] for law in laws] for laws in (q, p))
    return tokens, q_rows, p_rows


def _words(b: int) -> Callable[[int], int]:
    """Words of text b, none of which a rule reads."""
    known: dict[int, int] = {}

    def draw(at: int) -> int:
        if at not in known:
            known[at] = int(noise.words(SEED, b, noise.STREAM_VERIFY, 0, at))
        return known[at]

    return draw


def _whole(draw: Callable[[int], int], at: int) -> list[int]:
    """A law in whole numbers: what lies between sorted points."""
    points = sorted(draw(at + i) % (GRAIN + 1) for i in range(WIDTH - 1))
    return [after - before for before, after in pairwise((0, *points, GRAIN))]


def _drawn(law: list[int], point: int) -> int:
    return next(x for x, upto in enumerate(_sums(law)) if point < upto)


def _sums(law: list[int]) -> Iterator[int]:
    total = 0
    for mass in law:
        total += mass
        yield total
