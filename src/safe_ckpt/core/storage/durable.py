"""Make files durable and give them their final name, in an order in which any crash leaves the old or the new one.

A new name is one rename. The same rename replaces an existing file. An existing directory cannot be replaced so: it is
exchanged in one step where the kernel can, else moved aside and replaced. ``file_home.FileHome`` repairs what a crash between
the two steps leaves behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import logging
import os
import shutil
import stat
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from safe_ckpt.core.storage.presence import opened
from safe_ckpt.errors import NotEnoughSpaceError

logger = logging.getLogger(__name__)
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
# The errors of a call that did nothing. An EIO, or a lost connection, may come from a server that has done it.
_NO_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EPERM, errno.EXDEV, errno.ENOTTY)
_NO_LINKS = (errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV)
# A folder that may not be opened is no job's, and behind a mount that is dead nothing of ours is.
_OUT_OF_REACH = (errno.EACCES, errno.EPERM, errno.ENOTCONN)
# PostgreSQL and SQLite go on then, too. 9p, vboxsf and some FUSE file systems answer so.
_NO_SYNC = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
_NO_LINK = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV, errno.EMLINK, errno.EINVAL)
_led_to: dict[str, tuple[int, int, int]] = {}
"""Folder -> what it was when this process made all entries durable that lead to it: device, number, time of change."""
_unsynced: set[int] = set()
"""The file systems, as ``st_dev``, that were found not to make the entries of a directory durable."""


@dataclass(frozen=True, kw_only=True)
class WrittenFile:
    """A file that is on disk now.

    Attributes:
        path: where.
        size_bytes: of the file.
        xxh3_128: of the whole file.
        shared_bytes: how many of its bytes were not written, because another file has them.
        observed: what is known of it besides, by the names of extensions.
    """

    path: str
    size_bytes: int
    xxh3_128: str
    shared_bytes: int = 0
    observed: Mapping[str, Any] = field(default_factory=dict)


NO_SYNC = (
    "its file system refuses fsync of a directory: after a power cut or a crash of the machine the newest checkpoints may be "
    "missing, and half of one may be there. Keep what must survive that on another file system"
)


def sync_directory(path: str) -> bool:
    """Make the entries of a directory durable. Returns whether its file system can: where it cannot, that is logged once."""
    with opened(path, os.O_RDONLY | os.O_DIRECTORY) as fd:
        try:
            os.fsync(fd)
        except OSError as error:
            if error.errno not in _NO_SYNC:
                raise
            if (device := os.fstat(fd).st_dev) not in _unsynced:
                logger.warning("%s: %s", path, NO_SYNC)
            _unsynced.add(device)
            return False
    return True


def sync_file(path: Path) -> int:
    """Make the bytes of a file durable. Returns how many they are."""
    with opened(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK) as fd:  # a pipe must not block
        refuse_special(path, os.fstat(fd))
        os.fsync(fd)
        return os.fstat(fd).st_size


def refuse_special(path: Path, status: os.stat_result) -> None:
    """Raise ``OSError`` for a pipe, a socket or a device in a folder that becomes a checkpoint."""
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "is no file (a pipe, a socket or a device): put it elsewhere", str(path))


def make_directory(path: Path) -> list[Path]:
    """Create a directory and its parents so that they survive a crash. Existing ones are fine.

    Whoever made those may have died before they were durable, so all entries that lead there are synced, once in a process as
    long as the folders stay what they are.

    Returns:
        Those that were created here, and not by somebody else at the same moment; the deepest first.
    """
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    made: list[Path] = []
    for folder in reversed(missing):
        try:
            folder.mkdir()
            made.insert(0, folder)
        except FileExistsError:
            if not folder.is_dir():
                raise
    path.mkdir(exist_ok=True)  # raises if it is no directory
    _sync_above(path)
    return made


def _sync_above(path: Path) -> None:
    device, synced = path.stat().st_dev, {}
    for folder in path.parents:
        try:
            found = folder.stat()
            if found.st_dev != device:
                break
            sync_directory(str(folder))
        except OSError as error:
            if error.errno not in _OUT_OF_REACH:
                raise
            break
        # One that was removed and made again, by whomever, has another time of change.
        state = found.st_dev, found.st_ino, found.st_ctime_ns
        if _led_to.get(str(folder)) == state:
            break
        synced[str(folder)] = state
    _led_to.update(synced)


def write_durably(path: Path, data: bytes) -> None:
    """Write a small file and fsync it; its directory entry is the caller's to fsync."""
    with opened(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as fd:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        os.fsync(fd)


class HalfCommittedError(OSError):
    """The new name was given, its durability is not confirmed, and it could not be taken back for good."""


def publish_file(staged: Path, final: Path) -> None:
    """Give a durable file its final name, replacing what has that name.

    Raises:
        OSError: it was not done; what had the name has it still.
        HalfCommittedError: it was done and then the disk refused to confirm it, or to undo it.
    """
    replaced = os.path.lexists(final)
    kept = _keep(staged, final) if replaced else None

    def undo() -> None:
        if kept is not None:
            os.replace(kept, final)
        elif replaced:
            raise OSError(errno.ENOTSUP, "what was replaced is gone: there are no hard links here", str(final))
        else:
            os.replace(final, staged)

    try:
        _settled(lambda: _replace(staged, final), staged, final)
        with _undone_by(undo):
            sync_directory(str(final.parent))
    finally:
        if kept is not None:
            _tidy(lambda: kept.unlink(missing_ok=True))


def publish(staged: Path, final: Path, aside: Callable[[], Path]) -> None:
    """Give a durable file or directory its final name, whichever has that name now; what lies beside it then is deleted.

    Args:
        staged: complete and durable.
        final: its name from now on.
        aside: tells where a directory goes that is replaced; must not exist, same file system.

    Raises:
        OSError: it was not done; what had the name has it still.
        HalfCommittedError: it was done and then the disk refused to confirm it, or to undo it.
    """
    if any(path.is_dir() and not path.is_symlink() for path in (staged, final)):
        replaced = aside()
        publish_directory(staged, final, replaced)
        if replaced.parent == final.parent:
            _tidy(lambda: remove_tree(replaced))
    else:
        publish_file(staged, final)


def publish_directory(staged: Path, final: Path, aside: Path) -> None:
    """Give a durable directory its final name, or a file that of a directory. What has the name ends up at ``aside``.

    Args:
        staged: complete and durable, the manifest in it.
        final: its name from now on.
        aside: where a replaced directory goes; must not exist, same file system.

    Raises:
        OSError: it was not done; what had the name has it still.
        HalfCommittedError: it was done, and then the disk confirmed neither that nor that it was undone.
    """
    if staged.is_dir():
        sync_directory(str(staged))
    if not os.path.lexists(final):
        _settled(lambda: os.rename(staged, final), staged, final)
        with _undone_by(lambda: os.rename(final, staged), final, staged):
            sync_directory(str(final.parent))
        return
    if _settled(lambda: exchange(staged, final), staged, final) is not False:
        with _undone_by(functools.partial(_exchange_back, staged, final), final, staged):
            sync_directory(str(final.parent))
        _tidy(lambda: os.rename(staged, aside))
        return
    _settled(lambda: os.rename(final, aside), final, aside)
    with _undone_by(lambda: os.rename(aside, final), final, aside):
        sync_directory(str(aside.parent))
        _settled(lambda: os.rename(staged, final), staged, final)

    def swap_back() -> None:
        os.rename(final, staged)
        os.rename(aside, final)

    with _undone_by(swap_back, final, staged):
        sync_directory(str(final.parent))


def _settled(rename: Callable[[], bool | None], staged: Path, final: Path) -> bool | None:
    """Call ``rename``, which gives ``staged`` the name ``final``. An error is none where it was done all the same.

    A server whose answer is lost has done it, and one that is asked twice says that there is no ``staged``.

    Raises:
        OSError: it was not done.
        HalfCommittedError: it may have been done.
    """
    moved = os.lstat(staged)
    try:
        return rename()
    except OSError as error:
        try:
            with contextlib.suppress(PermissionError):
                os.listdir(final.parent)  # makes a network file system look: it may remember what had that name before
            there = os.lstat(final)
        except FileNotFoundError:
            raise error from None
        except OSError:
            raise HalfCommittedError(error.errno, error.strerror, error.filename) from error
        if not moved.st_ino or (there.st_dev, there.st_ino) != (moved.st_dev, moved.st_ino):
            raise  # a file system that numbers no files shows nothing
        logger.warning("%s has its name, although the file system answered: %s", final, error)
        return True


def _exchange_back(one: Path, other: Path) -> None:
    if not exchange(one, other):  # it worked a moment ago. To treat this as undone would delete the old one
        raise OSError(errno.EIO, "the exchange could not be taken back", str(one))


def _tidy(action: Callable[[], object]) -> None:
    # The new one is committed, and must not fail because of what is left of the old one.
    try:
        action()
    except OSError as error:
        logger.warning("what was replaced could not be tidied away: %s", error)


@contextlib.contextmanager
def _undone_by(undo: Callable[[], object], *names: Path) -> Iterator[None]:
    # An error after a rename does not mean that nothing was done. If it did, the old one would be deleted. Nor is it undone
    # before that is durable: the new one is deleted now, and a power cut would bring its name back, without its files.
    try:
        yield
    except OSError as error:
        try:
            undo()
            for name in names:
                sync_directory(str(name.parent))
        except OSError:
            raise HalfCommittedError(error.errno, error.strerror, error.filename) from error
        raise


def _keep(staged: Path, final: Path) -> Path | None:
    """A second name for what ``final`` is now, to go back to; None where there are no hard links."""
    kept = staged.with_name(f".{final.name}.{uuid.uuid4().hex}.old")
    with contextlib.suppress(OSError):
        os.link(final, kept, follow_symlinks=False)
        return kept
    return None


def _replace(staged: Path, final: Path) -> None:
    try:
        os.replace(staged, final)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        # Another mount after all: a durable copy beside the final name, then the same single rename.
        near = final.with_name(f".{final.name}.{uuid.uuid4().hex}.tmp")
        try:
            shutil.copyfile(staged, near)
            sync_file(near)
            os.replace(near, final)
        finally:
            _tidy(lambda: near.unlink(missing_ok=True))


def exchange(one: Path, other: Path) -> bool:
    """Swap two names atomically. Returns False where the kernel or the file system cannot."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    result = renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE)
    if result == 0:
        return True
    code = ctypes.get_errno()
    if code in _NO_EXCHANGE:
        return False
    raise OSError(code, os.strerror(code), str(one), None, str(other))


@dataclass(frozen=True, kw_only=True)
class Link:
    """A further name of a single-file checkpoint: a hard link to its bytes, or a symbolic link to ``target``."""

    path: Path
    target: str | None = None


def publish_link(existing: Path, staged: Path, link: Link, aside: Callable[[], Path]) -> None:
    """Give a checkpoint a further name, in one step.

    Args:
        existing: the checkpoint.
        staged: a free name on the same file system.
        link: the further name.
        aside: tells where a directory goes that has the name now.
    """
    if link.path.parent != existing.parent:
        make_directory(link.path.parent)
    target = link.target
    if target is not None and _is_made(lambda: os.symlink(target, staged)):
        pass
    elif existing.is_dir():
        _link_tree(existing, staged)
    else:
        link_or_copy(existing, staged)
    sync_directory(str(staged.parent))  # a rename of what has no name on the disk yet may be lost with it
    publish(staged, link.path, aside)


def _is_made(link: Callable[[], None]) -> bool:
    """Make a link. Returns False where the file system has none: then the bytes get a second name, or a copy."""
    try:
        link()
    except OSError as error:
        if error.errno not in _NO_LINK:
            raise
        return False
    return True


def _link_tree(existing: Path, staged: Path) -> None:
    for folder, _, names in os.walk(existing):
        here = staged / Path(folder).relative_to(existing)
        here.mkdir()
        for name in names:
            link_or_copy(Path(folder, name), here / name)
        sync_directory(str(here))


def link_or_copy(existing: Path, staged: Path) -> None:
    """Make ``staged`` a second name of the file ``existing``, or a durable copy where the file system has no hard links."""
    if not _is_made(lambda: os.link(existing, staged)):
        shutil.copyfile(existing, staged)
        sync_file(staged)


def link_open_file(fd: int, path: str) -> Literal["linked", "not this one", "never"]:
    """Give the file that is open as ``fd`` a further name. Nobody may write to it from then on, under any of its names.

    Returns:
        Whether it has it. "never": its file system has no hard links. "not this one": this file gets none, because its last
        name is gone, it has too many, or it is another user's.

    Raises:
        OSError: the disk is full or cannot be written to.
    """
    with contextlib.suppress(OSError):  # who is not the owner cannot, and root is not kept from writing
        os.fchmod(fd, stat.S_IMODE(os.fstat(fd).st_mode) & ~0o222)
    try:
        # With a descriptor, which counts for nothing here, ``os.link`` follows the link to the file; else it does not.
        os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=fd, follow_symlinks=True)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            raise
        ours = os.fstat(fd).st_uid == os.geteuid()
        return "never" if error.errno in _NO_LINKS or (error.errno == errno.EPERM and ours) else "not this one"
    return "linked"


def remove_tree(path: Path) -> None:
    """Delete a file, link or directory tree; one that is gone already is fine."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    except FileNotFoundError:
        pass


_MOUNTS = Path("/proc/self/mountinfo")
_NOT_TOLD = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EOVERFLOW)


