"""Every error that safe_ckpt raises on purpose. Errors carry their facts as fields, survive pickling, and cross ranks as JSON.

```text
SafeCheckpointError
├── ConfigError(ValueError)                a setting is unknown, of the wrong type or out of range
├── StateError(TypeError)                  something in the state cannot be saved
├── RestoreError(ValueError)               the checkpoint does not fit the state it is restored into
├── DirectoryError(OSError)                a directory could not be set up, read or written
│   ├── DirectoryInUseError                another live job holds it
│   ├── DirectoryNotSharedError            the ranks see different directories
│   └── NotEnoughSpaceError                the file system cannot take the checkpoint
├── CoordinationError(RuntimeError)        the ranks could not act as one
│   ├── RendezvousTimeout(TimeoutError)    some ranks did not arrive in time
│   ├── PeerLostError(ConnectionError)     a rank died or stopped
│   ├── DesyncError                        the ranks asked for different things
│   └── TamperedError                      a value in the ranks' store is from nobody of this job
├── SaveError(RuntimeError)                a save failed and nothing was committed
│   ├── WriterError                        the writer process died or stalled too often
│   ├── SourceChangedError                 a file changed while it was being copied
│   └── SaveSkippedError                   the save was not started: another one was in flight
├── CommitOutcomeUnknown(RuntimeError)     a save may be committed or not: rank 0 was lost between commit and verdict
├── UnhealthyStateError(ArithmeticError)   what was saved has numbers that are NaN or infinite
├── MirrorBehindError(RuntimeError)        it is committed, and copies are further behind than they may be
├── CorruptCheckpointError(ValueError)     bytes on disk are not the bytes that were written
│   ├── HostileCheckpointError             no tool writes such a file: it could run code, exhaust or mislead the reader
│   └── IncompleteCheckpointError          a file of it is not there; nothing says that bytes are wrong
├── UnsupportedFormatError(ValueError)     written by a newer version, or not a checkpoint of ours
├── NoValidCheckpointError(FileNotFoundError)  checkpoints were expected and none is usable
├── CheckpointNotFoundError(FileNotFoundError)  a checkpoint that was named is not there: no fresh run
├── UnsupportedVersionError(ImportError)   a framework is not installed, or too old
├── UnexpectedError(RuntimeError)          another rank met an error that is none of these
├── AuditError(RuntimeError)               a script that is audited could not be run, or its runs not be compared
├── ResumeDiffersError(AssertionError)     a script goes on differently than one that nobody stopped
├── ForkedError(RuntimeError)              a call in a process that was forked from the one that opened it
└── ClosedError(RuntimeError)              a call on something that was closed
```
"""

from __future__ import annotations

import contextlib
import errno as _errno
import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

_ONE_DIRECTORY = "All ranks write one directory together, with a file for what differs: give all of them the same path"
_DESYNC_ADVICE = {
    "versions": "Install the same on every node: one version may not understand the files and messages of another",
    "settings": "Give all ranks the same settings: see arguments, SAFE_CKPT_CONFIG, SAFE_CKPT__* (safe-ckpt config show)",
    "output_dir": _ONE_DIRECTORY,
    "save_directory": _ONE_DIRECTORY,
    "state": "Wrap it in PerRank if every rank is to save its own; else give it the same kind and names on all ranks",
}


class SafeCheckpointError(Exception):
    """Root of the tree. Catch this to catch every error that safe_ckpt raises on purpose.

    Example:
        ```python
        try:
            safe_ckpt.load("runs/none", {"model": model})
        except SafeCheckpointError as error:
            print(type(error).__name__, isinstance(error, FileNotFoundError))
        ```

        ```text
        NoValidCheckpointError True
        ```
    """

    _text: ClassVar[str] = ""
    """The words, with the fields of the error as ``{0.field}``; without it they are the ``message``."""

    def __reduce__(self) -> tuple[Any, ...]:
        notes = getattr(self, "__notes__", None)
        return functools.partial(type(self), **fields_of(self)), (), {"__notes__": list(notes)} if notes else None

    def __str__(self) -> str:
        return self._text.format(self) or str(getattr(self, "message", "")) or type(self).__name__


def fields_of(error: SafeCheckpointError) -> dict[str, Any]:
    """Its fields."""
    return {f.name: getattr(error, f.name) for f in fields(error) if f.init}  # type: ignore[arg-type]


@dataclass(eq=False, kw_only=True)
class ConfigError(SafeCheckpointError, ValueError):
    """A setting is unknown, of the wrong type or out of range; ``message`` says what is wrong and what is allowed.

    ``key`` is the path of the setting or the name of an argument; ``source`` and ``line`` (from 1) say where it was written.
    """

    message: str
    key: str = ""
    source: str = ""
    line: int | None = None

    def __str__(self) -> str:
        where = self.source if self.line is None else f"{self.source}:{self.line}"
        return ": ".join(part for part in (where, self.key, self.message) if part)


