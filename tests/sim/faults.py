"""Faults: what can go wrong with hosts, mounts and the network, and the plan of one history."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable
from typing import Any

from sim.disk import Node, fail

_AT_ONCE = 0.55
"""So many calls are over before anybody else runs: they find what they need in a cache."""


_FORMAT = re.compile(rb'"format": *"(\w+)"')
_DECIDES = 0.3
"""So often a wrong read of a manifest hits the name of its format, by which it is ours."""


def _nothing() -> None:
    pass


class Mounts:
    """The hosts' mounts of the disk: how long calls take, what they fail with, and what a host remembers of names.

    Attributes:
        down: until when calls of a host hang, by host number.
        full: when nothing new could be written; who only looks is not hindered.
        failing: errors that are due: (host number or -1, calls, errno, chance, until).
        answers_lost: until when a host's changes may be done and still fail, by host number.
    """

    def __init__(self, world: Any) -> None:
        self.world = world
        self.down: dict[int, float] = {}
        self.failing: list[tuple[int, tuple[str, ...], int, float, float]] = []
        self.troubles: dict[int, list[tuple[float, float]]] = {}
        self.full: list[tuple[float, float]] = []
        self._hanging: list[Any] = []
        self.wrong_reads: dict[int, int] = {}
        self.slow = 0.0
        self.far_silent = self.far_failing = 0.0  # until when, below /far
        self.calls = 0
        self._known: dict[tuple[int, str, bool], tuple[Any, float, int, str]] = {}

    def enter(self, task: Any, name: str, path: object) -> Callable[[], None]:
        """A call begins: it takes a moment, hangs, or fails. Returns what is called when it is done."""
        world = self.world
        rng = world.rng
        self.calls += 1
        if world.triggers:
            for fault in list(world.triggers):
                fault.look(task)
        pause = (rng.random() - _AT_ONCE) * 0.0012
        if name == "fsync":
            pause = abs(pause) * 8
        if self.slow and rng.random() < self.slow:
            pause = rng.expovariate(1 / 0.2)
        if pause > 0:
            task.sleep(pause)
        if max(self.far_silent, self.far_failing) > world.now and str(path).startswith("/far"):
            self._far(task, path)
        if not self.down and not self.failing:
            return _nothing
        host = task.proc.host.number
        while (end := self.down.get(host, 0.0)) > world.now:
            self._hanging.append(task)
            try:
                task.sleep(end - world.now + rng.random() * 0.05)
            finally:
                self._hanging.remove(task)
        for place, calls, code, chance, until in self.failing:
            if place in (-1, host) and until > world.now and name in calls and rng.random() < chance:
                if code == errno.EIO and not world.disk.local and rng.random() < 0.3:
                    return lambda: self._lose(task, name, path)  # it is done, and the answer is lost
                world.log("disk fails", task.proc.name, name, path, errno.errorcode[code])
                raise fail(code, path)
        return _nothing

    def _far(self, task: Any, path: object) -> None:
        while (end := self.far_silent) > self.world.now:
            self._hanging.append(task)
            try:
                task.sleep(end - self.world.now + self.world.rng.random() * 0.05)
            finally:
                self._hanging.remove(task)
        if self.far_failing > self.world.now and self.world.rng.random() < 0.7:
            raise fail(errno.EIO, path)

    def hang(self, host: int, seconds: float) -> None:
        """From now on calls of a host hang, for so long."""
        self.down[host] = max(self.down.get(host, 0.0), self.world.now + seconds)
        self.trouble(host, self.world.now, self.down[host])

    def heal(self) -> None:
        """From now on everything answers, also the calls that hang."""
        now = self.world.now
        self.far_silent = self.far_failing = 0.0
        self.down.clear()
        self.failing.clear()
        self.troubles = {host: [(start, min(end, now)) for start, end in row] for host, row in self.troubles.items()}
        for task in self._hanging:
            self.world.wake(task)

    def trouble(self, host: int, start: float, end: float) -> None:
        """A host could not use the disk then."""
        self.troubles.setdefault(host, []).append((start, end))

    def read(self, task: Any, path: str, data: bytes) -> bytes:
        """What a read brings: now and then other bytes, once."""
        host = task.proc.host.number
        if not data or not self.wrong_reads.get(host) or path.startswith("/proc/"):
            return data
        self.wrong_reads[host] -= 1
        rng = self.world.rng
        at = rng.randrange(len(data))
        if (said := _FORMAT.search(data)) is not None and rng.random() < _DECIDES:
            at = said.start(1)
        self.world.log("read wrongly", task.proc.name, path, at)
        return data[:at] + bytes([data[at] ^ 0x41]) + data[at + 1 :]

    def _lose(self, task: Any, name: str, path: object) -> None:
        self.world.log("disk fails after it is done", task.proc.name, name, path)
        raise fail(errno.EIO, path)

    def remembered(self, task: Any, path: str, links: bool) -> Any:
        """What the host believes of a path without asking: a status, "" for nothing there, None where it asks."""
        stale_s = self.world.disk.stale_s
        if not stale_s:
            return None
        entry = self._known.get((task.proc.host.number, path, links))
        if entry is None or self.world.now - entry[1] > stale_s:
            return None
        return entry[0]

    def remember(self, task: Any, path: str, links: bool, folder: Node, status: Any) -> None:
        """The host has looked."""
        if self.world.disk.stale_s:
            entry = ("" if status is None else status, self.world.now, folder.number, path.rpartition("/")[2])
            self._known[task.proc.host.number, path, links] = entry

    def forget_all(self, host: Any) -> None:
        """A host has booted."""
        for key in [key for key in self._known if key[0] == host.number]:
            del self._known[key]

    def forget(self, task: Any, folder: Node, name: str) -> None:
        """The host itself has opened or changed that name."""
        if self._known:
            self._drop(task, folder.number, name)

    def listed(self, task: Any, folder: Node) -> None:
        """The host has listed a folder: it looks again at what is in it."""
        if self._known:
            self._drop(task, folder.number, None)

    def _drop(self, task: Any, number: int, name: str | None) -> None:
        host = task.proc.host.number
        gone = [
            key
            for key, entry in self._known.items()
            if key[0] == host and entry[2] == number and (name is None or entry[3] == name)
        ]
        for key in gone:
            del self._known[key]
