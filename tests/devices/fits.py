"""Runs of frameworks on the late accelerator: each is killed and started again, and must be a run that was not.

The frameworks are loaded once. Each start is a fork of this process, which never uses the accelerator itself.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from devices.draw import STEPS, FitPlan, drawn_fit
from devices.fit_parts import Here, Planned
from devices.trainer import differing
from kit import device
from kit.device.module import Late

_SHARED = Path("/dev/shm")
_SAID = 800  # characters, of both ends of what a start said that died


def begin(kind: str, first: int, count: int) -> None:
    """In a process of its own: run them, and say before and after each which it is."""
    late = device.load()
    torch.set_num_threads(1)  # sums have one order
    framework = importlib.import_module(f"devices.fit_{kind}")
    for seed in range(first, first + count):
        print(f"begin {seed}", flush=True)
        folder = Path(tempfile.mkdtemp(dir=_SHARED if _SHARED.is_dir() else None))
        try:
            wrong = _Fit(drawn_fit(seed, kind), folder, late, framework).run()
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        print(f"end {seed} {' | '.join(wrong)!r}", flush=True)


class _Fit:
    """One run. ``run`` returns what was wrong."""

    def __init__(self, plan: FitPlan, folder: Path, late: Late, framework: ModuleType) -> None:
        self._plan, self._folder, self._late, self._framework = plan, folder, late, framework
        self._out = folder / "out"
        self._out.mkdir()
        self._wrong: list[str] = []
        self._is_fresh = True  # there was no checkpoint yet

    def run(self) -> list[str]:
        """Once without saves, then with them: killed, and started again."""
        if not self._start("reference", None):
            return self._wrong
        states = self._states("reference", 0)
        if not any(name.endswith("back.weight") for name in differing(dict(states[1]), dict(states[STEPS]))):
            self._wrong.append("the run without saves does not train")
        for number, stop in enumerate((*self._plan.stops, None)):
            before = max(self._framework.saved(self._out, self._plan), default=0)
            self._is_fresh = not before
            if not self._start(str(number), stop):
                return self._wrong
            for rank in range(self._plan.ranks):
                self._look_at(f"{number}", rank, before)
        self._look_at_checkpoints()
        self._look_at_the_end()
        return self._wrong

    def _notes(self, name: str, rank: int) -> str:
        return str(self._folder / f"{name}-{rank}")

    def _told(self, name: str, rank: int) -> list[Any]:
        return [json.loads(line) for line in Path(self._notes(name, rank) + ".told").read_text().splitlines()]

    def _states(self, name: str, rank: int) -> dict[int, dict[str, torch.Tensor]]:
        states: dict[int, dict[str, torch.Tensor]] = torch.load(self._notes(name, rank) + ".states")
        return states

    def _start(self, name: str, stop: tuple[int, str] | None) -> bool:
        """Start all ranks. Returns whether they ended as they should."""
        print(f"start {name}", flush=True)  # whoever waits for this process sees that it goes on
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        raises = stop is not None and stop[1] == "raises"
        # One of the ranks is killed where it stops, and the other by us.
        who = self._plan.seed % self._plan.ranks
        pids = {}
        for rank in range(self._plan.ranks):
            pid = os.fork()
            if not pid:
                self._inside(name, rank, stop if raises or rank == who else None, port)
            pids[pid] = rank
        codes: dict[int, int] = {}
        while pids:
            pid, status = os.wait()
            codes[pids.pop(pid)] = os.waitstatus_to_exitcode(status)
            for other in pids if status else ():
                os.kill(other, signal.SIGKILL)
        killed = stop is not None and ["killed", stop[0]] in self._told(name, who)
        expected = {-signal.SIGKILL} if killed and not raises else {0}
        if set(codes.values()) == expected:
            return True
        for rank, code in codes.items():
            said = Path(self._notes(name, rank) + ".said").read_text()
            said = said if len(said) < 2 * _SAID else f"{said[:_SAID]} ... {said[-_SAID:]}"
            self._wrong.append(f"start {name}, rank {rank}: ended with {code}: {said}")
        return False

    def _inside(self, name: str, rank: int, stop: tuple[int, str] | None, port: int) -> None:
        code = 1
        try:
            said = os.open(self._notes(name, rank) + ".said", os.O_WRONLY | os.O_CREAT)
            os.dup2(said, 1)
            os.dup2(said, 2)
            with contextlib.suppress(Planned):
                self._train(name, rank, stop, port)
            code = 0
        except BaseException:
            traceback.print_exc(limit=-8)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _train(self, name: str, rank: int, stop: tuple[int, str] | None, port: int) -> None:
        plan, reference = self._plan, name == "reference"
        torch.set_num_threads(
            1
        )  # now: torch's pool of threads is made anew after a fork, by whichever threads are first
        if plan.ranks > 1:
            device.register_group()
            places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": plan.ranks, "LOCAL_WORLD_SIZE": plan.ranks}
            places |= {"NODE_RANK": 0, "GROUP_RANK": 0, "MASTER_PORT": port}
            os.environ.update({key: str(value) for key, value in places.items()}, MASTER_ADDR="127.0.0.1")
        # Whatever a start does not read from a checkpoint is other than it was.
        seed = plan.seed + (0 if reference or self._is_fresh else 1000)
        torch.manual_seed(seed)
        self._late.manual_seed_all(seed)
        notes = self._notes(name, rank)
        self._framework.run(Here(plan, self._out, notes, self._late, rank, stop, reference=reference))

    def _look_at(self, name: str, rank: int, newest: int) -> None:
        """A start goes on from the newest checkpoint, with the rows that come next."""
        told = self._told(name, rank)
        begun = next((step for word, step in told if word == "begins"), None)
        if begun is None or begun < newest:
            self._wrong.append(f"start {name}, rank {rank}: goes on after {begun} steps where {newest} were saved")
            return
        taken = [rows for word, rows in told if word == "rows"]
        expected = [rows for word, rows in self._told("reference", rank) if word == "rows"][begun:]
        if taken != expected[: len(taken)]:
            self._wrong.append(
                f"start {name}, rank {rank}: trains on {taken} behind step {begun} instead of {expected}"
            )

    def _look_at_checkpoints(self) -> None:
        states = self._states("reference", 0)
        found = self._framework.saved(self._out, self._plan)
        due = set(range(self._plan.every, STEPS + 1, self._plan.every)) | self._framework.ALSO_SAVED
        due |= {step for step, where in self._plan.stops if where == "raises" and step in found}
        if found.keys() != due:  # what was in flight at a kill is saved again
            self._wrong.append(f"there are checkpoints of steps {sorted(found)} instead of {sorted(due)}")
        for step in sorted(found.keys() & states.keys()):
            expected = {key: value for key, value in states[step].items() if key in found[step]}
            if wrong := differing(dict(found[step]), dict(expected)):
                self._wrong.append(f"the checkpoint of step {step}: {_short(wrong)}")

    def _look_at_the_end(self) -> None:
        for rank in range(self._plan.ranks):
            expected, found = self._states("reference", rank), self._states(str(len(self._plan.stops)), rank)
            if max(expected) != STEPS or max(found) != STEPS:
                self._wrong.append(f"rank {rank}: ended after {max(found)} and {max(expected)} steps")
            elif wrong := differing(dict(found[STEPS]), dict(expected[STEPS])):
                self._wrong.append(f"the end, on rank {rank}: {_short(wrong)}")


def _short(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
