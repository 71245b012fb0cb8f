"""An arena from its first engine to its last round: heats, their processes, and the record."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.arena.contest import (
    Contender,
    Job,
    Refused,
    TimeOver,
    rounds,
    warm,
)
from benchmarks.arena.engines import ANCHOR, DTYPES, ENGINES, FLOAT32, IMPOSED, Arm
from benchmarks.arena.grid import Cell, Stage
from benchmarks.arena.home import Home
from benchmarks.arena.process import Process, ProcessContender
from benchmarks.arena.record import Record
from outrider.bench.machine import QUIET, Neighbours
from outrider.errors import InvalidConfig, ModelError

CONTEXT, MAX_BATCH = 2560, 4
"""Room that every engine makes: tokens of a text, and texts."""

EVERYWHERE = "everywhere"
"""Where an arm is skipped that takes part nowhere."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What the rounds of one record have in common.

    Attributes:
        arms: `engine/name` of those that are to take part.
        pairs: rounds of a cell, forwards and backwards in turn.
        tokens: new tokens a prompt.
        k: drafted tokens a round, for everybody.
        threads: of every engine.
        top_k: of the sampling chain.
        memory_gb: what the processes of one heat may take together.
        dtype: of weights, activations and caches, one of DTYPES.
    """

    arms: tuple[str, ...]
    pairs: int = 16
    tokens: int = 64
    k: int = 4
    threads: int = 2
    top_k: int = 40
    memory_gb: float = 12.0
    dtype: str = FLOAT32

    def __post_init__(self) -> None:
        for name in self.arms:
            arm = Arm.of(name)
            if arm.engine not in ENGINES or arm.name not in ENGINES[arm.engine].arms:
                raise InvalidConfig(f"arm {name!r} does not exist; see --help for engines and arms")
        if self.dtype not in DTYPES:
            raise InvalidConfig(f"dtype {self.dtype!r}: all engines know {' and '.join(DTYPES)}")
        if self.pairs < 1 or self.tokens < 2 or self.k < 1:
            raise InvalidConfig(
                f"pairs={self.pairs}, tokens={self.tokens}, k={self.k}: at least 1 round, "
                "2 tokens a prompt and 1 drafted token are due"
            )


@dataclass(frozen=True, slots=True)
class Arena:
    """Everything a run needs.

    Attributes:
        texts: tokens that prompts are cut from.
        prepare: makes a stage's checkpoint and its conversions where they are missing.
        tell: is told, in a line, what begins.
        deadline: of `time.monotonic`, after which no round is begun.
        patient: whether to wait where others are at work instead of giving up.
        quiet: the share of the processors that others may take.
        only: numbers of the heats to be run now; None = all.
    """

    home: Home
    settings: Settings
    record: Record
    texts: Sequence[int]
    prepare: Callable[[Stage], None]
    tell: Callable[[str], None]
    deadline: float | None = None
    patient: bool = False
    quiet: float = QUIET
    only: tuple[int, ...] | None = None

    def play(self, cells: Sequence[Cell]) -> bool:
        """Every missing round of every cell; False where the time was over before.

        Raises:
            BusyMachine: others are at work, and nobody is patient.
        """
        try:
            for stage, group in itertools.groupby(cells, lambda cell: cell.stage):
                self._stage(stage, list(group))
        except TimeOver:
            return False
        return True

    def _stage(self, stage: Stage, cells: Sequence[Cell]) -> None:
        able = self.able(stage)
        self.prepare(stage)
        for number, heat in enumerate(heats(able, self._bytes(stage), self.settings.memory_gb)):
            missing = {cell: self._missing(cell, number) for cell in cells}
            if not any(missing.values()) or (self.only is not None and number not in self.only):
                continue
            with ExitStack() as ends:
                contenders, processes = self._started(stage, heat, ends)
                ends.callback(self._note_peaks, stage, contenders)
                for cell in (cell for cell, numbers in missing.items() if numbers):
                    failed = self._cell(cell, number, missing[cell], contenders, processes)
                    contenders = [one for one in contenders if one.name not in failed]
                    for name, why in failed.items():
                        self.record.skip(str(stage), name, why)

    def able(self, stage: Stage) -> list[Arm]:
        """Arms that take part; the record is told why others do not."""
        return [arm for arm in map(Arm.of, self.settings.arms) if self._takes_part(stage, arm)]

    def start(self, stage: Stage, engine: str, arms: Sequence[Arm]) -> Process:
        """A process with the stage's models, to be ended by whoever asked for it."""
        log = self.home.root / f"{engine}.log"
        return Process.start(self.home, engine, self._task(stage, arms), log)

    def _takes_part(self, stage: Stage, arm: Arm) -> bool:
        why = self.home.missing(arm.engine)
        if why is not None:
            self.record.skip(EVERYWHERE, str(arm), why)
            return False
        if stage.alpha is not None and arm.name not in IMPOSED.get(arm.engine, ()):
            if arm != arm.plain:
                self.record.skip(str(stage), str(arm), "acceptance cannot be imposed on it")
            return arm == arm.plain
        return True

    def _missing(self, cell: Cell, heat: int) -> list[int]:
        done = self.record.done(str(cell), str(heat))
        return [number for number in range(self.settings.pairs) if number not in done]

    def _started(
        self, stage: Stage, heat: Sequence[Arm], ends: ExitStack
    ) -> tuple[list[Contender], list[Process]]:
        contenders: list[Contender] = []
        processes: list[Process] = []
        unable: dict[str, Refused] = {}
        for engine, arms in shared(heat):
            self.tell(f"starting {engine}: {', '.join(arm.name for arm in arms)}")
            share = Neighbours(lambda: sum(process.seconds() for process in processes))
            try:
                if engine in unable:
                    raise unable[engine]
                process = self.start(stage, engine, arms)
            except (Refused, ModelError) as error:
                # Who refuses as a whole is not asked again for its other arms.
                unable |= {engine: error} if isinstance(error, Refused) else {}
                for arm in arms:
                    self.record.skip(str(stage), str(arm), str(error))
                continue
            ends.callback(process.end)
            processes.append(process)
            others = share.share()
            process.rest()
            for arm in arms:
                known = {"startup_s": process.startup_s, "startup_others": others}
                self.record.arm(str(stage), str(arm), **known, **process.about)
                contenders.append(ProcessContender(str(arm), arm.name, process))
        self.record.save()
        return contenders, processes

    def _task(self, stage: Stage, arms: Sequence[Arm]) -> dict[str, Any]:
        folder = self.home.checkpoint(stage.checkpoint)
        return {
            "arms": [arm.name for arm in arms],
            "target": str(folder / "target"),
            "draft": str(folder / f"draft-{stage.cost:g}"),
            "server": str(self.home.llama_server),
            "alpha": stage.alpha,
            "threads": self.settings.threads,
            "k": self.settings.k,
            "dtype": self.settings.dtype,
            "kind": DTYPES[self.settings.dtype],
            "context": CONTEXT,
            "batch": MAX_BATCH,
        }

    def _cell(
        self,
        cell: Cell,
        heat: int,
        missing: Sequence[int],
        contenders: Sequence[Contender],
        processes: Sequence[Process],
    ) -> dict[str, str]:
        """The missing rounds of a cell; returns the arms that failed in warming up, and why."""
        self.tell(f"{cell}, heat {heat}")
        jobs = {number: self._job(cell, number) for number in missing}
        self._quiet(processes)
        warmed = warm(contenders, self._job(cell, self.settings.pairs))
        for name, why in (warmed.refused | warmed.failed).items():
            self.record.skip(str(cell), name, why)

        def others() -> Callable[[], float | None]:
            return Neighbours(lambda: sum(process.seconds() for process in processes)).share

        def tick(what: str) -> None:
            if self.deadline is not None and time.monotonic() > self.deadline:
                raise TimeOver
            self._quiet(processes)
            self.tell(f"{cell}, heat {heat}, {what}")

        tries = 1000 if self.patient else 3
        for found in rounds(warmed.able, jobs, others, tick, tries=tries, quiet=self.quiet):
            self.record.add(str(cell), str(heat), found, clocks_mhz())
        return warmed.failed

    def _quiet(self, processes: Sequence[Process]) -> None:
        """Where one is patient, comes back when nobody else is at work or the time is over."""
        while self.patient:
            watch = Neighbours(lambda: sum(process.seconds() for process in processes))
            time.sleep(0.5)
            share = watch.share()
            if share is None or share <= self.quiet:
                return
            if self.deadline is not None and time.monotonic() > self.deadline:
                raise TimeOver

    def _job(self, cell: Cell, number: int) -> Job:
        return Job(
            prompts(self.texts, cell.prompt_tokens, cell.batch, number, self.settings.pairs + 1),
            self.settings.tokens,
            cell.temperature,
            self.settings.top_k,
            seed=1000 * number,
        )

    def _note_peaks(self, stage: Stage, contenders: Sequence[Contender]) -> None:
        for contender in contenders:
            if isinstance(contender, ProcessContender):
                peak = contender.process.peak_bytes()
                self.record.arm(str(stage), contender.name, peak_bytes=peak)

    def _bytes(self, stage: Stage) -> int:
        folder = self.home.checkpoint(stage.checkpoint) / "target"
        # Float32 files: who computes in half of that reads them whole all the same.
        return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def shared(heat: Sequence[Arm]) -> Iterator[tuple[str, list[Arm]]]:
    """The processes of a heat: all arms of an engine that shares its weights, else one each."""
    for engine in dict.fromkeys(arm.engine for arm in heat):
        arms = [arm for arm in heat if arm.engine == engine]
        if ENGINES[engine].shared:
            yield engine, arms
        else:
            yield from ((engine, [arm]) for arm in arms)