@dataclass(eq=False, kw_only=True)
class StateError(SafeCheckpointError, TypeError):
    """Something in the state cannot be saved; ``key`` says where it is, ``rank`` on which rank."""

    message: str
    key: str
    rank: int = 0
    _text = "cannot save {0.key}: {0.message} (rank {0.rank})"


@dataclass(eq=False, kw_only=True)
class RestoreError(SafeCheckpointError, ValueError):
    """The checkpoint does not fit the state it is restored into."""

    message: str
    path: str = ""
    key: str = ""

    def __str__(self) -> str:
        where = f" from {self.path}" if self.path else ""
        return f"cannot restore{f' {self.key}' if self.key else ''}{where}: {self.message}"


@dataclass(eq=False, kw_only=True)
class DirectoryError(SafeCheckpointError, OSError):
    """A directory or file could not be set up, read or written: ``rank`` met this at ``path`` during ``phase``.

    ``code`` is the ``errno``, 0 where there is none; also available as ``errno``. ``path`` is "" where it is not known.
    """

    message: str
    path: str
    rank: int = 0
    code: int = 0
    phase: str = ""

    def __post_init__(self) -> None:
        self.errno, self.filename = self.code or None, self.path or None

    @classmethod
    def of(cls, error: OSError, *, path: str | os.PathLike[str], rank: int, phase: str) -> DirectoryError:
        """Wrap an ``OSError`` of the operating system, keeping its errno."""
        reason = (error.strerror or str(error) or type(error).__name__) + _whose(error, os.fspath(path))
        return cls(message=reason, path=os.fspath(path), rank=rank, code=error.errno or 0, phase=phase)

    def __str__(self) -> str:
        code = f" [{_errno.errorcode.get(self.code, self.code)}]" if self.code else ""
        phase = f" while {self.phase}" if self.phase else ""
        return f"{f'{self.path}: ' if self.path else ''}{self.message}{code}{phase} (rank {self.rank})"


@dataclass(eq=False, kw_only=True)
class DirectoryInUseError(DirectoryError):
    """Another live job holds the directory."""

    host: str = "?"
    pid: int = 0
    started_at: str = "?"

    def __str__(self) -> str:
        holder = f"in use by process {self.pid} on host {self.host}, started {self.started_at}: " if self.pid else ""
        return f"{self.path}: {holder}{self.message} (rank {self.rank})"


@dataclass(eq=False, kw_only=True)
class DirectoryNotSharedError(DirectoryError):
    """The ranks see different directories under one path."""

    message: str = "the ranks must share the directory: use a file system that all hosts mount"
    ranks: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.path}: {self.message} (ranks {_listed(self.ranks)} do not see what rank 0 created)"


@dataclass(eq=False, kw_only=True)
class NotEnoughSpaceError(DirectoryError):
    """The file system cannot take the checkpoint."""

    needed_bytes: int = 0
    free_bytes: int = 0

    def __post_init__(self) -> None:
        self.code = self.code or _errno.ENOSPC
        super().__post_init__()

    def __str__(self) -> str:
        space = f"not enough space: {self.needed_bytes} bytes needed, {self.free_bytes} bytes free"
        return f"{self.path}: {space}. {self.message} (rank {self.rank})"


class CoordinationError(SafeCheckpointError, RuntimeError):
    """The ranks could not act as one."""


@dataclass(eq=False, kw_only=True)
class RendezvousTimeout(CoordinationError, TimeoutError):
    """The ranks ``missing`` did not come to ``phase`` in time. If they are alive, ``call`` is what they did not call."""

    phase: str
    seconds: float
    missing: tuple[int, ...] = ()
    call: str = ""

    def __str__(self) -> str:
        if not self.missing:
            return f"{self.phase}: not over after {self.seconds:.1f} s"
        alive = f". They are alive and somewhere else: all processes must call {self.call}" if self.call else ""
        return f"{self.phase}: waited {self.seconds:.1f} s, missing ranks: {_listed(self.missing)}{alive}"


@dataclass(eq=False, kw_only=True)
class PeerLostError(CoordinationError, ConnectionError):
    """A rank died, stopped or left while the others needed it."""

    phase: str
    ranks: tuple[int, ...]
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.phase}: {f'lost ranks {_listed(self.ranks)}: ' if self.ranks else ''}{self.reason}"


