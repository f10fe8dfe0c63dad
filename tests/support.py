"""What several tests need: scripts in processes of their own, small file systems, damage."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from kit import warm
from kit.disks import small_disk
from kit.patience import scaled
from safe_ckpt.versions import SUPPORTED, release

TORCH = release(version("torch"))
heeds_raised_timeouts = pytest.mark.skipif(
    Version(SUPPORTED["torch"].reduced_below) > TORCH, reason=SUPPORTED["torch"].reduced
)
spreads_empty_shards = pytest.mark.skipif(Version("2.13") > TORCH, reason="distribute_tensor raises within torch")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")


class Quiet:
    """Takes what a sink tells of its progress."""

    def moved(self, count):
        pass

    def entered(self, phase):
        pass

    def waiting(self):
        pass


def names_in(folder):
    """What lies in a folder that is made when it is needed, and gone when it is empty."""
    return [path.name for path in folder.glob("*")]


def run_script(
    code: str,
    *args: str,
    timeout_s: float = 60.0,
    flags: tuple[str, ...] = (),
    stdin: str | None = None,
    fresh: bool = False,
    finalize: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process of its own and return what it printed.

    ``fresh`` is for tests about imports, memory or the interpreter itself; ``finalize`` for those about its end.
    """
    command = [sys.executable, *flags]
    command += ["-", *args] if stdin is not None else ["-c", textwrap.dedent(code), *args]
    return _run(command, timeout_s=timeout_s, stdin=stdin, fresh=fresh, finalize=finalize)


def _run(
    command: list[str],
    *,
    timeout_s: float = 60.0,
    stdin: str | None = None,
    fresh: bool = False,
    finalize: bool = False,
    **more: Any,
) -> subprocess.CompletedProcess[str]:
    more |= {"input": stdin, "capture_output": True, "text": True, "timeout": scaled(timeout_s)}
    return subprocess.run(command, check=False, **more) if fresh else warm.run(command, finalize=finalize, **more)


def start_script(path: Path, *args: str, flags: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """Start a script in a process group of its own."""
    return warm.Popen(
        [sys.executable, *flags, str(path), *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def kill_group(process: subprocess.Popen[str], number: signal.Signals = signal.SIGKILL) -> None:
    """Kill a process and everything it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
    process.wait(timeout=30)


_PROGRAMS = {found.stem: found for found in (Path(__file__).parent / "programs").rglob("*.py")}


def program_path(name: str) -> Path:
    """The program of that name in ``tests/programs``, in whichever room; a name is there once."""
    return _PROGRAMS[name]


def run_program(name: str, *args: str, flags: tuple[str, ...] = (), **more: Any) -> subprocess.CompletedProcess[str]:
    """Run ``program_path(name)`` with these arguments, as ``run_script`` runs code, also with ``cwd`` and ``env``."""
    return _run([sys.executable, *flags, str(program_path(name)), *args], **more)


@contextlib.contextmanager
def holding_lock(folder: Path, *, lease_s: float = 60.0, within: tuple[str, ...] = ()):
    """A process that holds the job lock in ``folder``, started by the command ``within``."""
    command = [*within, sys.executable, str(program_path("holds_a_lock")), str(folder), str(lease_s)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


def flip_bit(file: Path, offset: int) -> None:
    """Change one bit of a file; its size stays."""
    with file.open("r+b") as stream:
        stream.seek(offset)
        byte = stream.read(1)[0]
        stream.seek(offset)
        stream.write(bytes([byte ^ 1]))


def processes_of_this_test() -> list[int]:
    """The pids of all processes that the running test caused, directly or through what it started."""
    mark = f"PYTEST_CURRENT_TEST={os.environ['PYTEST_CURRENT_TEST']}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if mark in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
    return found


def kill_all() -> None:
    """SIGKILL to every process that the running test caused: launchers start their ranks in sessions of their own."""
    deadline = time.monotonic() + 30
    while (found := processes_of_this_test()) and time.monotonic() < deadline:
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.001)


def writer_processes() -> list[int]:
    """The pids of the writer processes that the running test caused, directly or through what it started."""
    found = []
    for pid in processes_of_this_test():
        with contextlib.suppress(OSError):
            if b"safe_ckpt.core.writer.process" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


def writers_of(pid: int) -> list[int]:
    """The writer processes that ``pid`` started."""
    found = []
    for writer in writer_processes():
        with contextlib.suppress(OSError):
            stat = Path(f"/proc/{writer}/stat").read_text()
            if int(stat[stat.rfind(")") + 2 :].split()[1]) == pid:
                found.append(writer)
    return found


def share_copies(monkeypatch, *, piece_bytes: int, locked_below_bytes: int) -> None:
    """Every copy is cut into many pieces and shared by two threads, as those of a large state are on several cores."""
    import torch

    from safe_ckpt.core.staging import snapshot

    monkeypatch.setattr(snapshot, "PIECE_BYTES", piece_bytes)
    monkeypatch.setattr(snapshot, "_LOCKED_BELOW", locked_below_bytes)
    monkeypatch.setattr(snapshot, "_HELP_FROM", 1)
    monkeypatch.setattr(snapshot.os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)


def placements(mesh, choice: int, dims: int) -> list[object]:
    """One of all the ways to place a tensor of so many dimensions on a mesh."""
    from torch.distributed.tensor import Replicate, Shard

    found = []
    for _ in range(mesh.ndim):
        choice, kind = divmod(choice, dims + 1)
        found.append(Replicate() if kind == dims else Shard(kind))
    return found


__all__ = [
    "flip_bit",
    "holding_lock",
    "kill_all",
    "kill_group",
    "needs_root",
    "placements",
    "processes_of_this_test",
    "program_path",
    "run_program",
    "run_script",
    "share_copies",
    "small_disk",
    "start_script",
    "writer_processes",
    "writers_of",
]
