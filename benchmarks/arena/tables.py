"""What an arena found, as rows with intervals and as Markdown.

Within a heat arms are compared round by round. Arms of different heats are compared through the
anchor that ran in both: each heat gives rounds of an arm over the anchor, and the two geometric
means are divided.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.arena.engines import ANCHOR, ENGINES, FLOAT32, OURS, SHARED, Arm
from outrider.bench.machine import QUIET
from outrider.bench.paired import RESAMPLES, Interval
from outrider.errors import InvalidConfig


@dataclass(frozen=True, slots=True)
class Row:
    """One arm in one cell.

    Attributes:
        rate: new tokens per second of the whole call, prompts' reading included, over rounds.
        over_plain: rate over that of the same engine's plain decoding.
        best_peer: the fastest arm of any other engine, of the same precision and a right law.
        over_peer: rate over the best peer's.
        kept: tokens per forward of the target, 1 + what was accepted on average.
        first_s: until the first new token, the median.
        equal: texts with the tokens of the same engine's plain decoding, and of how many.
        wrong: what is known against the arm's law.
    """

    arm: Arm
    rounds: int
    rate: Interval
    over_plain: Interval | None
    best_peer: Arm | None
    over_peer: Interval | None
    kept: float | None
    first_s: float | None
    equal: tuple[int, int] | None
    wrong: str | None
    peak_bytes: int | None
    startup_s: float | None


@dataclass(frozen=True, slots=True)
class Track:
    """The rounds of one arm in one cell: of which heat, and the outcomes by number."""

    arm: Arm
    heat: str
    found: Mapping[str, Mapping[str, Any]]

    def rates(self) -> list[float]:
        """New tokens per second, round by round."""
        return [one["tokens"] / one["seconds"] for one in self.found.values()]


def ratio(one: Track, other: Track, anchors: Mapping[str, Track]) -> Interval | None:
    """How many times the rate of `other` is that of `one`'s: an interval of 95 %.

    None where they have no round in common, directly or through the anchor.
    """
    if one.heat == other.heat:
        logs = _logs(one, other)
        return Interval.of(np.exp(logs).tolist()) if len(logs) else None
    ours = _logs(one, anchors[one.heat]) if one.heat in anchors else []
    theirs = _logs(other, anchors[other.heat]) if other.heat in anchors else []
    if not len(ours) or not len(theirs):
        return None
    draw = np.random.default_rng(0)
    means = [
        logs[draw.integers(0, len(logs), (RESAMPLES, len(logs)))].mean(1)
        for logs in (np.asarray(ours), np.asarray(theirs))
    ]
    low, high = np.exp(np.quantile(means[0] - means[1], (0.025, 0.975)))
    median = float(np.exp(np.median(ours) - np.median(theirs)))
    mean = float(np.exp(np.mean(ours) - np.mean(theirs)))
    return Interval(min(len(ours), len(theirs)), median, mean, float(low), float(high))


def _logs(one: Track, other: Track) -> np.ndarray:
    """Logarithms of the ratios of rates in the rounds that both ran in."""
    both = [number for number in one.found if number in other.found]
    rates = [
        np.asarray([track.found[n]["tokens"] / track.found[n]["seconds"] for n in both])
        for track in (one, other)
    ]
    return np.log(rates[0]) - np.log(rates[1])


@dataclass(frozen=True, slots=True)
class Found:
    """A record, read."""

    record: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> Found:
        """From what `run` wrote.

        Raises:
            InvalidConfig: there is no record.
        """
        try:
            record = json.loads(path.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise InvalidConfig(f"{path}: no record of the arena's ({error})") from error
        if not isinstance(record, dict) or "cells" not in record:
            raise InvalidConfig(f"{path}: no record of the arena's; `run --json` writes one")
        return cls(record)

    @property
    def cells(self) -> list[str]:
        """Names of the cells with rounds."""
        return list(self.record["cells"])

    def rows(self, cell: str) -> list[Row]:
        """All arms of a cell, in the order of the engines."""
        tracks, anchors = self._tracks(cell)
        return [self._row(cell, track, tracks, anchors) for track in tracks]

    def alpha_of(self, cell: str) -> float | None:
        """The acceptance imposed in a cell."""
        words = dict(word.split("=") for word in cell.split() if "=" in word)
        return float(words["alpha"]) if "alpha" in words else None

    def cost_of(self, cell: str) -> float | None:
        """The cost ratio that Outrider measured of the cell's draft model."""
        known = self.record["stages"].get(self._stage(cell), {})
        return next((arm["cost_ratio"] for arm in known.values() if arm.get("cost_ratio")), None)

    def skipped(self, cell: str) -> dict[str, str]:
        """Arms that are not in a cell, and why."""
        everywhere = self.record["skipped"].get("everywhere", {})
        stage = self.record["skipped"].get(self._stage(cell), {})
        known = everywhere | stage | self.record["skipped"].get(cell, {})
        # What failed in a later cell may have had its rounds in this one.
        taking = {str(track.arm) for track in self._tracks(cell)[0]}
        return {arm: why for arm, why in known.items() if arm not in taking}

    def markdown(self, name: str) -> str:
        """A table for each cell, and the conditions."""
        parts = [
            f"### {cell}\n\n{table(self.rows(cell))}\n\n{self._notes(cell)}" for cell in self.cells
        ]
        return "\n\n".join([*parts, self.conditions(name)])

    def conditions(self, name: str) -> str:
        """How and where the numbers were taken, in lines."""
        settings, here = self.record["settings"], self.record["machine"]
        rounds = [r for c in self.record["cells"].values() for h in c.values() for r in h.values()]
        clocks = [r["clocks_mhz"] for r in rounds if r["clocks_mhz"]]
        others = [r["others"] for r in rounds if r["others"] is not None]
        versions = sorted(
            {arm["version"] for stage in self.record["stages"].values() for arm in stage.values()}
        )
        loads = " / ".join(
            f"{machine['load_average'][0]:.2f}" for machine in self.record["machines"]
        )
        lines = [
            f"`{self.record['commands'][0]}` ({name}), begun {len(self.record['commands'])} times; "
            f"{settings['pairs']} rounds a cell, A B C and C B A in turn; {settings['tokens']} new "
            f"tokens a prompt, {settings.get('dtype', FLOAT32)}, k = {settings['k']}, "
            f"{settings['threads']} threads, top_k = "
            f"{settings['top_k']} and then the temperature, where it is above 0.",
            f"{here['processor']}, {here['num_cpus']} processors, {here['capability']}; "
            f"{here['system']}, Python {here['python']}.",
            "; ".join(versions) + ".",
            f"Load average at each begin {loads}; others' share of the processors in a round at "
            f"most {max(others, default=0):.0%}; clocks {min(clocks, default=0):.0f} to "
            f"{max(clocks, default=0):.0f} MHz.",
            f"8 bit: {self._absent()}.",
            "Brackets: bootstrap 95 % interval of the geometric mean over rounds.",
        ]
        return "\n".join(f"* {line}" for line in lines)

    def _absent(self) -> str:
        """Why some engines have no arm of 8-bit weights."""
        taking = {Arm.of(arm).engine for arm in self.record["settings"].get("arms", ())}
        absent = [
            f"`{name}`: {ENGINES[name].without_8_bit}"
            for name in ENGINES
            if name in taking and ENGINES[name].without_8_bit
        ]
        return "; ".join(absent) or "every engine has an arm"

    def _stage(self, cell: str) -> str:
        return cell.partition(" T=")[0]

    def _tracks(self, cell: str) -> tuple[list[Track], dict[str, Track]]:
        tracks: list[Track] = []
        anchors: dict[str, Track] = {}
        for heat, rounds in self.record["cells"][cell].items():
            names = dict.fromkeys(name for one in rounds.values() for name in one["found"])
            for name in names:
                found = {n: one["found"][name] for n, one in rounds.items() if name in one["found"]}
                track = Track(Arm.of(name), heat, found)
                if track.arm == ANCHOR:
                    anchors[heat] = track
                if track.arm not in [known.arm for known in tracks]:
                    tracks.append(track)
        places = list(ENGINES)
        tracks.sort(key=lambda t: (places.index(t.arm.engine), _place(t.arm)))
        return tracks, anchors

    def _row(
        self, cell: str, track: Track, tracks: Sequence[Track], anchors: Mapping[str, Track]
    ) -> Row:
        arm, temperature = track.arm, float(cell.partition(" T=")[2].split()[0])
        plain = next((one for one in tracks if one.arm == arm.plain), None)
        own = plain if plain is not None and arm != arm.plain else None
        peer = best_peer(track, tracks, anchors, temperature)
        known = self.record["stages"].get(self._stage(cell), {}).get(str(arm), {})
        outcomes = list(track.found.values())
        firsts = [one["first_s"] for one in outcomes if one["first_s"] is not None]
        return Row(
            arm,
            len(outcomes),
            Interval.of(track.rates()),
            ratio(track, own, anchors) if own else None,
            peer.arm if peer else None,
            ratio(track, peer, anchors) if peer else None,
            kept(outcomes),
            float(np.median(firsts)) if firsts else None,
            equal(track, own) if own and temperature == 0 else None,
            arm.wrong(temperature),
            known.get("peak_bytes"),
            known.get("startup_s") if quiet(known.get("startup_others")) else None,
        )

    def _notes(self, cell: str) -> str:
        lines = [f"`{row.arm}`: {row.wrong}" for row in self.rows(cell) if row.wrong]
        lines += [f"`{arm}` skipped: {why}" for arm, why in self.skipped(cell).items()]
        return "\n".join(f"* {line}." for line in lines)