def heats(arms: Sequence[Arm], weights: int, memory_gb: float) -> list[list[Arm]]:
    """Arms that fit into memory together, in their order; the anchor is in every heat.

    One that would not fit with the anchor alone has a heat with it all the same.
    """
    found: list[list[Arm]] = []
    anchor = [ANCHOR] if ANCHOR in arms else []
    for _, group in shared(arms):
        last = found[-1] if found else None
        if last is None or taken([*last, *group], weights) > memory_gb * 1e9:
            found.append([*(arm for arm in anchor if arm not in group), *group])
        else:
            last += [arm for arm in group if arm not in last]
    return found


def taken(arms: Sequence[Arm], weights: int) -> float:
    """A guess of the bytes that the processes of these arms hold."""
    return sum(
        ENGINES[engine].base_mb * 1e6 + ENGINES[engine].copies * weights
        for engine, _ in shared(arms)
    )


def prompts(
    texts: Sequence[int], length: int, batch: int, number: int, of: int
) -> tuple[tuple[int, ...], ...]:
    """A round's prompts: pieces of the tokens, another one for every round and row."""
    starts = [(number * batch + row) * len(texts) // (of * batch) for row in range(batch)]
    return tuple(tuple(texts[(start + i) % len(texts)] for i in range(length)) for start in starts)


def clocks_mhz() -> float | None:
    """The mean clock of the processors now; None where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return None
    found = [float(line.split(":")[1]) for line in lines if line.startswith("cpu MHz")]
    return sum(found) / len(found) if found else None
