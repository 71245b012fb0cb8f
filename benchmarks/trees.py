"""Which rule keeps how much of a tree: exactly on toy pairs, by many rounds on the bundled pair.

    python benchmarks/trees.py --json docs/trees.json

Toy pairs: expected drafted tokens kept in one round, by enumeration, beside the most any lossless
rule could keep of the same drafts (a linear program). Bundled pair: rounds after held-out prompts
at temperature 1, the same prompts and seeds for every rule; on one level also the optimum.
Nothing is timed.
"""

import argparse
import json
import shlex
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from rich.progress import track
from torch import Tensor

from outrider import noise
from outrider.bench.machine import Machine
from outrider.certify.enumerate import Scheme, Speculation, TreeScheme, first_kept, tree_law
from outrider.certify.growth import STYLES, Grow, paths, raced, static
from outrider.certify.linear import optimum
from outrider.certify.pairs import Pair, fixed, random_pair
from outrider.certify.reference import IN_LAW
from outrider.certify.reference_gbv import gbv
from outrider.certify.reference_trees import (
    TreeRule,
    coupled,
    enough,
    kseq,
    match,
    recursive,
    traversal,
)
from outrider.decoding import (
    RULES,
    Draft,
    Draws,
    Kind,
    Law,
    RoundNoise,
    Rule,
    TargetLaws,
    theory,
)
from outrider.decoding.children import Drawing, Top, WithReplacement
from outrider.decoding.grow import grow
from outrider.models.bundled import bundled_path, eval_prompts
from outrider.models.checkpoint import load_llama
from outrider.models.tokenizer import load_tokenizer
from outrider.train import forward
from outrider.tree import TokenTree, full

TWO_BY_ONE = (0, 0, 1, 2)
IID, WITHOUT, TOP, HYBRID = "with replacement", "without replacement", "top K", "tail + top K-1"


@dataclass(frozen=True, slots=True)
class Exact:
    """One toy pair and one rule: expected tokens kept, and the optimum for its drafts."""

    pair: str
    rule: str
    drafts: str
    kept: str
    kept_float: float
    optimum: float


@dataclass(frozen=True, slots=True)
class Sampled:
    """One rule on one shape: mean tokens kept per round with its standard error over prompts."""

    shape: str
    rule: str
    drafts: str
    kept: float
    error: float
    optimum: float | None


def toys() -> list[Pair]:
    """Five pairs: near, far, a peak missed, equal, and laws that depend on the prefix."""
    return [
        fixed("near: p = 3 2 1, q = 2 2 1", [3, 2, 1], [2, 2, 1], 2, 3),
        fixed("far: p = 3 2 1, q = 1 2 3", [3, 2, 1], [1, 2, 3], 2, 3),
        fixed("peak missed: p = 1 6 1, q = 4 2 1", [1, 6, 1], [4, 2, 1], 2, 3),
        fixed("flat: p = 2 2 1 1, q = 1 1 1 1", [2, 2, 1, 1], [1, 1, 1, 1], 2, 3),
        next(
            pair
            for pair in map(random_pair, range(1000))
            if pair.vocab_size == 3 and theory.acceptance(pair.target(()), pair.draft(())) != 1
        ),
    ]


def schemes() -> list[tuple[str, str, Speculation, Grow]]:
    """Rules on four nodes: two children with one each, two paths of two; chains of two beside."""

    def tree(
        rule: str, drafts: str, decide: TreeRule, grow: Grow
    ) -> tuple[str, str, Speculation, Grow]:
        return rule, drafts, TreeScheme(rule, grow, decide), grow

    found = [tree("match", f"{TOP}, 2 x 1", match, static(TWO_BY_ONE, STYLES[TOP]))]
    for drafts in (IID, WITHOUT):
        found.append(tree("recursive", drafts, recursive, static(TWO_BY_ONE, STYLES[drafts])))
    found.append(tree("hybrid", HYBRID, recursive, static(TWO_BY_ONE, STYLES[HYBRID])))
    for drafts in (IID, WITHOUT):
        found.append(tree("traversal", drafts, traversal, static(TWO_BY_ONE, STYLES[drafts])))
    found.append(tree("hybrid-traversal", HYBRID, traversal, static(TWO_BY_ONE, STYLES[HYBRID])))
    least = partial(kseq, rho_of=enough)
    found.append(tree("kseq", IID, least, static(TWO_BY_ONE, STYLES[IID])))
    found.append(tree("gbv", "2 i.i.d. paths", gbv, paths(2, 2)))
    found.append(tree("coupled", "top K of the race", coupled, raced(TWO_BY_ONE)))
    chain = static((0, 1), STYLES[IID])
    for rule in ("token", "block"):
        found.append((rule, "chain of 2", Scheme(rule, IN_LAW[rule]), chain))
    return found


