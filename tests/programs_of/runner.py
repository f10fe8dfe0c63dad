"""Runs programs of one kind, counts what they came to, and cuts a failing one down to the choices that it needs."""

from __future__ import annotations

import dataclasses
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Protocol

from programs_of.draw import Draw

WITH_STOCK = ("lightning", "accelerate", "transformers")
"""Kinds whose programs also run with the framework's own checkpoints."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a program came to.

    Attributes:
        came_to: in a word or two, counted: "equal", "refused at the save".
        wrong: what is not as promised, in a line whose part before the first colon says the kind; empty if all is right.
        detail: more of it, for a reader.
    """

    came_to: str
    wrong: str = ""
    detail: str = ""

    @property
    def kind(self) -> str:
        """Of what is wrong: a smaller program must be wrong in the same way."""
        return self.wrong.partition(":")[0]


class Kind(Protocol):
    """Programs of one kind."""

    def run(self, draw: Draw, folder: Path) -> Verdict:
        """Make the program that this draw says, run it in this empty folder, and judge it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """One program that was run: its choices as they were made and as text, what it came to, and how long it took in seconds."""

    seed: int
    made: Mapping[str, int]
    told: Mapping[str, str]
    verdict: Verdict
    took_s: float


def run(kind: Kind, seed: int, fixed: Mapping[str, int] | None = None) -> Result:
    """Run one program. An error that no program expects is wrong, too."""
    draw, begun = Draw(seed, fixed), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="program-") as folder:
        try:
            verdict = kind.run(draw, Path(folder))
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            wrong = f"{type(error).__name__} in {Path(where.filename).name}: {error}"
            verdict = Verdict(came_to="an error", wrong=wrong, detail=traceback.format_exc())
    return Result(seed=seed, made=draw.made, told=draw.told, verdict=verdict, took_s=time.monotonic() - begun)


def many(kind: Kind, seeds: range, processes: int) -> Iterator[Result]:
    """Run these, in their order; with 1 process, in this one."""
    if processes == 1:
        yield from (run(kind, seed) for seed in seeds)
        return
    with ProcessPoolExecutor(processes, get_context("spawn"), initializer=_begin) as pool:
        yield from pool.map(run, [kind] * len(seeds), seeds)


def _begin() -> None:
    import torch

    torch.set_num_threads(1)


def shrink(kind: Kind, failed: Result, *, at_most: int = 200, told: Callable[[str], None] = lambda _: None) -> Result:
    """The same kind of failure with as many choices as possible taken back to their simplest option."""
    small, tries = failed, 0
    size = max(1, len(small.made) // 2)
    while size:
        names = [name for name, number in small.made.items() if number]
        for begin in range(0, len(names), size):
            if tries == at_most:
                return small
            tries += 1
            again = run(kind, small.seed, {**small.made, **dict.fromkeys(names[begin : begin + size], 0)})
            if again.verdict.kind == failed.verdict.kind:
                small = again
                told(f"{sum(map(bool, small.made.values()))} choices are left")
        size //= 2
    return small


@dataclasses.dataclass
class Total:
    """What many programs came to."""

    programs: int = 0
    took_s: float = 0.0
    came_to: Counter[str] = dataclasses.field(default_factory=Counter)
    options: Counter[tuple[str, str]] = dataclasses.field(default_factory=Counter)
    failed: list[Result] = dataclasses.field(default_factory=list)

    def add(self, result: Result) -> None:
        """Count one."""
        self.programs += 1
        self.took_s += result.took_s
        self.came_to[result.verdict.came_to] += 1
        self.options.update((name.rpartition("/")[2], told) for name, told in result.told.items())
        if result.verdict.wrong:
            self.failed.append(result)

    def lines(self) -> list[str]:
        """For a person."""
        counts = ", ".join(f"{number} {what}" for what, number in self.came_to.most_common())
        return [f"{self.programs} programs in {self.took_s:.0f} s: {counts}; {len(self.failed)} wrong"]


def lines_of(result: Result, *, every: bool = False) -> list[str]:
    """A program for a person: its choices, or those that are not the simplest, and what is wrong."""
    rows = [f"  {name} = {told}" for name, told in result.told.items() if every or result.made[name]]
    verdict = result.verdict
    said = [f"  WRONG {verdict.wrong}"] if verdict.wrong else [f"  {verdict.came_to}"]
    lines = [f"seed {result.seed} ({result.took_s:.1f} s)", *rows, *said, *([verdict.detail] if verdict.detail else [])]
    return [line.encode(errors="backslashreplace").decode() for line in lines]


def kinds() -> dict[str, Callable[[], Any]]:
    """Name -> what makes the kind. What a kind imports is imported with it."""

    def of(module: str, name: str) -> Callable[[], Any]:
        def make(**options: Any) -> Any:
            return getattr(__import__(f"programs_of.{module}", fromlist=[name]), name)(**options)

        return make

    return {
        "states": of("states", "States"),
        "loaders": of("loaders", "Loaders"),
        "loops": of("loops", "Loops"),
        "ranks": of("ranks", "Ranks"),
        "fits": of("fits", "Fits"),
        "prepared": of("prepared", "Prepared"),
        "sharded": of("sharded", "Sharded"),
        "lightning": of("lightning_", "Lightning"),
        "accelerate": of("accelerate_", "Accelerated"),
        "transformers": of("trainers", "Trained"),
        "trained": of("trained", "TrainedHere"),
    }
