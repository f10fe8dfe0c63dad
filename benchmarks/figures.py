"""From raw runs to medians with their spread, and ratios between them. Pure."""

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import backends
from machine import LOADS

GIB = 1 << 30
FIRST_SAVE = "first save, call + step"
Results = Mapping[str, Any]


@dataclass(frozen=True)
class Spread:
    """A median and the extremes around it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread":
        ordered = sorted(values)
        return cls(statistics.median(ordered), ordered[0], ordered[-1])


def _each(column: str) -> Callable[[Results], list[float]]:
    return lambda run: [save[column] for save in run["saves"]]


COLUMNS: dict[str, Callable[[Results], list[float]]] = {
    "call": _each("call_s"),
    "gate": _each("gate_s"),
    "first step": _each("first_step_s"),
    "other steps": _each("other_steps_s"),
    "lost": _each("lost_s"),
    "durable": _each("durable_s"),
    "durable x O_DIRECT": lambda run: [save["durable_s"] / save["direct_s"] for save in run["saves"]],
    "call + gate": lambda run: [save["call_s"] + save["gate_s"] for save in run["saves"]],
    FIRST_SAVE: lambda run: [sum(run["first"][part] for part in ("call_s", "gate_s", "first_step_s"))],
}


class Mode(NamedTuple):
    """Which loop, and what else the machine did."""

    training: str
    load: str

    def __str__(self) -> str:
        return f"{self.training}, {self.load}"

    @property
    def is_quiet(self) -> bool:
        return self.load == "quiet"


def _mode_of(run: Results) -> Mode:
    return Mode(run["training"], run["load"])


class Figures:
    """What one invocation of the benchmark measured.

    Args:
        results: as they are in the JSON file.
    """

    def __init__(self, results: Results) -> None:
        self.results = results
        self.loops = [run for run in results["loops"] if "error" not in run]
        self.modes = sorted(
            {_mode_of(run) for run in self.loops}, key=lambda mode: (mode.training, [*LOADS].index(mode.load))
        )
        self.ways = [way for way in backends.ENTRIES if any(run["way"] == way for run in self.loops)]

    def errors(self) -> dict[str, str]:
        """The first error of every way that failed."""
        found: dict[str, str] = {}
        for run in self.results["loops"]:
            if "error" in run:
                found.setdefault(run["way"], run["error"])
        return found

    def seconds(self, way: str, mode: Mode, column: str) -> Spread | None:
        """Over all saves of all rounds."""
        values = [s for run in self._runs(way, mode) for s in COLUMNS[column](run)]
        return Spread.of(values) if values else None

    def per_gib(self, way: str, mode: Mode, column: str) -> Spread | None:
        values = [s * GIB / run["state_bytes"] for run in self._runs(way, mode) for s in COLUMNS[column](run)]
        return Spread.of(values) if values else None

    def _runs(self, way: str, mode: Mode) -> list[Results]:
        return [run for run in self.loops if run["way"] == way and _mode_of(run) == mode]

    @property
    def state_bytes(self) -> int:
        runs = [*self.loops, *self.results["references"]]
        asked_for = self.results["settings"]["mebibytes"] << 20
        return int(next((run["state_bytes"] for run in runs if "error" not in run), asked_for))

    def reference(self, column: str, mode: Mode) -> Spread | None:
        """``memcpy_s``, ``first_touch_s`` or ``direct_write_s``."""
        runs = [run for run in self.results["references"] if run["load"] == mode.load and "error" not in run]
        values = [seconds for run in runs for seconds in run[column]]
        return Spread.of(values) if values else None

    def best_peer(
        self, column: str, mode: Mode, kinds: Iterable[str], *, copying_first: bool = False
    ) -> tuple[str, float] | None:
        """The peer with the lowest median, and that median.

        Args:
            column: of ``COLUMNS``.
            mode: in which it ran.
            kinds: of peers.
            copying_first: only those that copy the state before their call returns.
        """
        found = []
        for way in self.ways:
            spread, entry = self.seconds(way, mode, column), backends.ENTRIES[way]
            if entry.kind in kinds and spread and (entry.copies_first or not copying_first):
                found.append((spread.median, way))
        return (min(found)[1], min(found)[0]) if found else None

    def ratio(self, way: str, mode: Mode, column: str, base: float | None) -> float | None:
        """Of medians. None without a base; noise can make what was stolen negative, and then there is no ratio."""
        spread = self.seconds(way, mode, column)
        return spread.median / base if spread and base is not None and base > 0 else None

    def memory(self, way: str, column: str) -> int | None:
        """The most over all rounds without loaders, whose workers are children of the process as well."""
        runs = [run for run in self.loops if run["way"] == way and not LOADS[run["load"]].workers]
        return max((int(run["memory"][column]) for run in runs), default=None)


ASYNCHRONOUS = ("asynchronous peer",)


def ratios(figures: Figures, way: str, mode: Mode) -> dict[str, float | None]:
    """The columns of the table that compare."""

    def best(column: str, kinds: Iterable[str]) -> float | None:
        peer = figures.best_peer(column, mode, kinds)
        return peer[1] if peer else None

    def of(spread: Spread | None) -> float | None:
        return spread.median if spread else None

    memcpy = of(figures.reference("memcpy_s", mode))
    return {
        "lost x best async peer": figures.ratio(way, mode, "lost", best("lost", ASYNCHRONOUS)),
        "first save x best async peer": figures.ratio(way, mode, FIRST_SAVE, best(FIRST_SAVE, ASYNCHRONOUS)),
        # Each save against raw writes right before and after it.
        "durable x O_DIRECT": of(figures.seconds(way, mode, "durable x O_DIRECT")),
        "durable x best async peer": figures.ratio(way, mode, "durable", best("durable", ASYNCHRONOUS)),
        "call x memcpy": figures.ratio(way, mode, "call", memcpy),
    }
