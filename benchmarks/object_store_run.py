"""One measurement of ``object_stores.py`` in a fresh process: one way to save, one line of JSON.

    durable   the save alone: seconds until it is committed, and CPU seconds of this process and all below it
    training  the save within a loop of steps that compute, and the same number of steps without it
    memory    the save alone, while the memory of all processes is looked at
    requests  the save alone; the caller counts what was asked between ``begun`` and ``done``
    resume    reading back what a measurement before has saved

Before, every way has saved a small state: clients, connections and processes that it needs are there, as in a run that goes on.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from object_store_ways import WAYS, State, Way, digest, make_state, state_bytes
from typing_extensions import Self

STEP_S = 0.01
WARM_STEPS = 20
FEWEST_STEPS = 50
LOOK_EVERY_S = 0.02
SETTLE_S = 0.5
_TICKS = os.sysconf("SC_CLK_TCK")


def descendants(pid: int) -> list[int]:
    """All processes below this one."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            found += [int(child) for child in (task / "children").read_text(encoding="ascii").split()]
    return [*found, *(below for child in found for below in _descendants_of_child(child))]


def _descendants_of_child(pid: int) -> list[int]:
    try:
        return descendants(pid)
    except OSError:  # it has ended
        return []


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, of those below it, and of those that have ended and were waited for."""
    ticks = 0
    for each in (pid, *descendants(pid)):
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{each}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))
    return ticks / _TICKS


def anonymous_bytes(pid: int) -> int:
    """Memory of a process that is no file's, shared memory left out: a snapshot does not count."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines():
            if line.startswith("Anonymous:"):
                return int(line.split()[1]) << 10
    return 0


def shared_bytes(pid: int) -> int:
    """Shared memory that a process has mapped and touched."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("RssShmem:"):
                return int(line.split()[1]) << 10
    return 0


class Memory(threading.Thread):
    """Looks at this process and all below it until it is told to end; keeps the most beyond what there was before.

    Attributes:
        process_bytes: the most anonymous memory of this process beyond what it had.
        children_bytes: likewise of all processes below it.
        total_bytes: the most of both at one time.
        shared_bytes: the most shared memory of this process: the snapshot.
        looks: how often it looked: seldom where a call keeps all other threads waiting.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.process_bytes = self.children_bytes = self.total_bytes = self.shared_bytes = self.looks = 0
        self._over = threading.Event()
        self._before = self._look()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self.join()

    def run(self) -> None:
        while not self._over.wait(LOOK_EVERY_S):
            process, children = (now - before for now, before in zip(self._look(), self._before, strict=True))
            self.looks += 1
            self.process_bytes = max(self.process_bytes, process)
            self.children_bytes = max(self.children_bytes, children)
            self.total_bytes = max(self.total_bytes, process + children)
            self.shared_bytes = max(self.shared_bytes, shared_bytes(os.getpid()))

    def _look(self) -> tuple[int, int]:
        own = os.getpid()
        return anonymous_bytes(own), sum(map(anonymous_bytes, descendants(own)))

    def to_json(self) -> dict[str, int]:
        names = ("process_bytes", "children_bytes", "total_bytes", "shared_bytes", "looks")
        return {name: getattr(self, name) for name in names}


def durable(way: Way, state: State, server: int) -> dict[str, Any]:
    cpu_s, own_s, server_s = cpu_seconds(os.getpid()), time.process_time(), cpu_seconds(server)
    begun = time.perf_counter()
    way.save(1, state)
    call_s = time.perf_counter() - begun
    way.finish()
    durable_s = time.perf_counter() - begun
    return {
        "call_s": call_s,
        "durable_s": durable_s,
        "cpu_s": cpu_seconds(os.getpid()) - cpu_s,
        "own_cpu_s": time.process_time() - own_s,
        "server_cpu_s": cpu_seconds(server) - server_s,
    }


