"""What differs between a run that was stopped and one that was not. Values in, values out.

A run is what its processes told of their optimizer steps, see ``recorder``: rank -> lines in their order.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Line = Mapping[str, Any]
Run = Mapping[int, Sequence[Line]]

# What a category is called, and what its difference means. In the order in which they are told.
MEANS = {
    "weights": ("weights", "the weights were not restored"),
    "frozen": ("frozen parameters", "requires_grad was not set again as it was"),
    "state": ("optimizer", "the optimizer's state was not restored. Is it an item of the checkpoint?"),
    "groups": ("", "the scheduler was not restored, or what else sets this value"),
    "data": ("data", ""),
    "calls": ("batches of a step", "the accumulation began anew within a step"),
    "generators": ("generator", "its state was not restored"),
    "scaler": ("GradScaler", "its state was not restored"),
    "buffers": ("buffers", "they were not restored: an average that a layer keeps, for example"),
    "copies": ("copies of the weights", "an average of the weights that was not restored"),
    "logged": ("logged", "a counter, or an average that is logged, was not restored"),
    "gradients": ("gradients", "weights and batch are equal: something else that the loss depends on was not restored"),
}
# What may differ because the weights do.
_FOLLOWS = {"state", "buffers", "copies", "gradients", "logged", "scaler"}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What differs.

    Attributes:
        category: a key of ``MEANS``.
        names: what of it.
        step: of the run that was not stopped, from 1.
        resumed_at: the first step after the resume.
        rank: whose.
        detail: how.
        means: what it comes from, most likely.
    """

    category: str
    names: tuple[str, ...]
    step: int
    resumed_at: int
    rank: int
    detail: str = ""
    means: str = ""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What a stopped run came to.

    Attributes:
        findings: what differs, in the order of ``MEANS``.
        notes: numbers of the script itself that differ; nothing says that they matter.
        compared: how many steps were laid beside each other.
    """

    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()
    compared: int = 0


def flat(line: Line) -> dict[str, Any]:
    """A line as name -> value; the name begins with its category."""
    names = line["parameters"]
    found: dict[str, Any] = {"calls": len(line["batch"]), "data": line["batch"], "frozen": line["frozen"]}
    found |= {f"weights.{name}": one for name, one in zip(names, line["weights"], strict=True)}
    found |= {f"gradients.{name}": one for name, one in zip(names, line["gradients"], strict=True)}
    found |= {
        f"state.{key}.{name}": one for key, row in line["state"].items() for name, one in zip(names, row, strict=True)
    }
    for number, group in enumerate(line["groups"]):
        found |= {f"groups.{key}" + (f" of group {number}" if number else ""): one for key, one in group.items()}
    for category in ("buffers", "generators", "copies"):
        found |= {f"{category}.{name}": one for name, one in line[category].items()}
    found |= {f"scaler.{key}": one for key, one in (line["scaler"] or {}).items()}
    return {**found, "logged": line["logged"]} if line["logged"] else found


def category_of(name: str) -> str:
    """Which of ``MEANS``."""
    return name.partition(".")[0]


def noise(first: Run, second: Run) -> frozenset[str]:
    """What differs between two runs that nothing has stopped."""
    return frozenset(
        name
        for rank in first.keys() & second.keys()
        for one, other in zip(first[rank], second[rank], strict=False)
        for name in differing(flat(one), flat(other))
    )


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[str]:
    """The names whose values differ, or that are on one side alone."""
    return (name for name in {**one, **other} if one.get(name) != other.get(name))


def place(whole: Sequence[Line], first: Line) -> int | None:
    """Which line of the whole run has the weights that a resumed run begins with; of several that with most of the rest equal."""
    same = [
        n
        for n, line in enumerate(whole)
        if line["weights"] == first["weights"] and line["parameters"] == first["parameters"]
    ]

    def alike(number: int) -> tuple[int, int]:
        ours, theirs = flat(first), flat(whole[number])
        return sum(
            ours[name] == theirs.get(name) for name in ours if category_of(name) in ("state", "groups", "data")
        ), number

    return max(same, key=alike, default=None)


def compare(whole: Run, resumed: Run, ignored: frozenset[str]) -> Comparison:
    """Lay a run that was stopped and started beside one that was not."""
    rank = min(resumed)
    at = place(whole[rank], resumed[rank][0])
    if at is None:
        return Comparison(findings=(_finding("weights", ["all"], whole[rank], 0, 0, rank),))
    findings: dict[str, Finding] = {}
    notes: dict[str, None] = {}
    compared = 0
    for rank in sorted(whole.keys() & resumed.keys()):
        pairs = list(zip(whole[rank][at:], resumed[rank], strict=False))
        compared = max(compared, len(pairs))
        for finding in _of_rank(whole[rank], pairs, at, rank, ignored):
            findings.setdefault(finding.category + finding.names[0], finding)
        notes |= dict.fromkeys(_numbers(whole[rank], pairs))
    order = list(MEANS)
    told = sorted(findings.values(), key=lambda one: (order.index(one.category), one.step))
    return Comparison(findings=tuple(told), notes=tuple(notes), compared=compared)


def _of_rank(
    whole: Sequence[Line], pairs: Sequence[tuple[Line, Line]], at: int, rank: int, ignored: frozenset[str]
) -> Iterator[Finding]:
    seen: set[str] = set()
    drifted = False
    for number, (one, other) in enumerate(pairs):
        names = [name for name in differing(flat(one), flat(other)) if name not in ignored]
        found = {key: list(rows) for key, rows in itertools.groupby(sorted(names), category_of)}
        drifted |= "weights" in found
        if "data" in found:
            found.pop("buffers", None)
        for category in [key for key in MEANS if key in found and key not in seen]:
            follows = category in _FOLLOWS and (
                drifted or (category in ("gradients", "logged") and (seen or len(found) > 1))
            )
            if category == "weights" and (seen or len(found) > 1) or follows:
                continue
            seen.add(category)
            rows = [name.partition(".")[2] or category for name in found[category]]
            yield _finding(category, rows, whole, at + number, at, rank, one, other)
        if drifted:
            seen.add("weights")


def _finding(
    category: str,
    rows: Sequence[str],
    whole: Sequence[Line],
    number: int,
    at: int,
    rank: int,
    one: Line | None = None,
    other: Line | None = None,
) -> Finding:
    detail, means, names = "", MEANS[category][1], list(rows)
    if one is not None and other is not None:
        if category == "state":
            names = sorted({row.partition(".")[0] for row in rows})
            gone = [key for key in names if key not in other["state"]]
            zero = [key for key in names if key in other["zero"] and key not in one["zero"]]
            parameters = len({row.partition(".")[2] for row in rows})
            detail = f"of {parameters} parameters" + (
                "; missing" if gone == names else "; all zero" if zero == names else ""
            )
        elif category == "groups":
            ours, theirs = flat(one), flat(other)
            detail = ", ".join(f"{ours.get(f'groups.{row}')} is {theirs.get(f'groups.{row}')}" for row in rows[:3])
        elif category == "data":
            detail, means = _where(whole, other["batch"], number)
        elif category == "calls":
            detail = f"{len(one['batch'])} are {len(other['batch'])}"
        elif category == "logged":
            detail = f"{one['logged']} is {other['logged']}"[:200]
    return Finding(
        category=category, names=tuple(names), step=number + 1, resumed_at=at + 1, rank=rank, detail=detail, means=means
    )


def _where(whole: Sequence[Line], batch: Sequence[str], number: int) -> tuple[str, str]:
    """Which step of the whole run had this batch, and what that means."""
    places = [n for n, line in enumerate(whole) if set(batch) & set(line["batch"])]
    if not places:
        return (
            "it is no batch of the run that was not stopped",
            "the order of the data, or the seeds of its workers, were not restored",
        )
    nearest = min(places, key=lambda n: abs(n - number))
    detail = f"the batch of step {number + 1} is that of step {nearest + 1} of the run that was not stopped"
    if nearest == 0:
        return detail, "the loader began again"
    return (
        detail,
        "batches are trained twice"
        if nearest < number
        else "batches are left out"
        if nearest > number
        else "a part of it differs",
    )


def _numbers(whole: Sequence[Line], pairs: Sequence[tuple[Line, Line]]) -> Iterator[str]:
    """Variables that change in a run that nothing stops, and have other values after the resume."""
    for name in pairs[0][0]["variables"].keys() & pairs[0][1]["variables"].keys() if pairs else ():
        values = {str(line["variables"].get(name)) for line in whole}
        one, other = pairs[0][0]["variables"][name], pairs[0][1]["variables"][name]
        if len(values) > 1 and one != other:
            yield f"{name}: {one} is {other}"


def without_equality(resumed: Run) -> tuple[Finding, ...]:
    """What can be told of a run that cannot be compared: moments that are zero or missing behind the first steps."""
    found = []
    for rank, lines in sorted(resumed.items()):
        later = lines[-1]
        lost = [
            key
            for key in later["state"]
            if key not in lines[0]["state"] or (key in lines[0]["zero"] and key not in later["zero"])
        ]
        if lost and len(lines) > 1:
            detail = f"of {len(later['parameters'])} parameters; missing or zero"
            found.append(
                Finding(
                    category="state",
                    names=tuple(lost),
                    step=1,
                    resumed_at=1,
                    rank=rank,
                    detail=detail,
                    means=MEANS["state"][1],
                )
            )
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class Audit:
    """All that an audit came to.

    Attributes:
        stops: behind which step each start was killed.
        comparisons: one for each resume.
        ignored: categories that differ between two runs that nothing stopped.
        cannot: why nothing can be compared; empty if it can.
    """

    stops: tuple[int, ...]
    comparisons: tuple[Comparison, ...]
    ignored: tuple[str, ...] = ()
    cannot: str = ""
    findings: tuple[Finding, ...] = field(default=())