def is_in_memory(path: Path, table: Path = _MOUNTS) -> bool:
    """Whether the file system of ``path`` is memory of this host, such as ``/dev/shm``. ``table``: the kernel's, for tests.

    Raises:
        OSError: it cannot be looked at.
    """
    device = os.stat(path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        rows = [line.split() for line in table.read_text(errors="replace").splitlines()]
    except OSError:  # without /proc
        return False
    for row in rows:
        if len(row) > 2 and row[2] == number and "-" in row:
            return row[row.index("-") + 1] in ("tmpfs", "ramfs")
    return False


def free_bytes(path: Path) -> int | None:
    """Free bytes for this user; None where that is not known: some file systems answer with zeros, or not at all.

    Of one in memory at most what the host, and the control groups of this process, have left: who takes more is killed.

    Raises:
        OSError: any other reason.
    """
    try:
        usage = shutil.disk_usage(path)
    except OSError as error:
        if error.errno in _NOT_TOLD:
            return None
        raise
    if not usage.total:  # a full file system has a size; without a size nothing is known
        return None
    if not is_in_memory(path):
        return usage.free
    from safe_ckpt import machine as host_memory

    left = host_memory.available_bytes()
    return usage.free if left is None else min(usage.free, left)


def out_of_space(error: OSError, folder: Path, **facts: Any) -> NotEnoughSpaceError | None:
    """The error of a file system that filled up, which has ``folder``, with these further fields; None for another error."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return None
    free = 0
    with contextlib.suppress(OSError):
        free = free_bytes(folder) or 0
    return NotEnoughSpaceError(code=error.errno, free_bytes=free, **facts)


def require_space(path: Path, needed_bytes: int, why: str) -> None:
    """Refuse to begin what cannot be finished.

    Raises:
        NotEnoughSpaceError: the file system of ``path`` has less free; its message is ``why``.
    """
    free = free_bytes(path)
    if free is not None and needed_bytes > free:
        raise NotEnoughSpaceError(
            path=str(path), message=why, needed_bytes=needed_bytes, free_bytes=free, phase="prepare"
        )


def freed_bytes(paths: Iterable[Path]) -> int:
    """How much deleting all of these gives back: not what has another name besides. What is unknown counts 0; never raises."""
    names: dict[tuple[int, int], int] = {}
    total = 0
    for path in paths:
        with contextlib.suppress(OSError):
            files = path.rglob("*") if path.is_dir() and not path.is_symlink() else [path]
            for status in map(os.lstat, files):
                identity = status.st_dev, status.st_ino
                names[identity] = names.get(identity, 0) + 1
                if not stat.S_ISDIR(status.st_mode) and names[identity] == status.st_nlink:
                    total += status.st_size
    return total
