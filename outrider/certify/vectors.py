"""Golden vectors: rounds written out (laws, noise, draft), and the one right outcome of each.

A line of JSON is a case, another is its answer, so that an implementation in any language can be
held to the references. The noise stands there twice: as the address Outrider reads it from, and as
the numbers found there.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.certify import growth, reference, tree_paths
from outrider.certify.reference import Round
from outrider.certify.tree_paths import Case, random_case
from outrider.decoding import RULES, Draft, Kind, Law, RoundNoise, TargetLaws, Verdict
from outrider.errors import InvalidConfig
from outrider.tree import TokenTree

VERSION = 1
GRAIN = 128
"""Laws are whole multiples of 1 / GRAIN, which every format and language holds exactly."""
CHAINS: tuple[growth.Shape, ...] = ((), (0,), (0, 1), (0, 1, 2))
ON_CHAINS = {"token": reference.token, "block": reference.block}
KINDS = {Kind.POINT: "certain", Kind.IID: "drawn", Kind.WITHOUT: "without", Kind.TAIL: "tail"}
"""How a token was drawn: not at all; from its law; from its law less its earlier siblings' tokens;
from its law less its certain siblings' tokens."""
LIMIT_S = 600.0
"""Seconds that a command may take for all cases, unless it is told otherwise."""
Json = Mapping[str, Any]


def emit(per_style: int = 8) -> Iterator[dict[str, Any]]:
    """Cases with their outcomes under `expect`.

    Every rule meets every way of drawing siblings that it takes, laws with zeros and equal laws,
    trees of 0 to 9 nodes. Decisions nearer than 1e-6 to their threshold are left out: float32 may
    take them either way.

    Args:
        per_style: cases of each rule for trees and way.
    """
    for rule in (*ON_CHAINS, *tree_paths.TREE_RULES):
        if rule in ON_CHAINS:
            styles: Sequence[str] = ["with replacement"]
        else:
            styles = [s for s in tree_paths.styles_of(rule) if s != tree_paths.GROWN]
        # Chains have one way, and as many cases as trees have with all of theirs.
        for style in styles:
            yield from _of_style(rule, style, per_style * (8 if rule in ON_CHAINS else 1))