def exact_table() -> list[Exact]:
    """Every rule on every toy pair."""
    found: list[Exact] = []
    for pair in toys():
        for rule, drafts, scheme, grown in schemes():
            kept = first_kept(scheme, pair.target, pair.draft, 2)
            best = optimum(tree_law(grown, pair.draft, 2), pair.target, 2)
            found.append(Exact(pair.name, rule, drafts, str(kept), float(kept), round(best, 6)))
    return found


class Rows:
    """Next-token laws of one model after prompts and drafted tokens, each computed once."""

    def __init__(self, folder: Path, prompts: Sequence[tuple[int, ...]]) -> None:
        self._model = load_llama(folder)
        self._prompts = prompts
        self._known: dict[tuple[int, tuple[int, ...]], Tensor] = {}

    @torch.inference_mode()
    def laws(self, wanted: Sequence[tuple[int, tuple[int, ...]]]) -> Tensor:
        """Rows `[n, V]` after (prompt number, drafted tokens)."""
        missing = sorted(set(wanted) - self._known.keys(), key=lambda key: (len(key[1]), key))
        by_length: dict[int, list[tuple[int, tuple[int, ...]]]] = {}
        for prompt, path in missing:
            length = len(self._prompts[prompt]) + len(path)
            by_length.setdefault(length, []).append((prompt, path))
        for keys in by_length.values():
            for start in range(0, len(keys), 64):
                some = keys[start : start + 64]
                tokens_BT = torch.tensor([[*self._prompts[i], *path] for i, path in some])
                h_BTD, _ = forward.hidden_states(self._model, tokens_BT)
                laws_BV = forward.logits(self._model, h_BTD[:, -1]).softmax(-1)
                self._known.update(zip(some, laws_BV, strict=True))
        return torch.stack([self._known[key] for key in wanted])


def path_tokens(tree: TokenTree, text: int, row: int) -> tuple[int, ...]:
    """Tokens on the path to a row."""
    tokens: list[int] = []
    while row:
        tokens.append(int(tree.tokens_BN[text, row - 1]))
        row = int(tree.parents_BN[text, row - 1])
    return tuple(reversed(tokens))


