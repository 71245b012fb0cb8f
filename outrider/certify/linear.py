"""The most any verifier could keep of a drafted tree, as a linear program (extra `certify`)."""

from __future__ import annotations

from fractions import Fraction
from itertools import product

import numpy as np

from outrider.certify.enumerate import TreeLaw, target_law
from outrider.certify.growth import Text
from outrider.decoding.theory import Model
from outrider.errors import MissingExtra

MAX_VARIABLES = 60_000


def optimum(trees: TreeLaw, p: Model, depth: int) -> float:
    """The largest expected number of drafted tokens kept over all lossless verifiers.

    A verifier is m[tree, row, y] >= 0, the chance that the tree is drafted, its path to the row
    kept and y added. The m of a tree sum to its probability, and for every text of `depth` + 1
    tokens the chance that a round writes a prefix of it, the target the rest, is the target's own
    (Sun et al. 2025, the definition of a valid verifier). No m depends on how a verifier would
    work, so no verifier keeps more.

    Args:
        trees: the law of the drafted trees.
        p: the target.
        depth: levels of the deepest tree.

    Raises:
        MissingExtra: scipy is not installed.
        ValueError: more variables than `MAX_VARIABLES`, or a program the solver gave up.
    """
    try:
        from scipy.optimize import linprog
        from scipy.sparse import csr_array
    except ImportError as error:
        raise MissingExtra(
            "the optimum over all verifiers needs scipy: pip install 'outrider[certify]'"
        ) from error
    goal = target_law(p, depth + 1)
    text_rows = {text: len(trees) + i for i, text in enumerate(goal)}
    ends = _ends(p, list(goal))
    at: list[int] = []
    columns: list[int] = []
    entries: list[float] = []
    gain: list[float] = []
    for number, (tokens, parents) in enumerate(trees):
        paths: list[Text] = [()]
        for token, parent in zip(tokens, parents, strict=True):
            paths.append((*paths[parent], token))
        for path, y in product(dict.fromkeys(paths), range(len(p(())))):
            written = (*path, y)
            if written not in ends:
                continue
            at.append(number)
            entries.append(1.0)
            for text, rest in ends[written]:
                at.append(text_rows[text])
                entries.append(float(rest))
            columns += [len(gain)] * (1 + len(ends[written]))
            gain.append(float(len(path)))
    if len(gain) > MAX_VARIABLES:
        raise ValueError(f"{len(gain)} variables: at most {MAX_VARIABLES} are solved")
    shape = (len(trees) + len(goal), len(gain))
    found = linprog(
        -np.array(gain),
        A_eq=csr_array((entries, (at, columns)), shape=shape),
        b_eq=np.array([float(mass) for mass in (*trees.values(), *goal.values())]),
        method="highs",
    )
    if found.status != 0:
        raise ValueError(f"the linear program was not solved: {found.message}")
    return max(0.0, float(-found.fun))


def _ends(p: Model, texts: list[Text]) -> dict[Text, list[tuple[Text, Fraction]]]:
    """Each beginning of possible texts: the texts, and the target's chance of what follows it."""
    ends: dict[Text, list[tuple[Text, Fraction]]] = {}
    for text in texts:
        rest = Fraction(1)
        for cut in range(len(text), 0, -1):
            ends.setdefault(text[:cut], []).append((text, rest))
            rest *= Fraction(p(text[: cut - 1])[text[cut - 1]])
    return ends
