"""Programs of frameworks: run whole, killed and started again; what they tell of their steps is compared."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kit import warm
from programs_of.draw import Draw
from programs_of.runner import Verdict
from safe_ckpt.tools.audit.compare import Run, category_of, compare, compared_values, differing, matching_line

_START = str(Path(__file__).with_name("start.py"))


@dataclass(frozen=True, kw_only=True)
class Kill:
    """SIGKILL to a rank, and then to all others: behind its ``number``-th step ("step"), or when it meets ``what`` so often."""

    what: str
    number: int
    rank: int = 0


def kills_of(draw: Draw, *more: str, steps: int = 9, ranks: int = 1, least: int = 1) -> list[Kill]:
    """One or two: behind a step, at a rename or a removal within a save, or at what else the program meets."""
    found = []
    for n in range(draw.number("kills", 1, 2)):
        what = draw.among(f"kill {n}", "step", "rename", "remove", *more)
        number = draw.number(f"at {n}", least, steps if what in ("step", *more) else 20)
        found.append(Kill(what=what, number=number, rank=draw.among(f"kills rank {n}", *range(ranks))))
    return found


@dataclass(frozen=True, kw_only=True)
class Started:
    """How a start ended.

    Attributes:
        codes: exit codes of its ranks.
        lines: rank -> what it told of its optimizer steps.
        told: rank -> its other lines.
        said: what was printed on the standard error, by all ranks.
    """

    codes: tuple[int, ...]
    lines: Run
    told: Mapping[int, Sequence[Mapping[str, Any]]]
    said: str

    @property
    def killed(self) -> bool:
        """Whether it was killed, as it was told."""
        return -signal.SIGKILL in self.codes

    @property
    def error(self) -> str:
        """The last line of what it said; empty if it came to its end."""
        if self.killed or not any(self.codes):
            return ""
        return next((line for line in reversed(self.said.splitlines()) if line and line[0] != " "), str(self.codes))

    def results(self) -> dict[str, Any]:
        """Of all ranks."""
        return {
            f"{line['result']} of rank {rank}": line["value"]
            for rank, lines in self.told.items()
            for line in lines
            if "result" in line
        }

    def events(self, rank: int, position: int) -> list[str]:
        """Of a rank, behind so many optimizer steps."""
        return [line["event"] for line in self.told.get(rank, ()) if line.get("position", -1) > position]

    def notes(self, name: str, rank: int = 0) -> list[Any]:
        """In their order."""
        return [line["value"] for line in self.told[rank] if line.get("note") == name]


def start(
    kind: str, draw: Draw, folder: Path, name: str, *, out: str, number: int = 0, kill: Kill | None = None, ranks: int = 1,
    stock: bool = False, more: Mapping[str, Any] | None = None, timeout_s: float = 180.0,
) -> Started:  # fmt: skip
    """Start a program: with more than one rank each has RANK, WORLD_SIZE and LOCAL_RANK.

    Raises:
        TimeoutError: it does not end.
    """
    records = folder / f"{name}.steps"
    records.mkdir()
    (folder / out).mkdir(exist_ok=True)
    given = {
        "seed": draw.seed, "fixed": draw.made, "out": str(folder / out), "records": str(records), "stock": stock,
        "number": number, "kill": None if kill is None else asdict(kill), "more": dict(more or {}),
    }  # fmt: skip
    (folder / f"{name}.json").write_text(json.dumps(given), encoding="utf-8")
    said = folder / f"{name}.said"
    with said.open("wb") as errors:
        processes = [
            warm.Popen(
                [sys.executable, _START, kind, str(folder / f"{name}.json")], stdout=errors, stderr=errors,
                env=_environment(rank, ranks), cwd=folder,
            )
            for rank in range(ranks)
        ]  # fmt: skip
        codes = _wait(processes, timeout_s, said)
    return Started(codes=codes, lines=_lines(records), told=_told(records), said=said.read_text(errors="replace"))


def _environment(rank: int, ranks: int) -> dict[str, str]:
    more = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)} if ranks > 1 else {}
    return {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **more}


def _wait(processes: Sequence[subprocess.Popen[bytes]], timeout_s: float, said: Path) -> tuple[int, ...]:
    """Where one is killed the others are, too, as launchers do it."""
    deadline = time.monotonic() + timeout_s
    try:
        while None in (codes := [one.poll() for one in processes]):  # of all, not only up to the first that runs
            if -signal.SIGKILL in codes:
                break
            if time.monotonic() > deadline:
                last = said.read_text(errors="replace")[-2000:]
                raise TimeoutError(f"a start did not end within {timeout_s:.0f} s: {last}")
            with contextlib.suppress(subprocess.TimeoutExpired):
                next(one for one in processes if one.returncode is None).wait(0.05)
    finally:
        for one in processes:
            if one.poll() is None:
                one.kill()
    return tuple(one.wait() for one in processes)


def _read(file: Path) -> list[dict[str, Any]]:
    """A line that was being written when it was killed is none."""
    found = []
    for line in file.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found


def _lines(records: Path) -> Run:
    found: dict[int, list[dict[str, Any]]] = {}
    for file in records.glob("[0-9]*.jsonl"):
        lines = _read(file)
        if lines and len(lines) > len(found.get(lines[0]["rank"], [])):
            found[lines[0]["rank"]] = lines
    return found


def _told(records: Path) -> dict[int, list[dict[str, Any]]]:
    return {int(file.stem.partition("-")[2]): _read(file) for file in records.glob("told-*.jsonl")}


def failed(one: Started) -> Verdict:
    """A start that ended with an error."""
    return Verdict(came_to="an error", wrong=re.sub(r"^\[rank\d+\]: ", "", one.error), detail=one.said[-3000:])


def began_anew(there: Sequence[str], one: Started) -> list[str]:
    """Where a start that notes where it ``begins`` did so at 0, although these were committed."""
    return [f"began anew: {there} were committed"] if there and one.notes("begins") == [0] else []


def differences(whole: Run, resumed: Run, ignored: frozenset[str] = frozenset()) -> list[str]:
    """What the steps of a start say that is not so in the whole run, as ``category: names ...``; none if it made no step.

    A start that began at the beginning is compared, too: whether it may is for the kind to say.
    """
    if not resumed:
        return []
    first = min(resumed)
    at = matching_line(whole[first], resumed[first][0])
    if at != 0:
        return [
            f"{one.category}: {', '.join(one.names[:4])} at step {one.step} "
            f"(resumed at {one.resumed_at}, rank {one.rank}, {one.detail})"
            for one in compare(whole, resumed, ignored).findings
        ]
    found: dict[str, str] = {}
    for rank in sorted(whole.keys() & resumed.keys()):
        for number, (one, other) in enumerate(zip(whole[rank], resumed[rank], strict=False), start=1):
            for name in differing(compared_values(one), compared_values(other)):
                if name not in ignored:
                    found.setdefault(
                        category_of(name), f"{category_of(name)}: {name} at step {number} of a fresh start"
                    )
    return list(found.values())


def events_behind(whole: Started, resumed: Started, position: int) -> list[str]:
    """The first event of a rank that comes in another order than in the whole run, behind so many optimizer steps."""
    for rank in resumed.told:
        ours, theirs = whole.events(rank, position), resumed.events(rank, position)
        for number, (one, other) in enumerate(zip(ours, theirs, strict=False)):
            if one != other:
                return [f"event: {other} instead of {one}, {number} behind step {position}, rank {rank}"]
    return []


def results_that_differ(whole: Started, resumed: Started, *, but: Callable[[str], bool] = lambda _: False) -> list[str]:
    """Of the ends of both runs, ``but`` those."""
    ours, theirs = whole.results(), resumed.results()
    return [
        f"result: {name} is {theirs.get(name)} instead of {ours.get(name)}"
        for name in sorted({**ours, **theirs})
        if ours.get(name) != theirs.get(name) and not but(name)
    ]


def verdict_of(
    wrong: Sequence[str], came_to: str = "equal", limits: Callable[[str], bool] = lambda _: False
) -> Verdict:
    """Of all that differs; what docs/limits.md says is not wrong, and counted by itself."""
    left = [one for one in wrong if not limits(one)]
    if left:
        return Verdict(came_to="differs", wrong=left[0], detail="\n".join(left[1:]))
    return Verdict(came_to="as limits.md says" if wrong else came_to)
