"""Storage that goes wrong: at the n-th file operation of a whole job, or because it is full."""

from __future__ import annotations

import errno as errors
import mmap
import os
import shutil
import struct
import subprocess
from pathlib import Path

_LAYOUT = struct.Struct("<qqiiiiiiii1024s256s1024s")
_PASS, _KILL_JOB, _FAIL, _FAIL_ALWAYS, _STOP, _DELAY, _TEAR, _KILL_SELF = range(8)
KINDS = {"open": 1, "write": 2, "sync": 4, "rename": 8, "link": 16, "unlink": 32, "mkdir": 64, "truncate": 128}
_DIRECT = {"direct": 256, "sync folder": 512}  # which else count as "write" and "sync"


class FaultyStorage:
    """Counts the file operations of a job below a directory and lets one of them go wrong.

    Start the job with ``environment`` in its environment: a small library is loaded into each of its processes, in front of
    the C library. Operations are those that change something: creating, writing, fsync, renaming, linking, deleting. They are
    counted over all processes of the job, so that going through 1, 2, 3, ... meets every one of them::

        storage = FaultyStorage(tmp_path / "kit")
        storage.kill_job(at=17, below=tmp_path / "runs")
        subprocess.run([sys.executable, "train.py"], env={**os.environ, **storage.environment}, start_new_session=True)
        storage.off()

    Args:
        folder: for the library and its state; created when missing, not below what is watched.

    Raises:
        RuntimeError: there is no C compiler, or this is not Linux.

    Example:
        ```python
        storage = FaultyStorage(Path("kit"))
        storage.fail(1, below=Path("far").absolute())
        made = subprocess.run(["mkdir", "-p", "far"], env={**os.environ, **storage.environment}, capture_output=True)
        print(made.stderr.decode().rpartition(": ")[2])
        ```

        ```text
        Input/output error
        ```
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._library = folder / "shim.so"
        self._state = folder / "state"
        if not self._library.exists():
            _build(self._library)
        if not self._state.exists():  # who is watched has it mapped: it is never replaced
            self._state.write_bytes(bytes(_LAYOUT.size))
        with self._state.open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), _LAYOUT.size)

    @property
    def environment(self) -> dict[str, str]:
        """The environment of a job that is watched."""
        return {"LD_PRELOAD": str(self._library), "SAFE_CKPT_SHIM": str(self._state)}

    @property
    def count(self) -> int:
        """How many operations there were since something was armed."""
        return int(struct.unpack_from("<q", self._page)[0])

    def watch(self, below: Path, *, log: Path | None = None, coordinator: int = 0) -> None:
        """Count, let nothing go wrong, and record every operation with its bytes in ``log`` if it is given."""
        self._arm(_PASS, 0, below, coordinator=coordinator, log=log)

    def kill_job(self, at: int, below: Path, *, coordinator: int = 0) -> None:
        """SIGKILL the process group of whoever makes the operation, before it is done."""
        self._arm(_KILL_JOB, at, below, coordinator=coordinator)

    def tear(self, at: int, below: Path, *, coordinator: int = 0) -> None:
        """As ``kill_job``, but half of a write is done."""
        self._arm(_TEAR, at, below, coordinator=coordinator)

    def kill_process(self, at: int, below: Path, *, coordinator: int = 0, match: str = "") -> None:
        """SIGKILL the process that makes the operation, and no other."""
        self._arm(_KILL_SELF, at, below, coordinator=coordinator, match=match)

    def stop_process(self, at: int, below: Path, *, coordinator: int = 0, match: str = "") -> None:
        """SIGSTOP the process that makes the operation."""
        self._arm(_STOP, at, below, coordinator=coordinator, match=match)

    def fail(
        self,
        at: int,
        below: Path,
        error: int = errors.EIO,
        *,
        always: bool = False,
        coordinator: int = 0,
        kinds: tuple[str, ...] = tuple(KINDS),
    ) -> None:
        """Let the operation, or with ``always`` every one from there on, fail with this ``errno``.

        ``kinds`` are those of ``KINDS``, or ``"sync folder"``, or ``"direct"`` for writes with O_DIRECT.
        """
        self._arm(_FAIL_ALWAYS if always else _FAIL, at, below, coordinator=coordinator, error=error, kinds=kinds)

    def delay(self, at: int, below: Path, seconds: float, *, coordinator: int = 0) -> None:
        """Let the operation take this much longer."""
        self._arm(_DELAY, at, below, coordinator=coordinator, delay_s=seconds)

    def hide(self, below: Path, seconds: float, *, coordinator: int) -> None:
        """Let the processes of a session not see entries of others that are younger, as a network file system's cache does."""
        self._arm(_PASS, 0, below, hide_s=seconds, hidden_from=coordinator)

    def off(self) -> None:
        """Let everything pass again."""
        self._page[: _LAYOUT.size] = bytes(_LAYOUT.size)

    def _arm(
        self,
        action: int,
        at: int,
        below: Path,
        *,
        coordinator: int = 0,
        error: int = 0,
        kinds: tuple[str, ...] = tuple(KINDS),
        delay_s: float = 0.0,
        hide_s: float = 0.0,
        hidden_from: int = 0,
        match: str = "",
        log: Path | None = None,
    ) -> None:
        self.off()
        self._page[: _LAYOUT.size] = _LAYOUT.pack(
            0,
            at,
            action,
            error,
            coordinator,
            sum({**KINDS, **_DIRECT}[kind] for kind in kinds),
            round(delay_s * 1000),
            round(hide_s * 1000),
            hidden_from,
            int(log is not None),
            os.fsencode(below.resolve()),
            match.encode(),
            os.fsencode(log or ""),
        )


def _build(library: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise RuntimeError("FaultyStorage needs a C compiler: install gcc or clang")
    source = Path(__file__).with_name("shim.c")
    command = [compiler, "-O1", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"]
    built = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    if built.returncode != 0:
        raise RuntimeError(f"the fault library does not build here:\n{built.stderr}")


__all__ = ["KINDS", "FaultyStorage"]
