"""What docs/limits.md lets differ behind a resume of a Trainer: where a warning says so, and no more than follows from it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from programs_of import processes

_MISSING = re.compile(r"before what is done at its end: the (.*) of that epoch is missing")
_NO_STEP = "no step was left of the pass over the stream"
_NUMBERS = re.compile(r"-?\d[\d.e+-]*")
_FREE = ("data", "generators", "gradients", "weights", "state", "buffers", "copies", "logged")


class Limits:
    """Of one program, start by start.

    Args:
        one: the choices of the program.

    Attributes:
        used: whether something differed that is let.
    """

    def __init__(self, one: SimpleNamespace) -> None:
        self._plateau = one.scheduler == "reduce_lr_on_plateau"
        self._rows: set[int] = set()  # steps whose row of the log is missing
        self._evaluations: set[int] = set()  # whose evaluation is
        self._ends: set[int] = set()  # of which a pass had no step left
        self._twice: set[int] = set()  # which buffers were changed in twice
        self._said = ""
        self.used = False

    def add(self, begins: int, said: str) -> None:
        """A start that went on from this step, and what it said."""
        for missing in _MISSING.findall(said):
            self._rows |= {begins} if "row of the log" in missing else set()
            self._evaluations |= {begins} if "evaluation" in missing else set()
        self._ends |= {begins} if _NO_STEP in said else set()
        self._twice |= {begins} if f"saved within step {begins + 1}," in self._said else set()
        self._said += said

    @property
    def _draws_other_numbers(self) -> bool:
        return bool(self._evaluations | self._twice)

    def lets(self, text: str) -> bool:
        """Whether a difference between the steps of two runs follows from a limit."""
        kind, _, names = text.partition(": ")
        if self._draws_other_numbers:
            let = kind in _FREE or (kind == "groups" and self._plateau and bool(self._evaluations))
        else:
            allowed = ({"loss"} if self._rows else set()) | ({"grad_norm", "learning_rate"} if self._ends else set())
            let = kind == "logged" and set(re.split(", ", names.partition(" at step")[0])) <= allowed
        self.used |= let
        return let

    def events(self, whole: processes.Started, last: processes.Started, begins: int) -> list[str]:
        """The first that comes in another order, or says something else that follows from no limit."""
        ours, theirs = whole.events(0, begins), last.events(0, begins)
        loss = begins in self._rows
        for number, (one, other) in enumerate(zip(ours, theirs, strict=False)):
            is_loss = one.startswith("on_log") and "'loss'" in one
            but = [r"'loss': [^,}]+"] * (loss and is_loss) + [r"'total_flos': [^,}]+"] * bool(self._ends)
            if not self._same(one, other, but):
                return [f"event: {other} instead of {one}, {number} behind step {begins}"]
            loss &= not is_loss
        return []

    def _same(self, one: str, other: str, but: list[str]) -> bool:
        if one == other:
            return True
        clean: list[Callable[[str], str]] = [lambda text: re.sub("|".join(but), "", text) if but else text]
        if self._draws_other_numbers and not one.startswith("counted"):
            clean.append(lambda text: _NUMBERS.sub("", text))
        for step in clean:
            one, other = step(one), step(other)
        self.used |= one == other
        return one == other

    def results(self, whole: processes.Started, last: processes.Started) -> list[str]:
        """What differs at the end."""
        free = {"weights of rank 0"} if self._draws_other_numbers else set()
        wrong = processes.results_that_differ(
            whole, last, but=lambda name: name.startswith(("row ", "state")) or name in free
        )
        ours, theirs = (dict(one.results()["state of rank 0"]) for one in (whole, last))
        names = {"flos"} if self._ends else set()
        names |= {"best", "best_metric", "best_step", "tokens", "flos"} if self._draws_other_numbers else set()
        wrong += [
            f"result: state: {name} is {theirs[name]} instead of {ours[name]}"
            for name in ours
            if ours[name] != theirs[name] and name not in names
        ]
        return wrong + self._rows_that_differ(_rows(whole), _rows(last))

    def _rows_that_differ(self, ours: list[Mapping[str, Any]], theirs: list[Mapping[str, Any]]) -> list[str]:
        ours = [row for row in ours if not (_is(row, self._evaluations, "eval_loss") or _is(row, self._rows, "loss"))]
        theirs = _once(theirs, self._ends)
        if len(ours) != len(theirs):
            return [f"result: rows: {len(theirs)} instead of {len(ours)}: {theirs} instead of {ours}"]
        behind = set(self._rows)
        for one, other in zip(ours, theirs, strict=True):
            names = {"total_flos"} if self._ends else set()
            if "loss" in one:
                due = {step for step in behind if step < one["step"]}
                behind -= due
                names |= {"loss"} if due else set()
            names |= {"grad_norm", "learning_rate"} if one["step"] in self._ends else set()
            first, second = ({key: row[key] for key in row if key not in names} for row in (one, other))
            if not self._same(str(first), str(second), []):
                return [f"result: row: {other} instead of {one}"]
            self.used |= one != other
        return []


def _rows(one: processes.Started) -> list[Mapping[str, Any]]:
    found = {name: row for name, row in one.results().items() if name.startswith("row ")}
    return [found[name] for name in sorted(found, key=lambda name: int(name.split()[1]))]


def _is(row: Mapping[str, Any], steps: set[int], name: str) -> bool:
    return row.get("step") in steps and name in row


def _once(rows: list[Mapping[str, Any]], steps: set[int]) -> list[Mapping[str, Any]]:
    """Without those that were written a second time at one of these steps."""
    found: list[Mapping[str, Any]] = []
    for row in rows:
        kind = "eval_loss" if "eval_loss" in row else "loss"
        if not (_is(row, steps, kind) and any(_is(one, {row["step"]}, kind) for one in found)):
            found.append(row)
    return found
