"""A directory that several ranks use: rank 0 acts, all others wait until they see the result.

Caches of network file systems lag behind, and a missing file may come back. So every look at a file waits for a bounded time.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, get_args

from safe_ckpt.config import Timeouts
from safe_ckpt.core.coordination.coordinator import Coordinator, open_coordinator
from safe_ckpt.core.coordination.process_groups import ProcessGroup
from safe_ckpt.core.home.candidates import Candidate, looks_like_checkpoint
from safe_ckpt.core.home.file_home import HIDDEN
from safe_ckpt.core.home.file_lock import not_held
from safe_ckpt.core.storage import durable, presence
from safe_ckpt.core.storage.durable import sync_directory
from safe_ckpt.core.storage.objects.options import refuse_url
from safe_ckpt.errors import (
    ConfigError,
    DirectoryError,
    DirectoryNotSharedError,
    NoValidCheckpointError,
    naming,
)

logger = logging.getLogger(__name__)

Mode = Literal["resume", "fresh", "overwrite"]
_VISIBLE_S = 60.0
_LONGEST_S = 30.0
_FIRST_PAUSE_S = 0.001
_LONGEST_PAUSE_S = 0.5


def set_up_directory(
    path: str | os.PathLike[str],
    *,
    mode: Mode,
    group: ProcessGroup | None = None,
    timeout_s: float = 600.0,
) -> Path:
    """Prepare ``path`` for a run. Every rank calls this; when it returns, every rank sees the directory.

    Only rank 0 creates or deletes. Whatever goes wrong there is raised on every rank.

    Args:
        path: the directory, on a file system that all ranks share.
        mode: ``"resume"``: it must hold a checkpoint; nothing is changed. ``"fresh"``: it must be missing or empty.
            ``"overwrite"``: what is in it is deleted (moved away first, so that nobody meets a half-deleted directory).
        group: the ranks that take part; None means WORLD, or this process alone when there is no process group.
        timeout_s: how long to wait for the other ranks and for rank 0.

    Returns:
        The path, absolute.

    Raises:
        ConfigError: the mode is none of the three.
        DesyncError: the ranks ask for different paths or modes.
        DirectoryError: the operating system refused; names path and rank.
        DirectoryInUseError: a live job holds the directory.
        DirectoryNotSharedError: some ranks do not see what rank 0 created.
        NoValidCheckpointError: ``"resume"`` and there is no checkpoint.
        RendezvousTimeout: some ranks did not come; names them.
    """
    target = Path(os.path.abspath(path))  # a program may change its working directory
    timeouts = Timeouts(barrier_s=timeout_s, shutdown_s=min(timeout_s, 120.0))
    coordinator = open_coordinator(group, timeouts)
    try:
        acts = {"resume": _check_resumable, "fresh": _create_fresh, "overwrite": _overwrite}

        def asked() -> None:  # of one rank, all learn of it
            if mode not in get_args(Mode):
                raise ConfigError(key="mode", message=f'expected "resume", "fresh" or "overwrite", got {mode!r}')
            refuse_url(path, "path")

        def act(_: object) -> str:
            with naming(rank=0, phase="setting up the directory", path=target):
                return acts[mode](target, timeout_s)

        must_match = {"path": str(target), "mode": mode}
        token = coordinator.agree(
            "set_up_directory", must_match=must_match, timeout_s=timeout_s, local=asked, decide=act
        )
        await_shared(coordinator, target, token, timeout_s)
    finally:
        coordinator.release(keep=True)
    return target


def leave_token(path: Path) -> str:
    """Rank 0: leave something below ``path`` that the others can look for. Returns its relative path."""
    durable.make_directory(path / HIDDEN)
    token = f"{HIDDEN}/seen-{uuid.uuid4().hex}"
    (path / token).touch()
    return token


def await_shared(coordinator: Coordinator, path: Path, token: str, timeout_s: float) -> None:
    """Every rank: wait until this rank sees ``token`` below ``path``, agree that all do, and let rank 0 remove it.

    Raises:
        DirectoryNotSharedError: some do not, on every rank.
    """

    def sees() -> bool:
        # Less than the others wait for this rank: they must learn that it sees no file, not that it is late.
        return coordinator.rank == 0 or await_visible(path / token, min(timeout_s / 2, _VISIBLE_S))

    def judge(answers: object) -> None:
        blind = tuple(rank for rank, sees in dict(answers).items() if not sees)  # type: ignore[call-overload]
        if token.startswith(HIDDEN):
            (path / token).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # not empty: a job's
                (path / HIDDEN).rmdir()
        if blind:
            raise DirectoryNotSharedError(path=str(path), ranks=blind)

    coordinator.agree(
        "directory seen", must_match={"path": os.fspath(path)}, timeout_s=timeout_s, local=sees, decide=judge
    )


def _check_resumable(path: Path, _: float) -> str:
    if not presence.is_directory(path):
        # If it is only not visible at this moment, that is an error of the disk, raised here.
        reason = "does not exist" if presence.is_gone(path) else "is not a directory"
        raise NoValidCheckpointError(path=str(path), message=f"cannot resume: it {reason}")
    for child in sorted(path.iterdir()):
        if child.name != HIDDEN and looks_like_checkpoint(child):
            return child.name
    raise NoValidCheckpointError(path=str(path), message="cannot resume: it holds no complete checkpoint")


def _create_fresh(path: Path, _: float) -> str:
    if path.is_dir() and any(child.name != HIDDEN for child in path.iterdir()):
        message = 'is not empty: use mode="resume" to go on, or mode="overwrite" to delete what is in it'
        raise DirectoryError(path=str(path), message=message, code=errno.ENOTEMPTY)
    durable.make_directory(path)
    return leave_token(path)


def _overwrite(path: Path, patience_s: float) -> str:
    real = Path(os.path.realpath(path))
    _refuse_dangerous(real)
    if os.path.lexists(real) and not real.is_dir():
        raise DirectoryError(path=str(path), message="is a file, not a directory", code=errno.ENOTDIR)
    for left in real.parent.glob(f".{real.name}.safe_ckpt-trash-*"):
        shutil.rmtree(left)
    trash = None
    if real.is_dir():
        with not_held(real / HIDDEN, path, patience_s):
            trash = _move_away(real)
    durable.make_directory(real)
    if trash is not None:
        real.chmod(trash.stat().st_mode & 0o7777)
        shutil.rmtree(trash)
    return leave_token(real)


def _move_away(path: Path) -> Path | None:
    trash = path.parent / f".{path.name}.safe_ckpt-trash-{uuid.uuid4().hex}"
    try:
        path.rename(trash)
    except OSError as error:
        if error.errno not in (errno.EBUSY, errno.EXDEV, errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        # A mount point, or a parent that we may not write to: empty it in place.
        for child in path.iterdir():
            durable.remove_tree(child)
        return None
    sync_directory(str(path.parent))
    return trash


def _refuse_dangerous(path: Path) -> None:
    here = Path.cwd()
    if path in (Path("/"), Path.home(), here) or path in here.parents:
        message = "refusing to delete the root, home or working directory, or one above it"
        raise DirectoryError(path=str(path), message=message, code=errno.EPERM)


class Patience:
    """A bounded time, shared by everything that is waited for in one step.

    Args:
        timeouts: half of ``barrier_s``, for the other ranks wait for this one meanwhile; 30 s at most.
    """

    def __init__(self, timeouts: Timeouts) -> None:
        self._deadline = time.monotonic() + min(_LONGEST_S, timeouts.barrier_s / 2)

    @property
    def left_s(self) -> float:
        """What is left of it."""
        return max(0.0, self._deadline - time.monotonic())

    def until_there(self, file: Path) -> bool:
        """Wait until ``file`` is there. Returns False when time is up and its directory does not name it either.

        Raises:
            OSError: it is not known: the directory cannot be listed, or names what cannot be opened.
        """
        return await_visible(file, self.left_s) or not presence.is_gone(file)

    def until_sized(self, file: Path, size_bytes: int, look: Callable[[], None]) -> int:
        """Wait until ``file`` is there with this size. Returns the size that it has in the end, -1 when it is not there.

        Args:
            file: which one.
            size_bytes: what it should have.
            look: called while waiting; raises to give up.

        Raises:
            OSError: it is not known.
        """
        size = -1

        def is_sized() -> bool:
            nonlocal size
            size = _size_of(file)  # each look costs a request to the server of a network file system
            return size == size_bytes

        _await(is_sized, file, self.left_s, look)
        return size if size >= 0 or presence.is_gone(file) else _size_of(file)


def await_visible(path: Path, timeout_s: float) -> bool:
    """Wait until this rank sees ``path``. Returns False when it does not within ``timeout_s``."""
    return _await(lambda: _is_visible(path), path, timeout_s)


def _await(done: Callable[[], bool], path: Path, timeout_s: float, look: Callable[[], None] = lambda: None) -> bool:
    """Wait until ``done``, which looks at ``path``. Returns False when that takes longer than ``timeout_s``."""
    deadline, pause_s = time.monotonic() + timeout_s, _FIRST_PAUSE_S
    while not done():
        if time.monotonic() >= deadline:
            return False
        look()
        time.sleep(min(pause_s, max(0.0, deadline - time.monotonic())))
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        # Network file systems cache what a directory holds; listing the parent makes them look again.
        for folder in (path.parent.parent, path.parent):
            with contextlib.suppress(OSError):
                os.listdir(folder)
    return True


def _is_visible(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # the file system may be unavailable for a moment
        return False


def _size_of(file: Path) -> int:
    try:
        # Opened, for that is when a network file system asks the server what has become of the file.
        with presence.opened(file, os.O_RDONLY | os.O_NONBLOCK) as fd:
            return os.fstat(fd).st_size
    except (FileNotFoundError, NotADirectoryError):
        return -1


def listed(list_candidates: Callable[[], Sequence[Candidate]], timeouts: Timeouts) -> Sequence[Candidate]:
    """The candidates, listed again for a bounded time as long as something of ours seems to be missing. On rank 0.

    Raises:
        OSError: something cannot be looked at, or its directory names what cannot be opened.
    """
    patience = Patience(timeouts)
    while True:
        over = not patience.left_s
        candidates = list_candidates()
        missed = _missed(candidates)
        if not missed:
            return candidates
        if over or not patience.until_there(missed[0]):
            break
    for candidate in candidates:
        if candidate.foreign and candidate.missing in missed:
            message = "%s has no manifest, unlike those before it: if it is not another tool's, %s is missing"
            logger.warning(message, candidate.path, candidate.missing)
        elif candidate.missing in missed:
            presence.is_gone(candidate.missing)  # raises if that is unknown
    return candidates


def _missed(candidates: Sequence[Candidate]) -> list[Path]:
    """Files that may be missing: also the manifest of what looks like another tool's and has a higher number than ours."""
    ours = [c.step if c.step >= 0 else c.manifest.step for c in candidates if c.manifest is not None]
    return [
        c.missing
        for c in candidates
        if c.missing is not None and (not c.foreign or (ours and not c.problem and c.step > max(ours)))
    ]