def training(way: Way, state: State, server: int) -> dict[str, Any]:
    del server
    step = make_step()
    run_steps(step, WARM_STEPS)
    saved = threading.Event()
    failures: list[BaseException] = []

    def wait() -> None:
        try:
            way.finish()
        except BaseException as error:  # for the thread that trains
            failures.append(error)
        saved.set()

    before_s = run_steps(step, FEWEST_STEPS)
    steps = 0
    begun = time.perf_counter()
    way.save(1, state)
    call_s = time.perf_counter() - begun
    threading.Thread(target=wait, daemon=True).start()
    while steps < FEWEST_STEPS or not saved.is_set():
        step()
        steps += 1
    with_s = time.perf_counter() - begun
    if failures:
        raise failures[0]
    # What else the machine does changes with time: as many steps without a save are those right before it and right after it.
    without_s = steps / (FEWEST_STEPS + steps) * (before_s + run_steps(step, steps))
    return {"call_s": call_s, "steps": steps, "with_s": with_s, "without_s": without_s, "lost_s": with_s - without_s}


def run_steps(step: Callable[[], object], count: int) -> float:
    begun = time.perf_counter()
    for _ in range(count):
        step()
    return time.perf_counter() - begun


def make_step() -> Callable[[], object]:
    """A step of about ``STEP_S`` on one thread."""
    left, right = torch.randn(192, 192), torch.randn(192, 192)
    torch.mm(left, right)
    once_s = run_steps(lambda: torch.mm(left, right), WARM_STEPS) / WARM_STEPS
    times = max(1, round(STEP_S / once_s))

    def step() -> None:
        for _ in range(times):
            torch.mm(left, right)

    return step


def memory(way: Way, state: State, server: int) -> dict[str, Any]:
    del server
    with Memory() as seen:
        way.save(1, state)
        way.finish()
    return seen.to_json()


def requests(way: Way, state: State, server: int) -> dict[str, Any]:
    del server
    begun = time.monotonic()  # the same clock in all processes
    way.save(1, state)
    way.finish()
    return {"begun": begun, "done": time.monotonic()}


def resume(way: Way, state: State, server: int) -> dict[str, Any]:
    expected = digest(state["model"].values())
    for tensor in state["model"].values():
        tensor.fill_(7.0)  # nothing from which a resume that reads nothing could look right
    way.prepare_resume(state)
    cpu_s, server_s = cpu_seconds(os.getpid()), cpu_seconds(server)
    begun = time.perf_counter()
    found = way.resume(state)
    resume_s = time.perf_counter() - begun
    cpu_s, server_s = cpu_seconds(os.getpid()) - cpu_s, cpu_seconds(server) - server_s
    if digest(found) != expected:
        raise SystemExit("what was read is not what was saved")
    return {"resume_s": resume_s, "cpu_s": cpu_s, "server_cpu_s": server_s}


KINDS: dict[str, Callable[[Way, State, int], dict[str, Any]]] = {
    "durable": durable,
    "training": training,
    "memory": memory,
    "requests": requests,
    "resume": resume,
}


@contextlib.contextmanager
def opened(options: argparse.Namespace, state: State) -> Iterator[Way]:
    """The way, ready for its first real save."""
    way = WAYS[options.way](options.url, options.folder)
    way.open()
    try:
        if options.kind != "resume":
            small = {"model": {"weight": torch.zeros(1024)}}
            way.prepare(small)
            way.save(0, small)
            way.finish()
            way.prepare(state)
            time.sleep(SETTLE_S)  # what is made ready in the background
        yield way
    finally:
        way.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--way", choices=WAYS, required=True)
    parser.add_argument("--kind", choices=KINDS, required=True)
    parser.add_argument("--mib", type=int, required=True)
    parser.add_argument("--url", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--server-pid", type=int, required=True)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    state = make_state(options.mib)
    with opened(options, state) as way:
        found = KINDS[options.kind](way, state, options.server_pid)
    print(json.dumps({**found, "state_bytes": state_bytes(state)}))


if __name__ == "__main__":
    main()
