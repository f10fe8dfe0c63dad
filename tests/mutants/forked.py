"""Runs of tests in forks of this process, which has imported torch and pytest: what they test they import anew."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # a process with threads cannot be forked safely
# So that no fork does: it takes most of the time of a mutant that dies at once.
import hypothesis  # noqa: F401
import pytest
import pytest_timeout  # noqa: F401
import torch._dynamo
import torch.distributed.checkpoint  # noqa: F401

_BETWEEN_S = 120.0  # to begin with the first test, and to end behind the last one


@dataclass(frozen=True, kw_only=True)
class Ran:
    """How a test went without a mutant.

    Attributes:
        took_s: with its fixtures, and while it was recorded.
        lines: of each module, those it enters.
        failed: it did; so nothing is known of a mutant with which it fails.
    """

    took_s: float
    lines: Mapping[str, frozenset[int]]
    failed: bool = False

    @property
    def limit_s(self) -> float:
        """For the same test with a mutant, also where it is the first of its file: what takes longer hangs."""
        return 90 + 5 * self.took_s


Record = dict[str, Ran]  # by the name that pytest gives a test


@dataclass(kw_only=True)
class End:
    """How a run ended.

    Attributes:
        passed: every test did.
        by: the test that ended it otherwise: it failed, or took longer than it may.
        late: it took longer.
        output: what pytest printed.
    """

    passed: bool = False
    by: str = "no test: it could not be imported, or pytest ended early"
    late: bool = False
    output: str = ""


class Recorder:
    """A plugin that writes down which lines of the package each test enters, in this process."""

    def __init__(self, source: Path, into: Path) -> None:
        self._source, self._into = str(source) + os.sep, into
        self._lines: dict[
            CodeType, set[int]
        ] = {}  # of one test: of each code of the package, what it has not entered yet
        self._all: dict[CodeType, frozenset[int] | None] = {}
        self._ran: Record = {}
        self._failed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A part of a test is over."""
        if report.failed:
            self._failed.add(report.nodeid)

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
            threading.settrace(None)
            self._ran[item.nodeid] = Ran(took_s=time.monotonic() - begun, lines=self._entered())

    def pytest_sessionfinish(self) -> None:
        """Write it."""
        ran = {test: dataclasses.replace(one, failed=test in self._failed) for test, one in self._ran.items()}
        self._into.write_bytes(pickle.dumps(ran))

    def _entered(self) -> dict[str, frozenset[int]]:
        found: dict[str, set[int]] = {}
        for code, left in list(self._lines.items()):
            lines = self._all[code] or frozenset()
            found.setdefault(code.co_filename.removeprefix(self._source), set()).update(lines - left)
        return {name: frozenset(lines) for name, lines in found.items()}

    def _called(self, frame: FrameType, _event: str, _argument: object) -> Any:
        code = frame.f_code
        if code not in self._all:
            ours = code.co_filename.startswith(self._source)
            self._all[code] = frozenset(line for *_, line in code.co_lines() if line) if ours else None
        if (lines := self._all[code]) is None:
            return None
        left = self._lines.setdefault(code, set(lines))
        if not left:
            return None  # all of it has been entered: to trace it is slow

        def traced(frame: FrameType, event: str, _argument: object) -> Any:
            if event == "line":
                left.discard(frame.f_lineno)
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


class _Telling:
    """A plugin that tells the process that waits which test has begun, and which has failed."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """A test begins."""
        self._tell("begun", nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A part of it is over."""
        if report.failed:
            self._tell("failed", report.nodeid)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """It is over."""
        self._tell("over", nodeid)

    def _tell(self, what: str, test: str) -> None:
        os.write(self._pipe, f"{what} {test}\n".encode())


@dataclass
class _Heard:
    """What it told, and how long one waits for more."""

    record: Record
    failed: list[str] = field(default_factory=list)
    now: str = "what comes before and behind tests"
    end: float = field(default_factory=lambda: time.monotonic() + _BETWEEN_S)

    def take(self, line: str) -> None:
        """Take one line."""
        what, _, test = line.partition(" ")
        if what == "failed":
            self.failed.append(test)
        elif what == "begun":
            ran = self.record.get(test)
            self.now, self.end = test, time.monotonic() + (ran.limit_s if ran else 3600)
        else:
            self.now, self.end = f"what comes behind {test}", time.monotonic() + _BETWEEN_S


def tested(tree: Path, paths: list[str], plugin: Chosen | Recorder, record: Record, scratch: Path) -> End:
    """Run tests of a tree: the chosen ones as far as the first that fails, or takes longer than the record allows."""
    output = scratch / "output.txt"
    told, telling = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(told)
        _ended_with(lambda: _run_in(tree, paths, [plugin, _Telling(telling)], output))
    os.close(telling)
    heard = _Heard(record)
    try:
        status = _waited(pid, told, heard)
    finally:
        os.close(told)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # what a test that was cut off left
    end = End(passed=status == 0, output=output.read_text(encoding="utf-8", errors="replace"))
    if status is None:
        end.by, end.late = heard.now, True
    elif heard.failed:
        end.by = heard.failed[0]
    return end


def _waited(pid: int, told: int, heard: _Heard) -> int | None:
    """Until it ends, and how; None where it took too long and was ended."""
    rest = b""
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if select.select([told], [], [], 0 if ended else 0.02)[0]:
            if not (data := os.read(told, 1 << 16)) and not ended:
                time.sleep(0.02)  # it closed the pipe
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                heard.take(line.decode())
        if ended:
            return status
        if time.monotonic() > heard.end:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return None


def _run_in(tree: Path, paths: list[str], plugins: list[object], output: Path) -> int:
    os.setsid()
    os.chdir(tree)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for stream in (1, 2):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if stream == 1 else 0) | os.O_APPEND), stream)
    os.environ |= {"PYTHONPATH": str(tree / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    sys.dont_write_bytecode = True
    ours = Path(__file__).parents[1]
    kept = [one for one in sys.path if Path(one or ".").absolute() not in (ours, ours.parent / "src")]
    sys.path[:] = [str(tree / "tests"), str(tree / "src"), *kept]
    sys.path_importer_cache.clear()
    left_out = [word for name in ("cacheprovider", "xdist", "anyio") for word in ("-p", f"no:{name}")]
    # Nobody reads why a test fails, and assertions that tell it take long to compile.
    until = ["-x"] if isinstance(plugins[0], Chosen) else []
    return int(pytest.main([*until, "-q", "--quick", "--assert=plain", *left_out, *paths], plugins=plugins))


def _ended_with(work: Callable[[], int]) -> None:
    status = 70
    try:
        status = work()
    finally:
        os._exit(status)
