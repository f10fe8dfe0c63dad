"""Child processes, and the sockets that connect one with its parent. The writer is the only program that can be started here.

A pair of connected sockets is as in the kernel: what was sent can still be read when the sender is dead, and then it ends.
Descriptors travel as copies. Memory that is shared is real, and its descriptors are below ``paths.FIRST``.
"""

from __future__ import annotations

import os
import re
import select as real_select
import signal
import subprocess as real_subprocess
import types
from collections import deque
from collections.abc import Sequence
from typing import Any

from typing_extensions import Self

from sim.disk import errno
from sim.world import Killed, Proc, here, hub

_FIRST_SOCKET = 500_000
_MAIN = re.compile(r"main\((\d+), (\d+), (-?\d+), (\d+), (\[.*\])\)$")
_UP_S = (0.02, 0.6)
_SLOW_UP_S = 12.0
_SLOWLY = 0.02
"""So often a child comes up later than anybody waits for it."""


class End:
    """One end of a pair of connected sockets."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.other: End = self
        self.inbox: deque[tuple[bytes, list[int]]] = deque()
        self.holders: list[Proc] = []
        self.waiters: list[Any] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def give_to(self, proc: Proc) -> None:
        """This process has a descriptor of it, until it dies."""
        self.holders.append(proc)
        proc.facts.setdefault("sockets", {})[self.number] = self
        proc.at_end.append(self.other.look_again)

    @property
    def is_held(self) -> bool:
        """Whether a process that lives has it open."""
        return any(proc.alive for proc in self.holders)

    @property
    def is_readable(self) -> bool:
        """Whether a read returns at once."""
        return bool(self.inbox) or not self.other.is_held

    def look_again(self) -> None:
        """Something came, or nothing will come any more."""
        waiters, self.waiters = self.waiters, []
        for task in waiters:
            task.world.wake(task)

    def fileno(self) -> int:
        """See ``socket.socket``."""
        return self.number

    def settimeout(self, _: float | None) -> None:
        """See ``socket.socket``: the writer's parent never waits in a read, and the writer always."""

    def close(self) -> None:
        """See ``socket.socket``."""
        task = hub.task
        if task is not None and task.proc in self.holders:
            self.holders.remove(task.proc)
            self.other.look_again()

    def recv(self, size: int) -> bytes:
        """See ``socket.socket``; without waiting."""
        del size
        here()
        if self.inbox:
            return self.inbox.popleft()[0]
        if self.other.is_held:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return b""

    def sendall(self, data: bytes) -> None:
        """See ``socket.socket``."""
        self.send(data, ())

    def send(self, data: bytes, fds: Sequence[int]) -> None:
        """Send bytes, and copies of descriptors."""
        world = here().world
        if not self.other.is_held:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")
        copies = [os.dup(fd) for fd in fds]
        world.left_open.update(copies)  # until somebody takes them
        self.other.inbox.append((bytes(data), copies))
        self.other.look_again()


def _pair() -> tuple[End, End]:
    proc = here().proc
    numbers = proc.facts.setdefault("next sockets", [_FIRST_SOCKET])
    numbers[0] += 2
    one, two = End(numbers[0]), End(numbers[0] + 1)
    one.other, two.other = two, one
    one.give_to(proc)
    two.give_to(proc)
    return one, two


def _send_fds(end: End, buffers: Sequence[bytes], fds: Sequence[int]) -> None:
    end.send(b"".join(buffers), fds)


def _recv_fds(end: End, size: int, most: int) -> tuple[bytes, list[int], int, None]:
    del size, most
    while not end.is_readable:
        end.waiters.append(here())
        here().wait(None)
    task = here()
    data, fds = end.inbox.popleft() if end.inbox else (b"", [])
    task.world.left_open.difference_update(fds)
    task.proc.facts.setdefault("memory", set()).update(fds)
    return data, fds, 0, None


class Poll:
    """See ``select.poll``; of one socket."""

    def __init__(self) -> None:
        self._end: Any = None

    def register(self, end: End, _: int) -> None:
        """See ``select.poll``."""
        self._end = end

    def poll(self, milliseconds: float) -> list[tuple[int, int]]:
        """See ``select.poll``."""
        task, end = here(), self._end
        if not end.is_readable:
            end.waiters.append(task)
            task.wait(milliseconds / 1000)
            if task in end.waiters:
                end.waiters.remove(task)
        return [(end.number, real_select.POLLIN)] if end.is_readable else []


