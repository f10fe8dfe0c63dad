"""A program on several ranks: whole, killed, and started again, perhaps on other ranks; and what a start must have restored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from programs_of import processes
from programs_of.draw import Draw
from programs_of.runner import Verdict
from safe_ckpt.tools.audit.compare import Run


@dataclass
class Chain:
    """A whole run, and one that was stopped, start by start.

    Attributes:
        ranks: of each start of the stopped run; that of the first is the whole run's, too.
        is_exact: whether a start with this number must be as the whole run.
        steps: of what a start tells of its optimizer steps, those that count.
    """

    kind: str
    draw: Draw
    folder: Path
    kills: Sequence[processes.Kill]
    ranks: Sequence[int]
    is_exact: Callable[[int], bool] = lambda _: True
    steps: Callable[[Run], Run] = lambda lines: lines
    more: Mapping[str, Any] = field(default_factory=dict)
    starts: list[processes.Started] = field(default_factory=list)
    places: list[int | None] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def run(self) -> Verdict | None:
        """All of it; returns the verdict where a start failed."""
        whole = processes.start(
            self.kind, self.draw, self.folder, "whole", out="whole", ranks=self.ranks[0], more={"whole": True}
        )
        if whole.error:
            return processes.failed(whole)
        known: dict[int, Any] = {}
        for number, kill in enumerate([*self.kills, None]):
            newest = newest_of(self.folder / "stopped")
            one = processes.start(
                self.kind, self.draw, self.folder, f"start-{number}", out="stopped", number=number, kill=kill,
                ranks=self.ranks[number], more=self.more,
            )  # fmt: skip
            self.starts.append(one)
            self.places.append(newest)
            if one.error:
                return processes.failed(one)
            self.wrong += _of_resume(one, known, newest)
            known |= _saved(one)
            if all(map(self.is_exact, range(number + 1))):
                self.wrong += processes.differences(self.steps(whole.lines), self.steps(one.lines))
        if all(map(self.is_exact, range(len(self.kills) + 1))):
            is_new = (
                newest_of(self.folder / "stopped") != self.places[-1]
            )  # else the next save deletes what a kill has left
            self.wrong += processes.results_that_differ(
                whole, one, but=lambda name: name.startswith("kept") and not is_new
            )
        return None

    def came_to(self) -> str:
        """In a word."""
        if not any(self.places[1:]):
            return "began anew"
        return "equal" if all(map(self.is_exact, range(len(self.starts)))) else "equal elsewhere"


def newest_of(folder: Path) -> int | None:
    """The step of the newest that was committed."""
    return max((int(one.parent.name.rpartition("-")[2]) for one in folder.glob("step-*/manifest.json")), default=None)


def _saved(one: processes.Started) -> dict[int, dict[int, list[Any]]]:
    """Step -> rank -> what was saved, once or more often: of these a kill leaves either."""
    found: dict[int, dict[int, list[Any]]] = {}
    for rank in one.told:
        for step, values in one.notes("saved", rank):
            found.setdefault(step, {}).setdefault(rank, []).append(values)
    return found


def _of_resume(
    one: processes.Started, known: Mapping[int, Mapping[int, list[Any]]], newest: int | None
) -> Iterator[str]:
    """What was restored is what was saved then: on each rank what that rank has told of, on others what rank 0 has."""
    drawn = [found.get("own torch") for rank in one.told for _, found in one.notes("resumed", rank)]
    if any(drawn) and len({*drawn}) < len(drawn):
        yield "ranks: some draw the same numbers"
    for rank in one.told:
        for step, found in one.notes("resumed", rank):
            if step != newest:
                yield f"place: resumed {step}, and {newest} was there"
            if step in known:
                yield from min((list(_others(saved, found, rank)) for saved in _of_rank(known[step], rank)), key=len)


def _of_rank(saved: Mapping[int, list[Any]], rank: int) -> list[dict[str, Any]]:
    own = saved.get(rank)
    return own or [{k: v for k, v in one.items() if not k.startswith("own ")} for one in saved[0]]


def _others(saved: Mapping[str, Any], found: Mapping[str, Any], rank: int) -> Iterator[str]:
    is_own = any(name.startswith("own ") for name in saved) or not any(name.startswith("own ") for name in found)
    for name in sorted({**saved, **found} if is_own else saved):
        if saved.get(name) != found.get(name):
            yield f"restored: {name} is {found.get(name)} instead of {saved.get(name)}, rank {rank}"