def best_peer(
    track: Track, tracks: Sequence[Track], anchors: Mapping[str, Track], temperature: float
) -> Track | None:
    """The fastest arm of other projects, of the same precision, whose law is not known wrong."""
    ours = track.arm.engine in OURS
    peers = [
        one
        for one in tracks
        if one.arm.precision == track.arm.precision
        and one.arm.engine != track.arm.engine
        and not (ours and one.arm.engine in OURS)
        and one.arm.wrong(temperature) is None
    ]
    speeds = [(over.mean, one) for one in peers if (over := ratio(one, track, anchors))]
    return max(speeds, key=lambda pair: pair[0])[1] if speeds else None


def quiet(others: float | None) -> bool:
    """Whether a figure was taken on a machine that nobody else used, as far as is known."""
    return others is None or others <= QUIET


def kept(outcomes: Sequence[Mapping[str, Any]]) -> float | None:
    """Tokens per forward of the target: each forward adds one to what it accepts."""
    known = [one for one in outcomes if one["accepted"] is not None]
    tokens = sum(one["tokens"] for one in known)
    return tokens / (tokens - sum(one["accepted"] for one in known)) if known else None


def equal(track: Track, plain: Track) -> tuple[int, int]:
    """Texts with the same tokens as plain decoding's, and of how many."""
    pairs = [
        texts
        for number, one in track.found.items()
        if number in plain.found
        for texts in zip(one["texts"], plain.found[number]["texts"], strict=True)
    ]
    return sum(a == b for a, b in pairs), len(pairs)


