"""One cell: every contender decodes the same prompts in turn and rests while another is timed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from outrider.bench.machine import QUIET
from outrider.bench.paired import order
from outrider.errors import InvalidConfig, ModelError, OutriderError


class Refused(OutriderError):
    """An engine does not do what it is asked for; the message is its own."""


class BusyMachine(InvalidConfig):
    """Others were at work in every try of a round."""


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be decoded: token ids, new tokens for each, and the one sampling chain.

    At a temperature above 0: the `top_k` likeliest, then the temperature, nothing else. Ends of
    texts are ignored.
    """

    prompts: tuple[tuple[int, ...], ...]
    tokens: int
    temperature: float
    top_k: int
    seed: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a contender made of a job; counts are None where it does not tell."""

    texts: tuple[tuple[int, ...], ...]
    seconds: float
    first_s: float | None = None
    rounds: int | None = None
    drafted: int | None = None
    accepted: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """For JSON: of the texts their number of tokens and what tells them apart."""
        return {
            "tokens": sum(map(len, self.texts)),
            "seconds": self.seconds,
            "first_s": self.first_s,
            "rounds": self.rounds,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "texts": [
                hashlib.sha256(json.dumps(list(text)).encode()).hexdigest()[:12]
                for text in self.texts
            ],
        }


class Contender(Protocol):
    """One arm, ready to decode."""

    name: str

    def run(self, job: Job) -> Outcome:
        """Decodes a job.

        Raises:
            Refused: the engine does not do this.
        """
        ...

    def rest(self) -> None:
        """Takes no processor until `wake`."""
        ...

    def wake(self) -> None:
        """Is about to run."""
        ...


Others = Callable[[], Callable[[], float | None]]
"""Begins to watch the machine; what it returns tells the share that others have taken since."""


@dataclass(frozen=True, slots=True)
class Round:
    """One job by all contenders: their outcomes, in the order they ran in."""

    number: int
    found: dict[str, Outcome]
    others: float | None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "number": self.number,
            "others": self.others,
            "found": {name: outcome.as_dict() for name, outcome in self.found.items()},
        }


@dataclass(frozen=True, slots=True)
class Warmed:
    """Who can do a job; who refuses it, and who failed at it, with the reasons.

    An engine that failed is in no known state: vLLM has been seen to wait for ever afterwards.
    """

    able: list[Contender]
    refused: dict[str, str]
    failed: dict[str, str]


def warm(contenders: Sequence[Contender], job: Job) -> Warmed:
    """One untimed job each."""
    found = Warmed([], {}, {})
    for contender in contenders:
        contender.wake()
        try:
            check(contender.name, contender.run(job), job)
            found.able.append(contender)
        except Refused as error:
            found.refused[contender.name] = str(error)
        except ModelError as error:
            found.failed[contender.name] = str(error)
        contender.rest()
    return found


def rounds(
    contenders: Sequence[Contender],
    jobs: Mapping[int, Job],
    others: Others,
    tick: Callable[[str], None],
    *,
    tries: int = 3,
    quiet: float = QUIET,
) -> Iterator[Round]:
    """Every job by all contenders, in their order on even numbers and backwards on odd ones.

    A round during which others took more of the processors than `quiet` is taken anew. `tick` is
    told before each what begins, and may raise TimeOver.

    Raises:
        BusyMachine: it was not quiet in any of several tries.
    """
    for number, job in jobs.items():
        for attempt in range(tries):
            tick(f"round {number}" + f", try {attempt + 1}" * bool(attempt))
            found, share = _round(contenders, job, number, others)
            if share is None or share <= quiet:
                yield Round(number, found, share)
                break
        else:
            raise BusyMachine(
                f"others took {share:.0%} of the processors in {tries} tries of one round; "
                "what was found so far is kept, go on when the machine is idle"
            )


def _round(
    contenders: Sequence[Contender], job: Job, number: int, others: Others
) -> tuple[dict[str, Outcome], float | None]:
    found: dict[str, Outcome] = {}
    share = others()
    for which in order(len(contenders), number, False):
        contender = contenders[which]
        contender.wake()
        try:
            found[contender.name] = check(contender.name, contender.run(job), job)
        finally:
            contender.rest()
    return found, share()


def check(name: str, outcome: Outcome, job: Job) -> Outcome:
    """The outcome, if it is the work that was asked for.

    Raises:
        ModelError: it is not.
    """
    lengths = [len(text) for text in outcome.texts]
    if lengths != [job.tokens] * len(job.prompts):
        raise ModelError(
            f"{name} made texts of {lengths} tokens where {len(job.prompts)} of {job.tokens} were "
            "asked for; unequal work is not compared"
        )
    return outcome


class TimeOver(Exception):
    """The time that the user gave is over; everything found is on disk."""
