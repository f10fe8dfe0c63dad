"""The reader's account of what it has seen, what it will take, and what it missed: pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from safe_ckpt.core.formats.manifest import CheckpointInfo


@dataclass(kw_only=True)
class Book:
    """The account of one reader of the commits of one run, in their order.

    Attributes:
        every: it takes each n-th.
        limit: how many may wait for it at most; None for any number.
        healthy: it takes none with bad numbers.
        newest_only: it takes the newest alone.
        seen: the last place in the order of commits that it has looked at.
        waiting: what it will take, the oldest first.
        missed: names of what it would have taken, and did not find any more, or had no room for.
    """

    every: int = 1
    limit: int | None = None
    healthy: bool = True
    newest_only: bool = False
    seen: int = -1
    waiting: list[CheckpointInfo] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    _count: int = 0
    _known: set[str] = field(default_factory=set)
    _told: set[str] = field(default_factory=set)

    def look(self, found: Sequence[CheckpointInfo]) -> bool:
        """Take note of what is there now, in no order. Returns whether anything is new."""
        there = {identity(info) for info in found}
        new = [info for info in found if identity(info) not in self._known]
        for info in sorted(new, key=commit_order):
            self._known.add(identity(info))
            self.seen = max(self.seen, info.sequence if info.verified else -1)
            if info.marked and self.healthy:
                continue
            self._count += 1
            if self._count % self.every == 0:
                self.waiting.append(info)
        if self.newest_only:
            del self.waiting[:-1]
        # One that is saved again has another identity, and comes by itself.
        names = {info.path for info in found}
        self.missed += [i.path.name for i in self.waiting if identity(i) not in there and i.path not in names]
        self.waiting = [info for info in self.waiting if identity(info) in there]
        while self.limit is not None and len(self.waiting) > self.limit:
            self.missed.append(self.waiting.pop(0).path.name)
        return bool(new)

    def begin_after(self, found: Iterable[CheckpointInfo], step: int) -> None:
        """Pass over what is there of this step and of those before it."""
        for info in found:
            if info.step <= step:
                self._known.add(identity(info))
                self.seen = max(self.seen, info.sequence if info.verified else -1)

    def told(self, names: Collection[str]) -> None:
        """Take note of what the side that deletes says that this reader will not find."""
        self.missed += [name for name in names if name not in self._told]
        self._told.update(names)

    def take_missed(self) -> tuple[str, ...]:
        """Return what was missed since the last call."""
        missed, self.missed = tuple(dict.fromkeys(self.missed)), []
        return missed


def identity(info: CheckpointInfo) -> str:
    """Return what is equal for one commit alone: of another tool's checkpoint the path is all that is known."""
    return f"{info.path}\n{info.op_id}"


def commit_order(info: CheckpointInfo) -> tuple[int, str, int, str]:
    """The order of commits; those of other tools before ours, by their steps."""
    return (info.sequence, info.created_at if info.verified else "", info.step, str(info.path))