@dataclass(eq=False, kw_only=True)
class TamperedError(CoordinationError):
    """A value in the store in which the ranks meet was not written by a rank of this job."""

    key: str
    _text = (
        "{0.key}: this value was not written by a rank of this job. Another program writes to the port of rank 0's "
        "store: let no other hosts and users reach it (network.interface)"
    )


@dataclass(eq=False, kw_only=True)
class DesyncError(CoordinationError):
    """The ranks asked for different things in the same call: ``what`` differs; ``values`` has each rank's, as text."""

    what: str
    values: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        by_value: dict[str, list[int]] = {}
        for rank, value in self.values.items():
            by_value.setdefault(value, []).append(int(rank))
        sides = "; ".join(f"ranks {_listed(tuple(ranks))}: {value}" for value, ranks in by_value.items())
        same = "Every rank must make the same calls in the same order"
        advice = _DESYNC_ADVICE.get(self.what.partition("[")[0], same)
        return f"the ranks disagree on {self.what}: {sides}. {advice}"


@dataclass(eq=False, kw_only=True)
class SaveError(SafeCheckpointError, RuntimeError):
    """A save of ``name`` failed; nothing was committed and earlier checkpoints are untouched.

    ``rank`` failed first, in ``phase``; ``cause`` says what happened, and ``code`` is its ``errno``, 0 where there is none.
    """

    name: str
    cause: str
    rank: int = 0
    phase: str = ""
    code: int = 0
    _text = "{0.name} was not saved: rank {0.rank} failed in {0.phase}: {0.cause}"


@dataclass(eq=False, kw_only=True)
class WriterError(SaveError):
    """The writer process died or stalled more often than is allowed."""

    pid: int = 0
    ended: str = ""


@dataclass(eq=False, kw_only=True)
class SourceChangedError(SaveError):
    """A file changed while it was being copied; ``source`` says which."""

    source: str
    phase: str = "copying"


class SaveSkippedError(SaveError):
    """The save was not started because another one was in flight (``on_busy="skip"``)."""

    _text = "{0.name} was skipped: {0.cause}"


@dataclass(eq=False, kw_only=True)
class UnhealthyStateError(SafeCheckpointError, ArithmeticError):
    """``health.action`` is "stop", and the checkpoint at ``path`` has bad numbers, in the tensors that ``what`` names."""

    path: str
    step: int
    what: str
    _text = "training went bad by step {0.step}: {0.what}. {0.path} is committed as unhealthy, so no resume takes it"


@dataclass(eq=False, kw_only=True)
class MirrorBehindError(SafeCheckpointError, RuntimeError):
    """``path`` is committed, and ``behind`` saves have no copy at ``url``: more than ``limit``, for the reason of ``cause``."""

    path: str
    url: str
    behind: int
    limit: int
    cause: str
    _text = (
        "{0.path} is committed, but {0.behind} saves have no copy in {0.url}, and {0.limit} may have none: {0.cause}"
    )


@dataclass(eq=False, kw_only=True)
class CommitOutcomeUnknown(SafeCheckpointError, RuntimeError):
    """The save of ``name`` may be committed or not; the next resume decides. No ``SaveError``: that says that nothing was.

    ``rank`` met this in ``phase``; ``cause`` says what happened, and ``code`` is its ``errno``, 0 where there is none.
    """

    name: str
    cause: str
    rank: int = 0
    phase: str = ""
    code: int = 0
    _text = "{0.name} may or may not be committed, the next resume will tell: {0.cause}"


@dataclass(eq=False, kw_only=True)
class CorruptCheckpointError(SafeCheckpointError, ValueError):
    """The bytes on disk are not the bytes that were written."""

    path: str
    message: str
    file: str = ""
    rank: int = 0

    def __str__(self) -> str:
        where = f" ({self.file})" if self.file else ""
        return f"{self.path}{where}: {self.message}"


class HostileCheckpointError(CorruptCheckpointError):
    """No tool writes such a file: reading on could exhaust memory or time, lead out of the directory, or run code."""


class IncompleteCheckpointError(CorruptCheckpointError):
    """A file of it is not there, ``file`` says which. A resume passes over it and leaves it where it is: it may come back."""


@dataclass(eq=False, kw_only=True)
class UnsupportedFormatError(SafeCheckpointError, ValueError):
    """Written by a newer version of safe_ckpt, or not a checkpoint that this can read."""

    path: str
    message: str
    _text = "{0.path}: {0.message}"


@dataclass(eq=False, kw_only=True)
class NoValidCheckpointError(SafeCheckpointError, FileNotFoundError):
    """Checkpoints were expected and none is usable; ``rejected`` says why, path by path."""

    path: str
    message: str
    rejected: Mapping[str, str] = field(default_factory=dict)
    rank: int = 0

    def __str__(self) -> str:
        return "".join([f"{self.path}: {self.message}", *(f"\n  {path}: {why}" for path, why in self.rejected.items())])


