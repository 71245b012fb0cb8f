"""Whether everybody samples from one law: short texts, counted.

The same prompt is continued many times by a few tokens. Texts of an arm are compared with as many
by Outrider's plain decoding, which with other seeds is the control. The p-value is a permutation
test's, of the total variation between the two samples. Where an arm's is tiny, either its chain of
sampling controls is another one, or its speculation does not follow the target.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.arena.contest import Contender, Job, Refused
from benchmarks.arena.engines import ANCHOR
from benchmarks.arena.grid import Stage
from benchmarks.arena.play import Arena, shared
from benchmarks.arena.process import ProcessContender
from outrider.errors import ModelError

PERMUTATIONS = 1000
TOKENS, TOP_K = 3, 4
Text = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Two samples of texts, compared.

    Attributes:
        distance: total variation between the two samples' counts.
        control: the same between two samples of Outrider's plain decoding.
        p_value: how often a random split of both samples together is as far apart.
    """

    arm: str
    texts: int
    distance: float
    control: float
    p_value: float


def verdicts(arena: Arena, stage: Stage, texts: int, length: int = 32) -> Iterator[Verdict]:
    """Every arm of an arena, one process after another; who does not take part is left out."""
    prompt = arena.texts[:length]
    known: list[list[Text]] = []
    arms = [ANCHOR, *(arm for arm in arena.able(stage) if arm != ANCHOR)]
    for engine, own in shared(arms):
        arena.tell(f"{engine}: {', '.join(arm.name for arm in own)}")
        try:
            process = arena.start(stage, engine, own)
        except (Refused, ModelError) as error:
            arena.tell(f"{engine}: {error}")
            continue
        for arm in own:
            contender = ProcessContender(str(arm), arm.name, process)
            if arm == ANCHOR:
                known = [sampled(contender, prompt, texts, seed) for seed in (0, 10**6)]
            yield compare(str(arm), *known, sampled(contender, prompt, texts, 2 * 10**6))
        process.end()


def sampled(contender: Contender, prompt: Sequence[int], texts: int, seed: int) -> list[Text]:
    """The second and third new token of many texts; the first one no drafter has touched."""
    found: list[Text] = []
    contender.wake()
    # One at a time: in a batch some engines begin every text's chance at the same seed.
    for number in range(texts):
        job = Job((tuple(prompt),), TOKENS, 1.0, TOP_K, seed + number)
        found += [text[1:3] for text in contender.run(job).texts]
    contender.rest()
    return found


def compare(
    arm: str, plain: Sequence[Text], again: Sequence[Text], found: Sequence[Text]
) -> Verdict:
    """Texts of an arm with two samples of Outrider's plain decoding."""
    kinds = {text: number for number, text in enumerate({*plain, *again, *found})}
    one, other = (np.asarray([kinds[text] for text in texts]) for texts in (plain, found))
    distance = variation(one, other, len(kinds))
    draw, both = np.random.default_rng(0), np.concatenate([one, other])
    further = 0
    for _ in range(PERMUTATIONS):
        draw.shuffle(both)
        further += variation(both[: len(one)], both[len(one) :], len(kinds)) >= distance
    control = variation(one, np.asarray([kinds[text] for text in again]), len(kinds))
    return Verdict(arm, len(found), distance, control, (1 + further) / (1 + PERMUTATIONS))


def variation(one: np.ndarray, other: np.ndarray, kinds: int) -> float:
    """Total variation between the counts of two samples."""
    shares = [np.bincount(sample, minlength=kinds) / len(sample) for sample in (one, other)]
    return float(np.abs(shares[0] - shares[1]).sum() / 2)
