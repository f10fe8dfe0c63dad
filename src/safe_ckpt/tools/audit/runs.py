"""Starts a script and stops it: twice without a stop, and once with SIGKILL behind some optimizer steps."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from safe_ckpt.errors import AuditError
from safe_ckpt.machine import process_state
from safe_ckpt.tools.audit.compare import MEANS, Line, Run, category_of, compare, matching_line, noise, without_equality
from safe_ckpt.tools.audit.result import Audit

OUT = "{out}"
_POLL_S = 0.02
MARKER = "SAFE_CKPT_AUDIT_ID"  # by which what a run has started is found
_HOOK = Path(__file__).with_name("hook")


@dataclass(frozen=True, kw_only=True)
class Options:
    """The runs of an audit.

    Attributes:
        command: of the script; ``{out}`` in it becomes a folder of each run's own.
        folder: gets what the runs write; must be empty.
        resume_args: are added where a run is started again.
        stop: optimizer steps that a start makes before it is killed.
        stops: how often it is killed.
        within_save: every second kill waits until something below ``{out}`` changes.
        until: optimizer steps that are compared, from the beginning.
        timeout_s: for everything.
        told: called with the name of a run, the steps it has made, and those it is to make.
    """

    command: Sequence[str]
    folder: Path
    resume_args: Sequence[str] = ()
    stop: int = 20
    stops: int = 1
    within_save: bool = False
    until: int = 60
    timeout_s: float = 3600.0
    told: Callable[[str, int, int], None] = lambda *_: None

    def __post_init__(self) -> None:
        if self.folder.exists() and any(self.folder.iterdir()):
            raise AuditError(message=f"{self.folder} is not empty: name another folder")
        if not any(OUT in part for part in self.command):
            raise AuditError(
                message=f"write {OUT} where the command names the folder of its checkpoints: each run needs one of its own"
            )
        # The options of a Python in the command stand before its script.
        pythons = [number for number, part in enumerate(self.command) if os.path.basename(part).startswith("python")]
        own = (itertools.takewhile(lambda part: part.startswith("-"), self.command[at + 1 :]) for at in pythons)
        if any(part[1:2] in "ISE" for part in itertools.chain(*own)):
            raise AuditError(
                message="python -I, -S and -E ignore PYTHONPATH, through which the audit looks in: leave them out"
            )
        if not 0 < self.stop < self.until or self.stops < 1:
            raise AuditError(
                message=f"stop={self.stop} must lie below until={self.until}, and stops={self.stops} be 1 or more"
            )


def audit(options: Options) -> Audit:
    """Run it all, and compare.

    Raises:
        AuditError: the script failed, made too few steps, saved nothing, or did not end in time.
    """
    runner = Runner(options)
    whole, second = (runner.run(name, name, options.until) for name in ("whole-1", "whole-2"))
    made = max(map(len, whole.values()))
    if made <= options.stop:
        raise AuditError(message=f"the script makes {made} optimizer steps: stop it behind fewer (--stop)")
    ignored = noise(whole, second)
    blind = sorted({category_of(name) for name in ignored} & {"weights", "data"})
    starts, killed = _stopped(runner, options, [] if blind else whole[min(whole)])
    named = tuple(sorted({f"{MEANS[category_of(name)][0]} {name.partition('.')[2]}".strip() for name in ignored}))
    cannot = f"the {' and the '.join(blind)} differ between two runs that nothing stopped: seed them" if blind else ""
    found = () if blind else tuple(compare(whole, one, ignored) for one in starts)
    told = without_equality(starts[-1]) if blind else (one for part in found for one in part.findings)
    once = {(one.category, one.names): one for one in reversed(list(told))}
    findings = tuple(reversed(once.values()))
    return Audit(killed=tuple(killed), comparisons=found, ignored=named, cannot=cannot, findings=findings)


def _stopped(runner: Runner, options: Options, whole: Sequence[Line]) -> tuple[list[Run], list[int]]:
    """Kill it and start it again; later, where it began at the beginning, for nothing may have been committed.

    Returns:
        What each start told, and behind how many steps it was killed: the last of these counts.
    """
    killed = [options.stop]
    while True:
        stop, out = killed[-1], f"stopped-{killed[-1]}"
        is_last = stop == options.until - 1
        runner.run(out, f"{out}-0", stop)
        if any(path.is_file() for path in (options.folder / out).rglob("*")):
            starts = []
            for number in range(1, options.stops + 1):
                ends = number == options.stops
                steps = options.until if ends else max(1, (options.until - stop) // (2 * options.stops))
                within = options.within_save and number % 2 == 1 and not ends
                starts.append(runner.run(out, f"{out}-{number}", steps, options.resume_args, within=within))
            if is_last or not whole or matching_line(whole, starts[0][min(starts[0])][0]) != 0:
                return starts, killed
        elif is_last:
            raise AuditError(
                message=f"nothing was saved below {OUT} within {stop} steps: save earlier, or raise --until"
            )
        killed.append(min(2 * stop, options.until - 1))


class Runner:
    """Starts the script, and ends it with all that it has started.

    Args:
        options: what to run.
    """

    def __init__(self, options: Options) -> None:
        self._options, self._deadline = options, time.monotonic() + options.timeout_s

    def run(self, out: str, name: str, steps: int, more: Sequence[str] = (), *, within: bool = False) -> Run:
        """Start it, and kill it behind so many optimizer steps. Returns what its processes told.

        Args:
            out: the folder of the run.
            name: of this start.
            steps: of each process.
            more: arguments.
            within: kill it when something changes in its folder behind these steps.
        """
        options, marker = self._options, uuid.uuid4().hex
        records, target, log = (options.folder / one for one in (f"{name}.steps", out, f"{name}.log"))
        records.mkdir(parents=True)
        target.mkdir(exist_ok=True)
        path = os.pathsep.join([str(_HOOK), *filter(None, [os.environ.get("PYTHONPATH")])])
        own = {**os.environ, "PYTHONPATH": path, "SAFE_CKPT_AUDIT": str(records), MARKER: marker}
        own["SAFE_CKPT_AUDIT_STOP"] = str(2 * steps if within else steps)  # none may leave what is compared
        command = [part.replace(OUT, str(target)) for part in options.command] + list(more)
        with log.open("wb") as output:
            try:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    env=own,
                )
            except OSError as error:
                raise AuditError(message=f"{command[0]} could not be started: {error}") from error
            try:
                killed = self._wait(process, records, name, steps, target if within else None)
            finally:
                kill_started(process, marker)
        if not killed and process.returncode:
            _failed(f"the script ended with {process.returncode}", log)
        found = _read(records)
        if not found:
            _failed("the script made no step with an optimizer of torch.optim", log)
        return found

    def _wait(
        self, process: subprocess.Popen[bytes], records: Path, name: str, steps: int, within: Path | None
    ) -> bool:
        """Wait until it ends or is to be killed. Returns whether it is to be killed."""
        before = None
        while True:
            running = process.poll() is None
            made = {int(file.stem): file.read_bytes().count(b"\n") for file in records.iterdir()}
            self._options.told(name, max(made.values(), default=0), steps)
            reached = [pid for pid, number in made.items() if number >= steps]
            if within and reached:
                now = {(str(path), path.stat().st_mtime_ns) for path in within.rglob("*") if path.exists()}
                if now != (before := before or now):
                    return True
            if any(not _runs(pid) for pid in reached):
                return True
            if not running:
                return False
            if time.monotonic() > self._deadline:
                raise AuditError(message=f"not over after {self._options.timeout_s:.0f} s (--timeout-s)")
            time.sleep(_POLL_S)


def _failed(why: str, log: Path) -> NoReturn:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:]
    raise AuditError(message="\n  ".join([f"{why}; the last lines of {log}:", *lines]))


def _runs(pid: int) -> bool:
    return process_state(pid) not in ("", "Z", "X")


def kill_started(process: subprocess.Popen[bytes], marker: str) -> None:
    """Send SIGKILL to it and to all that it has started, also in sessions of their own."""
    looked = f"{MARKER}={marker}".encode()
    for _ in range(100):
        found = False
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                if looked in (entry / "environ").read_bytes().split(b"\0") and _runs(int(entry.name)):
                    found = True
                    os.kill(int(entry.name), signal.SIGKILL)
        if not found:
            break
        time.sleep(_POLL_S)
    process.wait()


def _read(records: Path) -> Run:
    """The lines of each rank. Of several processes of one rank, those of the one that made most steps."""
    found: dict[int, list[Line]] = {}
    for file in sorted(records.iterdir()):
        lines = [json.loads(row) for row in file.read_text(encoding="utf-8").splitlines() if row.endswith("}")]
        if lines and len(lines) > len(found.get(lines[-1]["rank"], [])):
            found[lines[-1]["rank"]] = lines
    return found