def table(rows: Sequence[Row]) -> str:
    """One line per arm."""
    head = (
        "engine", "arm", "tokens/s", "over own plain", "over best peer", "best peer",
        "tokens a forward", "first token, s", "peak MB", "start-up, s", "tokens equal", "rounds",
    )  # fmt: skip
    lines = [head, ["---"] * len(head), *(_line(row) for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _line(row: Row) -> list[str]:
    name = row.arm.name + (", 8 bit" if row.arm.precision != SHARED else "")
    return [
        row.arm.engine,
        name + (" (law known wrong)" if row.wrong else ""),
        _interval(row.rate, 1),
        _interval(row.over_plain),
        _interval(row.over_peer),
        "" if row.best_peer is None else str(row.best_peer),
        _number(row.kept, 2),
        _number(row.first_s, 2),
        _number(row.peak_bytes and row.peak_bytes / 1e6, 0),
        _number(row.startup_s, 1),
        "" if row.equal is None else f"{row.equal[0]}/{row.equal[1]}",
        str(row.rounds),
    ]


def _interval(found: Interval | None, digits: int = 2) -> str:
    if found is None:
        return ""
    return f"{found.mean:.{digits}f} [{found.low:.{digits}f}, {found.high:.{digits}f}]"


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _place(arm: Arm) -> int:
    arms = ENGINES[arm.engine].arms
    return arms.index(arm.name) if arm.name in arms else len(arms)