def _of_style(rule: str, style: str, count: int) -> Iterator[dict[str, Any]]:
    made, seed = 0, 4 * hash_of(f"{rule} {style}")
    while made < count:
        # Multiples of 4: the others may have steep laws, which no grain holds.
        shape = CHAINS[seed // 4 % len(CHAINS)] if rule in ON_CHAINS else None
        case = random_case(seed, style, num_texts=3, grain=GRAIN, shape=shape)
        for b in range(len(case.trees)):
            if made < count and tree_paths.margin(rule_of_tree(rule), case, b) >= tree_paths.MARGIN:
                yield _written(rule, style, case, b, made)
                made += 1
        seed += 4


def rule_of_tree(rule: str) -> str:
    """The rule for trees that a rule for chains is on chains."""
    return {"token": "recursive", "block": "traversal"}.get(rule, rule)


def hash_of(text: str) -> int:
    """A number that is the same in every run."""
    return sum(ord(c) * 31**i for i, c in enumerate(text)) % 100_003


def _written(rule: str, style: str, case: Case, b: int, number: int) -> dict[str, Any]:
    tree, readings = case.trees[b], case.readings
    num, width = len(tree.tokens), case.target.shape[2]
    chance = readings.noise(b)
    depth = max((len(tree.path_tokens(row)) for row in range(num + 1)), default=0)
    address = (
        part[b].item() for part in (case.noise.seed_B, case.noise.sample_B, case.noise.anchor_B)
    )
    seed, sample, anchor = address
    return {
        "id": f"{rule}, {style}, {number}",
        "rule": rule,
        "tokens": list(tree.tokens),
        "parents": list(tree.parents),
        "kinds": [KINDS[kind] for kind in tree.kinds],
        "draft": [[float(mass) for mass in law] for law in tree.base],
        "target": case.target[b, : num + 1].tolist(),
        "noise": {
            "seed": seed % 2**64,
            "sample": sample,
            "anchor": anchor,
            "accept": [chance.test(j) for j in range(num)],
            "extra": [chance.extra(row) for row in range(num + 1)],
            "gumbel": readings.gumbels(b)[: depth + 1] if rule == "coupled" else [],
        },
        "vocabulary": width,
        "expect": outcome(rule, case, b),
    }


def outcome(rule: str, case: Case, b: int) -> dict[str, Any]:
    """What the reference decides."""
    round_ = case.round(b)
    if rule in ON_CHAINS:
        tree = round_.tree
        chain = Round(tree.tokens, round_.target, tree.base, round_.noise)
        found = ON_CHAINS[rule](chain)
        return {"path": list(range(1, found.kept + 1)), "token": found.token}
    tree_found = tree_paths.reference_of(rule)(round_)
    return {"path": list(tree_found.path), "token": tree_found.token}


def answer(case: Json) -> dict[str, Any]:
    """What Outrider's own rules decide; their noise comes from the case's address."""
    draft, target_BTV, chance = tensors(case)
    return told(RULES[case["rule"]].verify(draft, TargetLaws(target_BTV), chance))


def tensors(case: Json, dtype: torch.dtype = torch.float64) -> tuple[Draft, Tensor, RoundNoise]:
    """A case as a batch of one: the draft, the target's laws `[1, T, V]`, the noise's address."""
    laws, parents = case["draft"], case["parents"]
    # Siblings of one law share its row, by which rules know them.
    known = list(zip(parents, laws, strict=True))
    rows = [known.index(one) for one in known]
    named = {name: kind for kind, name in KINDS.items()}
    kinds = [named[name] for name in case["kinds"]]
    at = case["noise"]
    seed = at["seed"] - 2**64 * (at["seed"] >= 2**63)
    draft = Draft(
        TokenTree.of([case["tokens"]], [parents]),
        Law.dense(torch.tensor(laws or [[1.0] * case["vocabulary"]], dtype=dtype)),
        torch.tensor([rows], dtype=torch.int64),
        torch.tensor([kinds], dtype=torch.int64),
        frozenset(kinds),
    )
    chance = RoundNoise(*(torch.tensor([n]) for n in (seed, at["sample"], at["anchor"])))
    return draft, torch.tensor([case["target"]], dtype=dtype), chance


def told(verdict: Verdict) -> dict[str, Any]:
    """The answer of a batch of one."""
    kept = int(verdict.num_accepted_B[0])
    return {"path": verdict.path_BD[0, :kept].tolist(), "token": int(verdict.token_B[0])}


@dataclass(frozen=True, slots=True)
class Checked:
    """How an implementation did.

    Attributes:
        right, wrong, skipped: cases; skipped are those answered with null.
        failures: of each wrong one its id, what was due and what came, the first twenty.
    """

    right: int
    wrong: int
    skipped: int
    failures: tuple[tuple[str, Any, Any], ...]

    @property
    def ok(self) -> bool:
        """Whether something was right and nothing wrong."""
        return self.wrong == 0 and self.right > 0


def check(command: Sequence[str], cases: Iterable[Json], limit_s: float = LIMIT_S) -> Checked:
    """Gives a command all cases, a line of JSON each, and reads as many answers.

    Args:
        command: the program and its arguments.
        cases: with `expect`, which the command does not see.
        limit_s: seconds that all of it may take; then the command is ended, and what it started.

    Raises:
        InvalidConfig: a command that cannot be started, fails, takes longer, or answers too few
            lines.
    """
    every = list(cases)
    asked = "".join(
        json.dumps({name: value for name, value in case.items() if name != "expect"}) + "\n"
        for case in every
    )
    shown = " ".join(command)
    code, out, err = _ran(command, asked, limit_s, len(every))
    lines = [line for line in out.splitlines() if line.strip()]
    if code != 0 or len(lines) != len(every):
        said = err.strip().splitlines()[-1:] or ["it wrote nothing to standard error"]
        raise InvalidConfig(
            f"--check {shown!r} answered {len(lines)} of {len(every)} cases and ended with "
            f"{code}: {said[0]}"
        )
    return judged(every, [_parsed(shown, line) for line in lines])


def _ran(command: Sequence[str], asked: str, limit_s: float, count: int) -> tuple[int, str, str]:
    """Exit code and what was written to standard output and error."""
    shown = " ".join(command)
    pipe = subprocess.PIPE
    try:
        # In a group of its own, so that what it starts ends with it.
        started = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True
        )
    except OSError as error:
        raise InvalidConfig(f"--check {shown!r} cannot be started: {error}") from error
    with started as child:
        try:
            out, err = child.communicate(asked, limit_s)
        except subprocess.TimeoutExpired as error:
            raise InvalidConfig(
                f"--check {shown!r} did not answer {count} cases within {limit_s:g} s and was "
                "ended; give it more with --timeout, or does it wait for more than its standard "
                "input?"
            ) from error
        finally:
            _end(child)
    return child.returncode, out, err


def _end(child: subprocess.Popen[str]) -> None:
    if hasattr(os, "killpg"):
        # The group is gone where the command has ended and left nothing behind.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
    elif child.poll() is None:
        child.kill()
    child.wait()


def _parsed(shown: str, line: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise InvalidConfig(f"--check {shown!r} wrote {line[:80]!r}, which is no JSON") from error


def judged(cases: Sequence[Json], answers: Sequence[Any]) -> Checked:
    """Answers beside what was due; null skips a case."""
    pairs = list(zip(cases, answers, strict=True))
    skipped = sum(got is None for _, got in pairs)
    failures = [
        (case["id"], case["expect"], got)
        for case, got in pairs
        if got is not None and not _same(case["expect"], got)
    ]
    right = len(pairs) - skipped - len(failures)
    return Checked(right, len(failures), skipped, tuple(failures[:20]))


def _same(due: Json, got: Any) -> bool:
    return isinstance(got, dict) and all(got.get(name) == due[name] for name in ("path", "token"))
