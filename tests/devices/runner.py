"""Runs many programs, in processes of their own: a host that touches device memory dies, and the next one goes on."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]
_LIMIT_S = (
    300.0  # of one program, and of loading a framework; a quiet machine takes a fifth of a second, and ten seconds
)
_SHARED = Path("/dev/shm")


FRAMEWORKS = ("lightning", "accelerate", "transformers")
KINDS = ("saved", "staged", "pair", *FRAMEWORKS)
"""Whole programs with a ``Checkpointer``; snapshots alone, which are many in a second; programs of two ranks; runs of a
framework, which are killed and started again.
"""


def one(seed: int, kind: str = "saved") -> list[str]:
    """Run a program in this process, whose accelerator is made the late one. Returns what was wrong."""
    import torch

    from devices.draw import drawn
    from devices.program import Program
    from devices.staged import Snapshots
    from kit import device

    late = device.load()
    torch.set_num_threads(1)  # sums have one order
    if kind == "staged":
        return Snapshots(seed, late).run()
    folder = Path(tempfile.mkdtemp(dir=_SHARED if _SHARED.is_dir() else None))
    try:
        return Program(drawn(seed), folder, late).run()
    except Exception:
        return [traceback.format_exc(limit=-4)]
    finally:
        late.forget_error()
        shutil.rmtree(folder, ignore_errors=True)


def inside(first: int, count: int, kind: str, bug: str | None) -> None:
    """In a process of their own: run them, and say before and after each which it is."""
    if bug is not None:
        from devices import planted

        planted.plant(bug)
    if kind == "pair":
        from devices import pair

        pair.begin(first, count, bug)
        return
    if kind in FRAMEWORKS:
        from devices import fits

        fits.begin(kind, first, count)
        return
    for seed in range(first, first + count):
        print(f"begin {seed}", flush=True)
        wrong = one(seed, kind)
        print(f"end {seed} {' | '.join(wrong)!r}", flush=True)


def many(first: int, count: int, kind: str = "saved", bug: str | None = None) -> Iterator[tuple[int, str]]:
    """Run them. Returns each seed with what was wrong; "" for nothing."""
    at, end = first, first + count
    while at < end:
        for seed, wrong in _in_a_process(at, end - at, kind, bug):
            at = seed + 1
            yield seed, wrong


def first_wrong(bug: str, count: int, kind: str = "saved", first: int = 0) -> tuple[int, str] | None:
    """The first seed that finds a planted bug, and what is wrong with it."""
    return next(((seed, wrong) for seed, wrong in many(first, count, kind, bug) if wrong), None)


def _in_a_process(first: int, count: int, kind: str, bug: str | None) -> Iterator[tuple[int, str]]:
    command = [sys.executable, "-m", "devices", "--inside", "--first", str(first), "--count", str(count)]
    command += ["--kind", kind]
    command += ["--bug", bug] if bug is not None else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command,
            cwd=TESTS,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        ) as process,
    ):
        try:
            seed, died = yield from _read(process, first)
            if died:
                errors.seek(0)
                yield seed, f"{died}: {errors.read()[-1200:]}"
        finally:
            with contextlib.suppress(ProcessLookupError):  # its other rank may be left where it has died
                os.killpg(process.pid, signal.SIGKILL)


def _read(process: subprocess.Popen[str], first: int) -> Iterator[tuple[int, str]]:
    seed, running = first, True
    limit = _Limit(process)
    for line in process.stdout or ():
        limit.begin_again()
        word, _, rest = line.partition(" ")
        if word == "begin":
            seed, running = int(rest), True
        elif word == "end":
            running = False
            yield seed, rest.partition(" ")[2].strip()[1:-1]
    limit.end()
    died = f"died with {process.wait()}" + (f", not over after {_LIMIT_S:.0f} s" if limit.is_over else "")
    return seed, died if running else ""


class _Limit:
    """Kills a process that is silent for too long."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process, self.is_over = process, False
        self._timer = threading.Timer(_LIMIT_S, self._kill)
        self._timer.start()

    def begin_again(self) -> None:
        self.end()
        self._timer = threading.Timer(_LIMIT_S, self._kill)
        self._timer.start()

    def end(self) -> None:
        self._timer.cancel()

    def _kill(self) -> None:
        self.is_over = True
        self._process.kill()
