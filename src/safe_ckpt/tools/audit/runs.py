"""Starts a script and stops it: twice without a stop, and once with SIGKILL behind some optimizer steps."""

from __future__ import annotations

import collections
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

from safe_ckpt.tools.audit.compare import (
    MEANS,
    Audit,
    Comparison,
    Line,
    Run,
    category_of,
    compare,
    noise,
    place,
    without_equality,
)

OUT = "{out}"
_POLL_S = 0.02
_HOOK = Path(__file__).with_name("hook")


class AuditError(Exception):
    """The script could not be run, or its runs not be compared."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to run.

    Attributes:
        command: of the script; ``{out}`` in it becomes a folder of each run's own.
        resume_args: are added where a run is started again.
        stop: optimizer steps that a start makes before it is killed.
        stops: how often it is killed.
        within_save: every second kill waits until something below ``{out}`` changes.
        until: optimizer steps that are compared, from the beginning.
        timeout_s: for everything.
        folder: gets what the runs write; must be empty.
        told: called with a line of progress.
    """

    command: Sequence[str]
    resume_args: Sequence[str] = ()
    stop: int = 20
    stops: int = 1
    within_save: bool = False
    until: int = 40
    timeout_s: float = 3600.0
    folder: Path
    told: Callable[[str], None] = lambda _: None

    def __post_init__(self) -> None:
        if not self.command:
            raise AuditError("no command: safe-ckpt audit -- python train.py --out {out}")
        if not any(OUT in part for part in self.command):
            raise AuditError(
                f"each run needs a folder of its own: write {OUT} where the command names the folder of its checkpoints"
            )
        if {"-I", "-S", "-E"} & set(self.command):
            raise AuditError("python -I, -S and -E ignore PYTHONPATH, through which the audit looks in: leave them out")
        if not 0 < self.stop < self.until:
            raise AuditError(f"stop={self.stop} must lie within the steps that are compared, until={self.until}")


def audit(options: Options) -> Audit:
    """Run it all, and compare.

    Raises:
        AuditError: the script failed, made too few steps, or did not end in time.
    """
    runner = _Runner(options)
    whole, second = (runner.run(name, name, options.until) for name in ("whole-1", "whole-2"))
    if max(map(len, whole.values())) <= options.stop:
        raise AuditError(
            f"the script made {max(map(len, whole.values()))} optimizer steps: stop it behind fewer (--stop)"
        )
    ignored = noise(whole, second)
    blind = sorted({category_of(name) for name in ignored} & {"weights", "data"})
    starts, stop = _stopped(runner, options, () if blind else whole[min(whole)])
    told = tuple(sorted({MEANS[category_of(name)][0] or name.partition(".")[2] for name in ignored}))
    if blind:
        cannot = f"cannot compare: the {' and '.join(blind)} differ between two runs that nothing stopped. Seed them"
        return Audit(stops=(stop,), comparisons=(), ignored=told, cannot=cannot, findings=without_equality(starts[-1]))
    found = tuple(compare(whole, one, ignored) for one in starts)
    return Audit(stops=(stop,) * options.stops, comparisons=found, ignored=told, findings=_first_of_each(found))


def _first_of_each(comparisons: Sequence[Comparison]) -> tuple:
    found = {(one.category, one.names): one for part in reversed(comparisons) for one in part.findings}
    return tuple(found.values())


def _stopped(runner: _Runner, options: Options, whole: Sequence[Line]) -> tuple[list[Run], int]:
    """Kill it and start it again. Where nothing was restored because nothing had been saved, later."""
    stop = options.stop
    for attempt in range(8):
        name, starts = f"stopped-{attempt}", []
        runner.run(name, f"{name}-0", stop)
        saved = any(path.is_file() for path in (options.folder / name).rglob("*"))
        if saved or 2 * stop >= options.until:
            for number in range(1, options.stops + 1):
                last = number == options.stops
                within = options.within_save and number % 2 == 1
                steps = options.until if last else stop
                starts.append(
                    runner.run(name, f"{name}-{number}", steps, options.resume_args, within=within and not last)
                )
            begins = starts[0][min(starts[0])]
            if not whole or place(whole, begins[0]) != 0 or 2 * stop >= options.until:
                return starts, stop
        stop = min(2 * stop, options.until - 1)
        options.told(f"nothing to resume from was saved before the kill: it comes behind step {stop} now")
    raise AssertionError("not reached")


class _Runner:
    def __init__(self, options: Options) -> None:
        self._options, self._deadline = options, time.monotonic() + options.timeout_s

    def run(self, out: str, name: str, stop: int, more: Sequence[str] = (), *, within: bool = False) -> Run:
        """Start it, and kill it behind so many steps. Returns what its processes told."""
        options, marker = self._options, uuid.uuid4().hex
        records, target = options.folder / f"{name}.steps", options.folder / out
        records.mkdir(parents=True)
        target.mkdir(exist_ok=True)
        options.told(f"{name}: {stop} steps")
        path = os.pathsep.join([str(_HOOK), *filter(None, [os.environ.get("PYTHONPATH")])])
        own = {"PYTHONPATH": path, "SAFE_CKPT_AUDIT": str(records), "SAFE_CKPT_AUDIT_ID": marker}
        command = [part.replace(OUT, str(target)) for part in options.command] + list(more)
        log = options.folder / f"{name}.log"
        with log.open("wb") as written:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=written,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **own, "SAFE_CKPT_AUDIT_STOP": str(0 if within else stop)},
            )
            try:
                killed = self._wait(process, records, target, stop, within)
            finally:
                _kill(process, marker)
        if not killed and process.returncode:
            self._failed(f"{name} ended with {process.returncode}", log)
        found = _read(records)
        if not found:
            self._failed(f"{name} made no optimizer step with torch.optim", log)
        return found

    def _wait(self, process: subprocess.Popen[bytes], records: Path, target: Path, stop: int, within: bool) -> bool:
        """Until it ends or is to be killed. Returns whether it is."""
        before = None
        while process.poll() is None:
            if time.monotonic() > self._deadline:
                raise AuditError(f"not over after {self._options.timeout_s:.0f} s (--timeout-s)")
            reached = [int(file.stem) for file in records.iterdir() if file.read_bytes().count(b"\n") >= stop]
            if within and reached:
                now = {(str(path), path.stat().st_mtime_ns) for path in target.rglob("*") if path.exists()}
                if before is not None and now != before:
                    return True
                before = before or now
            elif any(not _runs(pid) for pid in reached):
                return True
            time.sleep(_POLL_S)
        return any(file.read_bytes().count(b"\n") >= stop for file in records.iterdir())

    def _failed(self, why: str, log: Path) -> NoReturn:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:]
        raise AuditError("\n  ".join([f"{why}; the last lines of {log}:", *lines]))


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _kill(process: subprocess.Popen[bytes], marker: str) -> None:
    """SIGKILL for it and for all that it has started, also in sessions of their own."""
    looked = f"SAFE_CKPT_AUDIT_ID={marker}".encode()
    for _ in range(100):
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and looked in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                continue
        found = [pid for pid in found if _runs(pid)]
        if not found:
            break
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(_POLL_S)
    process.wait()


def _read(records: Path) -> Run:
    """The lines of each rank. Of several processes of one rank, those of the one that made most steps."""
    found: dict[int, list[Line]] = collections.defaultdict(list)
    for file in sorted(records.iterdir()):
        lines = [json.loads(row) for row in file.read_text(encoding="utf-8").splitlines() if row.endswith("}")]
        if lines and len(lines) > len(found[lines[-1]["rank"]]):
            found[lines[-1]["rank"]] = lines
    return dict(found)
