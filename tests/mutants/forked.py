"""Runs of tests in forks of this process, which has imported torch and pytest: what they test they import anew."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # a process with threads cannot be forked safely
import pytest
import torch._dynamo
import torch.distributed.checkpoint  # noqa: F401 - so that no fork does

Record = dict[str, dict[str, list[int]]]  # of each test, of each module: the lines it enters


class Recorder:
    """A plugin that writes down which lines of the package each test enters, in this process, the quickest test first."""

    def __init__(self, source: Path, into: Path) -> None:
        self._source, self._into = str(source) + os.sep, into
        self._lines: dict[str, set[int]] = {}
        self._took: dict[str, tuple[float, dict[str, list[int]]]] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """With what its fixtures enter, and its threads."""
        self._lines = {}
        begun = time.monotonic()
        threading.settrace(self._called)
        sys.settrace(self._called)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]
            lines = {name.removeprefix(self._source): sorted(entered) for name, entered in self._lines.items()}
            self._took[item.nodeid] = (time.monotonic() - begun, lines)

    def pytest_sessionfinish(self) -> None:
        """Write it."""
        quickest = sorted(self._took.items(), key=lambda one: one[1][0])
        self._into.write_text(json.dumps({test: lines for test, (_, lines) in quickest}))

    def _called(self, frame: FrameType, _event: str, _argument: object) -> Any:
        name = frame.f_code.co_filename
        if not name.startswith(self._source):
            return None
        entered = self._lines.setdefault(name, set())

        def traced(frame: FrameType, event: str, _argument: object) -> Any:
            if event == "line":
                entered.add(frame.f_lineno)
            return traced

        return traced


class Chosen:
    """A plugin that runs these tests alone, in this order."""

    def __init__(self, tests: list[str]) -> None:
        self._order = {test: number for number, test in enumerate(tests)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave out the others."""
        items[:] = sorted((one for one in items if one.nodeid in self._order), key=lambda one: self._order[one.nodeid])


def passes(tree: Path, paths: list[str], plugin: object, limit_s: float) -> bool:
    """Whether the tests pass within the limit of time."""
    pid = os.fork()
    if pid == 0:
        _ended_with(lambda: _tested(tree, paths, plugin))
    end = time.monotonic() + limit_s
    try:
        while time.monotonic() < end:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                return status == 0
            time.sleep(0.02)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return False
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # what a test that was cut off left


def _tested(tree: Path, paths: list[str], plugin: object) -> int:
    os.setsid()
    os.chdir(tree)
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nothing, stream)
    os.environ |= {"PYTHONPATH": str(tree / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    sys.dont_write_bytecode = True
    ours = Path(__file__).parents[1]
    kept = [one for one in sys.path if Path(one or ".").absolute() not in (ours, ours.parent / "src")]
    sys.path[:] = [str(tree / "tests"), str(tree / "src"), *kept]
    sys.path_importer_cache.clear()
    command = ["-x", "-q", "--quick", "-p", "no:cacheprovider", "-p", "no:xdist", *paths]
    return int(pytest.main(command, plugins=[plugin]))


def _ended_with(work: Callable[[], int]) -> None:
    status = 70
    try:
        status = work()
    finally:
        os._exit(status)