@dataclass(eq=False, kw_only=True)
class CheckpointNotFoundError(SafeCheckpointError, FileNotFoundError):
    """The checkpoint that was named, by its path or its step, is not there; ``message`` says which there are.

    It is no ``NoValidCheckpointError``, which may mean a fresh run.
    """

    path: str
    message: str
    rank: int = 0
    _text = "{0.path}: {0.message}"


@dataclass(eq=False, kw_only=True)
class UnsupportedVersionError(SafeCheckpointError, ImportError):
    """A package that an adapter needs is not installed (``found`` is ""), or older than ``lowest`` and so too old.

    ``because`` says why it is too old, ``remedy`` what to do.
    """

    package: str
    lowest: str
    remedy: str
    found: str = ""
    because: str = ""

    def __post_init__(self) -> None:
        self.name = self.package.replace("-", "_")

    def __str__(self) -> str:
        if not self.found:
            return f"{self.package} is not installed: {self.remedy}"
        because = f" ({self.because})" if self.because else ""
        return f"{self.package} {self.found} is too old, {self.lowest} is the oldest that is supported{because}: {self.remedy}"


@dataclass(eq=False, kw_only=True)
class UnexpectedError(SafeCheckpointError, RuntimeError):
    """Another rank met a foreign error; ``cause`` holds its class and message."""

    phase: str
    rank: int
    cause: str
    _text = "rank {0.rank} failed in {0.phase}: {0.cause}"


@dataclass(eq=False, kw_only=True)
class AuditError(SafeCheckpointError, RuntimeError):
    """A script that is audited could not be run, or its runs not be compared."""

    message: str


@dataclass(eq=False, kw_only=True)
class ResumeDiffersError(SafeCheckpointError, AssertionError):
    """An audited script goes on differently than one that nobody stopped; ``message`` says in what."""

    message: str


@dataclass(eq=False, kw_only=True)
class ForkedError(SafeCheckpointError, RuntimeError):
    """A call (``what``) in a process that was forked from process ``pid``, where threads, writer and connections stayed."""

    what: str
    pid: int
    _text = "{0.what}: process {0.pid} opened this, and this is a forked child of it: use it there, or spawn and open another"


@dataclass(eq=False, kw_only=True)
class ClosedError(SafeCheckpointError, RuntimeError):
    """A call on something that was closed."""

    message: str


def _whose(error: OSError, path: str) -> str:
    """The user who may do it, where this one may not."""
    if error.errno not in (_errno.EACCES, _errno.EPERM) or not os.path.isabs(path):
        return ""
    while not os.path.lexists(path) and path != os.path.dirname(path):
        path = os.path.dirname(path)
    with contextlib.suppress(OSError):
        owner, user = os.stat(path).st_uid, os.geteuid()
        if owner != user:
            advice = "use one user for all runs, chown -R it, or let both write to it by a group (setgid, umask 002)"
            return f": {path} belongs to user {owner} and this is user {user}; {advice}"
    return ""


def _listed(ranks: Sequence[int]) -> str:
    return f"[{', '.join(map(str, sorted(ranks)[:16]))}{f', and {len(ranks) - 16} more' if len(ranks) > 16 else ''}]"


class naming(contextlib.AbstractContextManager["naming"]):  # noqa: N801 - called as contextlib's own are
    """Raise a foreign exception as ``named`` has it. As a generator it would let a ``StopIteration`` go on as it is."""

    def __init__(self, *, rank: int, phase: str, path: object = "") -> None:
        self._rank, self._phase, self._path = rank, phase, path

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, SafeCheckpointError):
            raise named(error, rank=self._rank, phase=self._phase, path=self._path) from error


def named(error: BaseException, *, rank: int, phase: str, path: object = "") -> SafeCheckpointError:
    """An error of ours that says the same; ``path`` is where an ``OSError`` happened that does not say so itself."""
    where = str(path if isinstance(file := getattr(error, "filename", None), int | None) else file or path)
    if isinstance(error, SafeCheckpointError):
        return error
    if isinstance(error, OSError) and (where or error.errno):  # else nothing says that it is one of the file system
        return DirectoryError.of(error, path=where, rank=rank, phase=phase)
    if isinstance(error, UnicodeEncodeError) and error.encoding != "utf-8":
        why = f"{error.encoding}, this process's encoding, has no such name: set PYTHONUTF8=1 or LC_ALL=C.UTF-8"
        return DirectoryError(message=why, path=where or ascii(error.object), rank=rank, phase=phase)
    return UnexpectedError(phase=phase, rank=rank, cause=f"{type(error).__name__}: {error}")