class Bundled:
    """Rounds of the bundled pair: `seeds` rounds after each prompt."""

    def __init__(self, num_prompts: int, seeds: int) -> None:
        tokenizer = load_tokenizer(bundled_path("target"))
        prompts = [tuple(tokenizer.encode(t).ids) for t in eval_prompts("code")[:num_prompts]]
        self.target, self.draft = (Rows(bundled_path(p), prompts) for p in ("target", "draft"))
        self.prompts = [i for i in range(num_prompts) for _ in range(seeds)]
        self.seeds = seeds
        anchors = torch.tensor([len(prompts[i]) for i in self.prompts])
        keys = noise.as_key(range(len(self.prompts)))
        self.noise = RoundNoise(keys, torch.zeros_like(keys), anchors)

    def round(self, rule: Rule, shape: Sequence[int], drawing: Drawing | None) -> list[float]:
        """Mean tokens kept after each prompt."""
        draws = Draws(rule, self.noise, drawing)

        def expand(tree: TokenTree, rows_BL: Tensor) -> Law:
            keys = [
                (self.prompts[b], path_tokens(tree, b, row))
                for b, rows in enumerate(rows_BL.tolist())
                for row in rows
            ]
            return Law.dense(self.draft.laws(keys))

        draft = grow(draws, shape, expand)
        kept_B = rule.verify(draft, self._scores(draft), self.noise).num_accepted_B.double()
        return kept_B.view(-1, self.seeds).mean(1).tolist()

    def _scores(self, draft: Draft) -> TargetLaws:
        tree = draft.tree
        num_rows = tree.num_nodes + 1
        keys = [
            (self.prompts[b], path_tokens(tree, b, row if row <= count else 0))
            for b, count in enumerate(tree.counts_B.tolist())
            for row in range(num_rows)
        ]
        return TargetLaws(self.target.laws(keys).view(len(self.prompts), num_rows, -1))

    def optimum(self, num_children: int, kind: Kind) -> float:
        """Mean optimal acceptance of `num_children` drafts of the rows after the prompts."""
        keys = [(i, ()) for i in range(len(self.prompts) // self.seeds)]
        pairs = zip(self.target.laws(keys), self.draft.laws(keys), strict=True)
        best: Callable[..., float] = (
            theory.optimal_acceptance_iid
            if kind is Kind.IID
            else theory.optimal_acceptance_without_quadrature
        )
        return statistics.mean(
            float(best(p.double().tolist(), q.double().tolist(), num_children)) for p, q in pairs
        )


def chains(count: int, depth: int) -> tuple[int, ...]:
    """Parent rows of `count` chains from the root, level by level."""
    return tuple(max(0, j + 1 - count) for j in range(count * depth))


SHAPES: dict[str, tuple[int, ...]] = {
    "chain of 4": full(1, 4),
    "2 children": full(2, 1),
    "4 children": full(4, 1),
    "4 x 1 x 1 (12 nodes)": chains(4, 3),
    "2 x 2 x 2 (14 nodes)": full(2, 3),
}


def ways(shape: str) -> list[tuple[str, str, Drawing | None]]:
    """Rules that verify a shape, and how its children are drawn where not by the rule's default."""
    if shape.startswith("chain"):
        return [(rule, "sampled", None) for rule in ("match", "token", "block", "coupled")]
    found: list[tuple[str, str, Drawing | None]] = [
        ("match", TOP, Top()),
        ("recursive", IID, WithReplacement()),
        ("recursive", WITHOUT, None),
        ("hybrid", HYBRID, None),
        ("traversal", IID, WithReplacement()),
        ("traversal", WITHOUT, None),
        ("hybrid-traversal", HYBRID, None),
        ("kseq", IID, None),
        ("coupled", "top K of the race", None),
    ]
    return found + ([("gbv", "i.i.d. paths", None)] if "x 2" not in shape else [])


def sampled_table(num_prompts: int, seeds: int) -> list[Sampled]:
    """Every rule on every shape, after the same prompts."""
    pair = Bundled(num_prompts, seeds)
    jobs = [(shape, *way) for shape in SHAPES for way in ways(shape)]
    found: list[Sampled] = []
    best: dict[tuple[str, Kind], float] = {}
    for shape, rule, drafts, drawing in track(jobs, "rounds", transient=True):
        kept = pair.round(RULES[rule], SHAPES[shape], drawing)
        kind = Kind.IID if drafts in (IID, "i.i.d. paths") else Kind.WITHOUT
        top = None
        if shape.endswith("children") and drafts not in (TOP, HYBRID):
            if (shape, kind) not in best:
                best[shape, kind] = pair.optimum(len(SHAPES[shape]), kind)
            top = round(best[shape, kind], 4)
        error = statistics.stdev(kept) / len(kept) ** 0.5
        mean = round(statistics.mean(kept), 4)
        found.append(Sampled(shape, rule, drafts, mean, round(error, 4), top))
    return found


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def exact_lines(found: Sequence[Exact]) -> str:
    """One line per rule, one column per pair: kept, and the optimum for the same drafts."""
    pairs = list(dict.fromkeys(e.pair for e in found))
    ways = list(dict.fromkeys((e.rule, e.drafts) for e in found))
    cells = {(e.pair, e.rule, e.drafts): f"{e.kept_float:.3f} of {e.optimum:.3f}" for e in found}
    return table(
        ["rule", "drafts", *pairs],
        [[f"`{rule}`", drafts, *(cells[p, rule, drafts] for p in pairs)] for rule, drafts in ways],
    )


def sampled_lines(found: Sequence[Sampled]) -> str:
    """One line per rule, one column per shape: kept and its standard error; the optimum behind."""
    ways = list(dict.fromkeys((s.rule, s.drafts) for s in found))
    cells = {
        (s.shape, s.rule, s.drafts): f"{s.kept:.3f} ± {s.error:.3f}"
        + ("" if s.optimum is None else f" of {s.optimum:.3f}")
        for s in found
    }
    return table(
        ["rule", "drafts", *SHAPES],
        [
            [f"`{rule}`", drafts, *(cells.get((shape, rule, drafts), "") for shape in SHAPES)]
            for rule, drafts in ways
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=20, help="rounds after each prompt")
    parser.add_argument("--json", type=Path, help="where to save the tables")
    options = parser.parse_args()
    exact = exact_table()
    print(exact_lines(exact), end="\n\n")
    sampled = sampled_table(options.prompts, options.seeds)
    print(sampled_lines(sampled))
    if options.json:
        record = {
            "command": shlex.join(["python", "benchmarks/trees.py", *sys.argv[1:]]),
            "machine": asdict(Machine.here()),
            "prompts": options.prompts,
            "seeds": options.seeds,
            "torch": torch.__version__,
            "exact": [asdict(e) for e in exact],
            "sampled": [asdict(s) for s in sampled],
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
