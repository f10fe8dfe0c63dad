"""Starts that end again and again before they have saved anything: which checkpoint is passed over then. Pure decisions.

A start counts if it ended with an exception of its own, or was killed at the step at which another one was killed: a machine
that is taken away does that at any step. It does not count if it stopped by itself or after a signal, nor if it failed because
a peer, a disk or a network did: an earlier checkpoint would not help.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

_MOST_STARTS = 50
_KEY = re.compile(r"[0-9a-f]{32}")
End = Literal["", "done", "signal", "exception", "other"]
"""How a start ended; "other": with an error that says nothing about the state."""
ENDS: tuple[End, ...] = get_args(End)


@dataclass(frozen=True, kw_only=True)
class Start:
    """One start of the job.

    Attributes:
        key: unique to it.
        resumed: the ``op_id`` of the checkpoint that it resumed from.
        step: of that checkpoint.
        size: how many ranks it had.
        end: how it ended; "" where some rank was killed, as far as is known.
        reached: the step up to which it came; None where that is not known.
        saved: whether it committed a healthy checkpoint, which may have been lost since.
        what: what it ended with, in words.
    """

    key: str
    resumed: str
    step: int
    size: int = 1
    end: End = ""
    reached: int | None = None
    saved: bool = False
    what: str = ""

    def ended(self, rows: Sequence[tuple[int, End, str]]) -> Start:
        """With what its ranks said of its end, the first first: rank, how, and the error in words.

        What comes first, a signal or an exception of its own, is the cause: it makes other ranks fail, or be stopped.
        """
        for _, how, what in rows:
            if how in ("signal", "exception"):
                return replace(self, end=how, what=what)
        if any(rank == 0 and how == "done" for rank, how, _ in rows):
            return replace(self, end="done")
        others = [what for _, how, what in rows if how == "other"]
        if len({rank for rank, _, _ in rows}) < self.size or not others:
            return self
        return replace(self, end="other", what=others[0])


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
        backs: the steps from which training was set back, since it came further than all of them.
    """

    starts: tuple[Start, ...] = ()
    passed: tuple[Passed, ...] = ()
    backs: tuple[int, ...] = ()

    def with_start(self, start: Start) -> Log:
        """One more."""
        return replace(self, starts=(*self.starts, start)[-_MOST_STARTS:])

    def with_passed(self, passed: Passed) -> Log:
        """One more."""
        return replace(self, passed=(*self.passed, passed), backs=(*self.backs, passed.step))

    def to_json(self) -> dict[str, Any]:
        """As JSON-able data."""
        starts, passed = [vars(one) for one in self.starts], [vars(one) for one in self.passed]
        return {"starts": starts, "passed": passed, "backs": list(self.backs)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Log:
        """From what ``to_json`` returned.

        Raises:
            ValueError, TypeError, KeyError, AttributeError: it is not that.
        """
        log = cls(
            starts=tuple(Start(**row) for row in data["starts"]),
            passed=tuple(Passed(**row) for row in data["passed"]),
            backs=tuple(map(_number, data["backs"])),
        )
        for start in log.starts:
            for number in (start.step, start.size, start.reached or 0):
                _number(number)
            _check_texts(start.resumed, start.what)
            if _KEY.fullmatch(start.key) is None or start.end not in ENDS or type(start.saved) is not bool:
                raise ValueError(f"no start: {start!r:.200}")
        for passed in log.passed:
            _number(passed.step)
            _check_texts(passed.op_id, passed.name, passed.why)
        return log


def _number(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"expected a whole number, got {value!r:.80}")
    return value


def _check_texts(*values: Any) -> None:
    for value in values:
        if type(value) is not str:
            raise TypeError(f"expected text, got {value!r:.80}")


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
        stuck: why the newest one would be passed over if there were another one; "" if it would not.
    """

    log: Log
    because: Mapping[str, str] = field(default_factory=dict)
    gave_up: str = ""
    stuck: str = ""


def decide(log: Log, newest: Sequence[Newest], *, tries: int, back: int) -> Decision:
    """Which checkpoints are passed over at this start.

    Args:
        log: of the starts before.
        newest: what there is, the newest first.
        tries: so many starts from the newest one that count, without a commit since, and it is passed over.
        back: how often that may happen before training has come further than it ever had by then.
    """
    there = {one.op_id for one in newest}
    log = replace(log, passed=tuple(one for one in log.passed if one.op_id in there))
    left = [one for one in newest if one.op_id not in {passed.op_id for passed in log.passed}]
    if left and left[0].step > max(log.backs, default=-1):
        log = replace(log, backs=())  # training has got over what stopped it then
    gave_up = stuck = ""
    if left and (died := _died(log.starts, left[0].op_id)) and len(died) >= tries:
        why = f"{len(died)} starts from it ended before anything was saved, the last one {_words(died[-1])}"
        if len(left) == 1 and not log.backs:
            stuck = why
        elif len(left) == 1 or len(log.backs) >= back:
            gave_up = f"{left[0].name}: {why}"
        else:
            log = log.with_passed(Passed(op_id=left[0].op_id, name=left[0].name, step=left[0].step, why=why))
    because = {one.op_id: one.why for one in log.passed}
    return Decision(log=log, because=because, gave_up=gave_up, stuck=stuck)


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
