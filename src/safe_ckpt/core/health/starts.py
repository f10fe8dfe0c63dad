"""Starts that end again and again before they have saved anything: which checkpoint is passed over then. Pure decisions.

A start counts if it ended with an exception, or was killed at the step at which another one was killed: a machine that is taken
away does that at any step. It does not count if it stopped by itself or after a signal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

_MOST_STARTS = 50
End = Literal["", "done", "signal", "exception"]


@dataclass(frozen=True, kw_only=True)
class Start:
    """One start of the job.

    Attributes:
        key: unique to it.
        resumed: the ``op_id`` of the checkpoint that it resumed from.
        step: of that checkpoint.
        end: how it ended, as far as a rank said; "" where none did.
        reached: the step up to which it came; None where that is not known.
        saved: whether it committed a healthy checkpoint, which may have been lost since.
        what: what it ended with, in words.
    """

    key: str
    resumed: str
    step: int
    end: End = ""
    reached: int | None = None
    saved: bool = False
    what: str = ""


@dataclass(frozen=True, kw_only=True)
class Passed:
    """A checkpoint that is passed over.

    Attributes:
        op_id: which one.
        name: its name.
        step: its step.
        why: in words.
    """

    op_id: str
    name: str
    step: int
    why: str


@dataclass(frozen=True, kw_only=True)
class Log:
    """What is known of the starts in one directory, the oldest first.

    Attributes:
        starts: those that resumed.
        passed: what is passed over because of them.
    """

    starts: Sequence[Start] = ()
    passed: Sequence[Passed] = ()

    def with_start(self, start: Start) -> Log:
        """One more."""
        return replace(self, starts=[*self.starts, start][-_MOST_STARTS:])

    def with_passed(self, passed: Passed) -> Log:
        """One more."""
        return replace(self, passed=[*self.passed, passed])

    def to_json(self) -> dict[str, Any]:
        """As JSON-able data."""
        return {"starts": [vars(one) for one in self.starts], "passed": [vars(one) for one in self.passed]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Log:
        """From what ``to_json`` returned.

        Raises:
            TypeError, KeyError: it is not that.
        """
        return cls(starts=[Start(**row) for row in data["starts"]], passed=[Passed(**row) for row in data["passed"]])


@dataclass(frozen=True, kw_only=True)
class Newest:
    """A checkpoint that could be resumed from."""

    op_id: str
    name: str
    step: int


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What follows.

    Attributes:
        log: with what is passed over from now on.
        because: ``op_id`` -> why it is passed over.
        gave_up: why no other one is tried any more; "" as long as one is.
    """

    log: Log
    because: Mapping[str, str] = field(default_factory=dict)
    gave_up: str = ""


def decide(log: Log, newest: Sequence[Newest], *, tries: int, back: int) -> Decision:
    """Which checkpoints are passed over at this start.

    Args:
        log: of the starts before.
        newest: what there is, the newest first.
        tries: so many starts from the newest one that count, without a commit since, and it is passed over.
        back: how often that may happen before training has come further than it ever had by then.
    """
    there = {one.op_id for one in newest}
    log = replace(log, passed=[one for one in log.passed if one.op_id in there])
    left = [one for one in newest if one.op_id not in {passed.op_id for passed in log.passed}]
    gave_up = ""
    if left and (died := _died(log.starts, left[0].op_id)) and len(died) >= tries:
        last = died[-1]
        why = f"{len(died)} starts from it ended before anything was saved, the last one {_words(last)}"
        furthest = max((one.step for one in log.passed), default=-1)
        # Beyond the furthest, training has got over what stopped it then.
        gone_back = len(log.passed) if left[0].step <= furthest else 0
        if gone_back >= back or len(left) == 1:
            gave_up = f"{left[0].name}: {why}"
        else:
            log = log.with_passed(Passed(op_id=left[0].op_id, name=left[0].name, step=left[0].step, why=why))
    return Decision(log=log, because={one.op_id: one.why for one in log.passed}, gave_up=gave_up)


def _died(starts: Sequence[Start], resumed: str) -> list[Start]:
    """The starts that count, of those from one checkpoint with none from another in between."""
    row: list[Start] = []
    for start in reversed(starts):
        if start.resumed != resumed:
            break
        if not start.saved:
            row.append(start)
    killed = [start.reached for start in row if not start.end and start.reached is not None]
    return [
        start
        for start in reversed(row)
        if start.end == "exception" or (not start.end and start.reached is not None and killed.count(start.reached) > 1)
    ]


def _words(start: Start) -> str:
    at = f" at step {start.reached}" if start.reached is not None else ""
    return f"with {start.what}{at}" if start.end else f"killed{at}"
