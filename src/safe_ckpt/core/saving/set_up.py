"""A directory that several ranks use: rank 0 acts, all others wait until they see the result.

Caches of network file systems lag behind, and a missing file may come back. So every look at a file waits for a bounded time.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from safe_ckpt.config import Timeouts
from safe_ckpt.core.coordination.coordinator import Coordinator, open_coordinator
from safe_ckpt.core.coordination.process_groups import ProcessGroup
from safe_ckpt.core.home.candidates import looks_like_checkpoint
from safe_ckpt.core.home.file_lock import not_held
from safe_ckpt.core.home.home import HIDDEN
from safe_ckpt.core.home.visibility import await_visible
from safe_ckpt.core.storage import durable, presence
from safe_ckpt.core.storage.durable import sync_directory
from safe_ckpt.core.storage.objects.options import refuse_url
from safe_ckpt.core.storage.objects.place import absolute
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

    Example:
        ```python
        directory = set_up_directory("runs/new", mode="fresh")
        print(directory.is_dir())
        ```

        ```text
        True
        ```
    """
    target = absolute(path)
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

        view = {"path": target, "mode": mode}
        token = coordinator.agree("set_up_directory", must_match=view, timeout_s=timeout_s, local=asked, decide=act)
        await_shared(coordinator, target, token, timeout_s)
    finally:
        coordinator.release(keep=True)
    return target


def leave_token(path: Path) -> str:
    """Rank 0: leave something below ``path`` that the others can look for. Returns its relative path."""
    (path / HIDDEN).mkdir(exist_ok=True)  # for a moment: it need not outlive a crash
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

    def judge(answers: Mapping[int, Any]) -> None:
        blind = tuple(rank for rank, sees in answers.items() if not sees)
        if token.startswith(HIDDEN):
            (path / token).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # not empty: a job's
                (path / HIDDEN).rmdir()
        if blind:
            raise DirectoryNotSharedError(path=str(path), ranks=blind)

    coordinator.agree("directory seen", must_match={"path": path}, timeout_s=timeout_s, local=sees, decide=judge)


def hosts_that_see(coordinator: Coordinator, hidden: Path, timeout_s: float) -> dict[int, list[int]]:
    """Every rank: which ranks see the same hidden folder of a directory, by the first of them. It is made where it is missing.

    Raises:
        DirectoryError: it cannot be made.
    """
    token = ""

    def leave() -> str:
        nonlocal token
        with naming(rank=coordinator.rank, phase="creating the checkpoint directory", path=hidden):
            durable.make_directory(hidden)
            token = leave_token(hidden)
        return token

    def grouped(answers: Mapping[int, Any]) -> dict[str, list[int]]:
        groups: dict[str, list[int]] = {}
        first: dict[str, int] = {}
        for rank in sorted(answers):
            groups.setdefault(str(first.setdefault(",".join(answers[rank]), rank)), []).append(rank)
        return groups

    def told(answers: Mapping[int, Any]) -> list[str]:
        return [answers[rank] for rank in sorted(answers)]

    view = {"path": hidden}
    left = coordinator.agree("hosts", must_match=view, timeout_s=timeout_s, local=leave, decide=told)

    def seen() -> list[str]:
        return [one for one in left if presence.is_seen(hidden / one)]

    hosts = coordinator.agree("hosts seen", must_match=view, timeout_s=timeout_s, local=seen, decide=grouped)
    with contextlib.suppress(OSError):
        (hidden / token).unlink()
    return {int(leader): ranks for leader, ranks in hosts.items()}


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