class Popen:
    """See ``subprocess``: a process of the same host that runs the writer's ``main`` with modules of its own."""

    def __init__(self, args: Sequence[str], *, pass_fds: Sequence[int] = (), **_: Any) -> None:
        task = here()
        parent, world = task.proc, task.world
        found = _MAIN.search(args[-1])
        if found is None:
            raise OSError(errno.ENOENT, f"no such program is simulated: {args[-1]:.200}")
        socket_fd, page_fd, niceness = int(found[1]), int(found[2]), int(found[3])
        if (socket_fd, page_fd) != tuple(pass_fds):
            raise OSError(errno.EBADF, "the child is told of descriptors that it does not get")
        count = parent.facts["children"] = parent.facts.get("children", 0) + 1
        child = self._child = Proc(world, parent.host, f"{parent.name}.writer{count}")
        for key in ("rank", "size", "attempt", "job", "namespace"):
            child.facts[key] = parent.facts[key]
        child.facts |= {"writes for": parent, "phase": "writer"}
        parent.facts["sockets"][socket_fd].give_to(child)
        copy = os.dup(page_fd)
        child.facts["memory"] = {copy}
        hub.task = None  # nothing of the slot's last owner is this process's
        try:
            child.slot = world.history.take_slot(child)
        finally:
            hub.task = task
        self.pid, self.returncode = child.pid, None
        self._waiters: list[Any] = []
        child.at_end.append(self._wake)
        up_s = _SLOW_UP_S if world.rng.random() < _SLOWLY else world.rng.uniform(*_UP_S)
        world.at(world.now + up_s, _begin, child, (socket_fd, copy, niceness, parent.pid, []))
        task.give_way()

    def _wake(self) -> None:
        for task in self._waiters:
            task.world.wake(task)

    def poll(self) -> int | None:
        """See ``subprocess``."""
        if self._child.alive:
            return None
        self.returncode = 0 if self._child.ended == "exit" else -signal.SIGKILL
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """See ``subprocess``."""
        task = here()
        if self._child.alive:
            self._waiters.append(task)
            task.wait(timeout)
            if task in self._waiters:
                self._waiters.remove(task)
        code = self.poll()
        if code is None:
            raise real_subprocess.TimeoutExpired("writer", timeout or 0.0)
        return code

    def kill(self) -> None:
        """See ``subprocess``."""
        here()
        self._child.kill("killed")

    def send_signal(self, _: int) -> None:
        """See ``subprocess``: only the signal at which the writer says where it is; nobody reads that here."""


def _begin(child: Proc, arguments: tuple[Any, ...]) -> None:
    if child.alive:
        child.start(child.slot.load("safe_ckpt.core.writer.process").main, *arguments)


def leave(_: int) -> None:
    """``os._exit``.

    Raises:
        Killed: always.
    """
    here().proc.kill("exit")
    raise Killed


def parent_of(proc: Proc) -> int:
    """``os.getppid``."""
    parent = proc.facts.get("writes for")
    return parent.pid if parent is not None and parent.alive else 1


def modules(socket: types.ModuleType, subprocess: types.ModuleType) -> dict[str, types.ModuleType]:
    """The modules, by name; ``socket`` and ``subprocess`` get what is theirs."""
    other = socket.socket

    def adopted(*given: Any, fileno: int | None = None, **named: Any) -> Any:
        return here().proc.facts["sockets"][fileno] if fileno is not None else other(*given, **named)

    socket.socket = adopted  # type: ignore[attr-defined, misc, assignment]
    socket.socketpair, socket.send_fds, socket.recv_fds = _pair, _send_fds, _recv_fds  # type: ignore[assignment]
    subprocess.Popen = Popen  # type: ignore[attr-defined]
    select = types.ModuleType("select")
    vars(select).update(vars(real_select))
    select.poll = Poll  # type: ignore[attr-defined]
    faulthandler = types.ModuleType("faulthandler")
    faulthandler.enable = faulthandler.register = lambda *_, **__: None  # type: ignore[attr-defined]
    return {"select": select, "faulthandler": faulthandler}
