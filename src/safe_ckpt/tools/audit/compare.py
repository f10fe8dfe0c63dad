"""The differences between a run that was stopped and one that was not. Values in, values out.

A run is what its processes told of their optimizer steps, see ``recorder``: rank -> lines in their order.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Line = Mapping[str, Any]
Run = Mapping[int, Sequence[Line]]

# Category -> what it is called, and what its difference means; in the order in which they are told.
MEANS = {
    "weights": ("weights", "the weights were not restored"),
    "frozen": ("frozen parameters", "requires_grad was not set again as it was"),
    "state": ("optimizer", "the optimizer's state was not restored. Is it an item of the checkpoint?"),
    "groups": ("settings of the optimizer", "the scheduler was not restored, or whatever else sets this"),
    "data": ("data", "the order of the data was not restored, or the seeds of its workers"),
    "calls": ("batches of a step", "the accumulation began anew within a step"),
    "generators": ("generator", "its state was not restored"),
    "scaler": ("GradScaler", "its state was not restored"),
    "buffers": ("buffers", "they were not restored: what a layer counts or averages, for example"),
    "copies": ("copies of the weights", "an average of the weights was not restored"),
    "logged": ("logged", "a counter, or an average that is logged, was not restored"),
    "gradients": ("gradients", "weights and batch are equal: something else that the loss depends on was not restored"),
}
# Of which others each is a result; each is one of everything else, too.
_RESULTS = {"weights": ("gradients", "calls"), "gradients": ("weights", "calls"), "calls": ()}
# What differs because the weights or the batches do tells nothing more.
_FOLLOWS = {"state", "buffers", "copies", "logged", "scaler"}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One difference.

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
    step: int = 1
    resumed_at: int = 1
    rank: int
    detail: str = ""
    means: str = ""

    def __str__(self) -> str:
        after = self.step - self.resumed_at
        when = "the first after the resume" if not after else f"{after} behind the first after the resume"
        detail = f" ({self.detail})" if self.detail else ""
        what = self.detail if self.names == (self.category,) else f"{_listed(self.names)}{detail}"
        return f"step {self.step}, {when}, rank {self.rank}: {MEANS[self.category][0]}: {what}\n  -> {self.means}"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The result of comparing one resume.

    Attributes:
        findings: what differs, in the order of ``MEANS``.
        notes: numbers of the script itself that differ; nothing says that they matter.
        steps: how many were laid beside each other.
    """

    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()
    steps: int = 0


def compared_values(line: Line) -> dict[str, Any]:
    """All that is compared, as name -> value."""
    return {"data": line["batch"], "calls": len(line["batch"]), **line["values"]}


def category_of(name: str) -> str:
    """The key of ``MEANS`` for a name."""
    return name.partition(".")[0]


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[str]:
    """The names whose values differ, or that are on one side alone; a variable that holds a copy may be, as a checkpoint is."""
    names = {name for name in {**one, **other} if one.get(name) != other.get(name)}
    return (name for name in names if category_of(name) != "copies" or (name in one and name in other))


def noise(first: Run, second: Run) -> frozenset[str]:
    """The names of values that differ between two runs that nothing has stopped."""
    return frozenset(
        name
        for rank in first.keys() & second.keys()
        for one, other in zip(first[rank], second[rank], strict=False)
        for name in differing(compared_values(one), compared_values(other))
    )


def matching_line(whole: Sequence[Line], first: Line) -> int | None:
    """The line of the whole run that has the weights of a resumed run's first; of several, that with most of the rest equal."""

    def same(line: Line, *categories: str) -> list[bool]:
        """For each value of the first line, whether this line has it."""
        values = compared_values(line)
        return [
            values.get(name) == one for name, one in compared_values(first).items() if category_of(name) in categories
        ]

    found = [number for number, line in enumerate(whole) if all(same(line, "weights"))]
    return max(found, key=lambda number: (sum(same(whole[number], "state", "groups", "data")), number), default=None)


def compare(whole: Run, resumed: Run, ignored: frozenset[str]) -> Comparison:
    """Lay a run that was stopped and started beside one that was not."""
    first = min(resumed)
    at = matching_line(whole[first], resumed[first][0])
    if not at:
        how = "no step of the run that was not stopped has them" if at is None else "the start began at the beginning"
        lost = Finding(category="weights", names=("weights",), rank=first, detail=how, means=MEANS["weights"][1])
        return Comparison(findings=(lost,))
    findings: dict[str, Finding] = {}
    notes: dict[str, None] = {}
    steps = 0
    for rank in sorted(whole.keys() & resumed.keys()):
        pairs = list(zip(whole[rank][at:], resumed[rank], strict=False))
        steps = max(steps, len(pairs))
        for finding in _of_rank(whole[rank], pairs, at, rank, ignored):
            findings.setdefault(f"{finding.category} {finding.names}", finding)
        notes |= dict.fromkeys(_counters(whole[rank], *pairs[0]) if pairs else ())
    told = sorted(findings.values(), key=lambda one: (list(MEANS).index(one.category), one.step))
    return Comparison(findings=tuple(one for one in told if not _is_result(one, told)), notes=tuple(notes), steps=steps)


def _is_result(finding: Finding, told: Sequence[Finding]) -> bool:
    """Whether gradients or weights differ because of what another line says, on whatever rank."""
    if finding.category not in _RESULTS:
        return False
    # The weights of a step are from before it: what its gradients and its number of batches do to them is seen a step later.
    causes, later = _RESULTS[finding.category], finding.category == "weights"
    found = (one for one in told if one.category in causes or one.category not in _RESULTS)
    return any(one.step <= finding.step - (later and one.category in causes) for one in found)


def _of_rank(
    whole: Sequence[Line], pairs: Sequence[tuple[Line, Line]], at: int, rank: int, ignored: frozenset[str]
) -> Iterator[Finding]:
    told: set[str] = set()
    for number, (one, other) in enumerate(pairs):
        names = sorted(name for name in differing(compared_values(one), compared_values(other)) if name not in ignored)
        found = {
            key: [name.partition(".")[2] or key for name in rows] for key, rows in itertools.groupby(names, category_of)
        }
        if number == 0:
            _leave_out_what_was_before(found, one["batch"], other["batch"])
        follows = _FOLLOWS if "weights" in found else {"buffers", "logged"} if "data" in found else set()
        for category in (key for key in MEANS if key in found and key not in told):
            if category not in follows:
                told.add(category)
                detail, means = _how(category, found[category], whole, at + number, other)
                rows = dict.fromkeys(row.partition(".")[0] if category == "state" else row for row in found[category])
                yield Finding(
                    category=category, names=tuple(rows), step=at + number + 1, resumed_at=at + 1, rank=rank, detail=detail,
                    means=means,
                )  # fmt: skip


def _leave_out_what_was_before(found: dict[str, list[str]], ours: Sequence[str], theirs: Sequence[str]) -> None:
    """A part of the first step may lie before the save: what was logged, and batches whose gradients are kept."""
    found.pop("logged", None)
    if "calls" in found and theirs and ours[-len(theirs) :] == theirs:
        found.pop("data", None)
        if "gradients" not in found:
            found.pop("calls")


def _how(category: str, rows: Sequence[str], whole: Sequence[Line], number: int, other: Line) -> tuple[str, str]:
    """The way in which it differs, and what that means."""
    one, means = whole[number], MEANS[category][1]
    ours, theirs = compared_values(one), compared_values(other)
    if category == "state":
        keys = {row.partition(".")[0] for row in rows}
        detail = f"of {len({row.partition('.')[2] for row in rows})} parameters"
        if not any(f"state.{row}" in theirs for row in rows):
            return f"{detail}; missing", means
        return f"{detail}; all zero" if keys <= set(other["zero"]) - set(one["zero"]) else detail, means
    if category == "data":
        detail, means = _where(whole, other["batch"], number)
        return detail + _samples(one, other), means
    if category == "weights":  # those of the first step after the resume are equal: by them it was found
        return "", "the step before changed them otherwise: something was not restored of what the optimizer goes by"
    if category in ("groups", "calls", "scaler", "logged", "frozen"):
        name = category if category == "calls" else f"{category}.{rows[0]}"
        return f"{_short(theirs.get(name))} instead of {_short(ours.get(name))}", means
    return "", means


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _listed(names: Sequence[object]) -> str:
    return ", ".join(map(str, names[:6])) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def _samples(one: Line, other: Line) -> str:
    """The samples that went in, where both runs tell all of theirs."""
    ours, theirs = (line.get("samples") or [None] for line in (one, other))
    if None in ours or None in theirs:
        return ""
    told = (_listed([n for ids in part for n in (ids if isinstance(ids, list) else [ids])]) for part in (theirs, ours))
    return f": samples {' instead of '.join(told)}"


def _where(whole: Sequence[Line], batch: Sequence[str], number: int) -> tuple[str, str]:
    """The step of the whole run that had this batch, and what that means."""
    places = [n for n, line in enumerate(whole) if batch == line["batch"]]
    places = places or [n for n, line in enumerate(whole) if set(batch) & set(line["batch"])]
    if not places:
        return "no step of the run that was not stopped had this batch", MEANS["data"][1]
    nearest = min(places, key=lambda n: abs(n - number))
    detail = f"the batch of step {number + 1} is that of step {nearest + 1} of the run that was not stopped"
    if nearest == number:
        ours = whole[number]["batch"]
        means = "calls" if batch[0] in ours[1:] else "data"
        again = batch[0] == ours[0] and len(batch) < len(ours)
        return "a part of the batch differs", "batches are trained twice" if again else MEANS[means][1]
    if nearest == 0:
        return detail, "the loader began again"
    return detail, "batches are trained twice" if nearest < number else "batches are left out"


def _counters(whole: Sequence[Line], one: Line, other: Line) -> Iterator[str]:
    """Variables that change in a run that nothing stops, and have other values after the resume."""
    for name in one["variables"].keys() & other["variables"].keys():
        ours, theirs = one["variables"][name], other["variables"][name]
        if ours != theirs and len({str(line["variables"].get(name)) for line in whole}) > 1:
            yield f"{name}: {theirs} instead of {ours}"


def without_equality(resumed: Run) -> Iterator[Finding]:
    """Findings that need no comparison: moments that are zero or missing at the run's first step, and not at its last."""
    for rank, lines in sorted(resumed.items()):
        first, last = lines[0], lines[-1]
        names = [{name.split(".")[1] for name in line["values"] if name.startswith("state.")} for line in (first, last)]
        lost = sorted((names[1] - names[0]) | (set(first["zero"]) - set(last["zero"])))
        if lost:
            yield Finding(
                category="state", names=tuple(lost), rank=rank, detail="missing or zero", means=MEANS["state"][1]
            )
