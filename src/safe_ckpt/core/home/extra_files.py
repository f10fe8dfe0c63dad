"""Files of a checkpoint directory that the writers did not write: those of hooks, and those that the user keeps there.

A hook gets a folder that exists on all ranks before anything is written. The folder then becomes the pending directory: its
files are hashed, made durable and listed in the manifest like all others. When a directory is replaced, the user's files in it
are kept in the new one. No manifest lists them.
"""

from __future__ import annotations

import logging
import os
import shutil
import stat
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

from safe_ckpt.core.formats.manifest import MANIFEST_NAME, FileEntry, read_manifest
from safe_ckpt.core.home.home import HIDDEN
from safe_ckpt.core.storage.durable import refuse_special, sync_directory, sync_file
from safe_ckpt.core.storage.presence import Stamp
from safe_ckpt.core.storage.reader import digest_of
from safe_ckpt.errors import SafeCheckpointError, SourceChangedError
from safe_ckpt.text import listed

logger = logging.getLogger(__name__)


def prefilled(own: Path) -> Path:
    """The folder for files that hooks write, in that of a save."""
    return own / "files"


def adopt(staged: Path, written: Collection[str], *, rank: int = 0) -> list[FileEntry]:
    """Hash the files in ``staged`` that are not in ``written``, and make them durable. On ``rank``, in the background.

    Raises:
        OSError: as the operating system says, also for what is neither a file nor a directory.
    """
    entries = []
    for name in _files_below(staged):
        file = staged / name
        if name in written or file.is_symlink():  # the target of a link is not ours
            continue
        size = sync_file(file)
        entries.append(FileEntry(path=name, size_bytes=size, xxh3_128=digest_of(file, size), rank=rank))
    _sync_folders(staged)
    return entries


def stamps_in(folder: Path) -> dict[str, Stamp]:
    """Return a stamp for the bytes of each file in a folder, by path. Links are left out: their targets are not ours.

    Raises:
        OSError: as the operating system says, also for what is neither a file nor a directory.
    """
    found: dict[str, Stamp] = {}
    for name in _files_below(folder):
        status = (folder / name).lstat()
        if not stat.S_ISLNK(status.st_mode):
            refuse_special(folder / name, status)
            found[name] = Stamp.of(status).everywhere
    return found


def folders_in(folder: Path) -> list[str]:
    """The folders below one, by path, the innermost first."""
    found = [Path(top).relative_to(folder).as_posix() for top, _, _ in os.walk(folder, topdown=False, onerror=_raise)]
    return [name for name in found if name != "."]


def refuse_changed(staged: Path, stamps: Mapping[str, Stamp], *, name: str) -> None:
    """Check that a folder holds the files that were hashed, and no others. On rank 0, right before the commit.

    Raises:
        SourceChangedError: one was written to, or is new, or is gone.
        OSError: as the operating system says.
    """
    now = stamps_in(staged)
    changed = sorted(file for file in {*now, *stamps} if now.get(file) != stamps.get(file))
    if changed:
        what = "was written" if changed[0] in now else "was removed"
        cause = f"{changed[0]}: it {what} after the block was left: nothing may change the folder until the commit"
        raise SourceChangedError(name=name, cause=cause, source=changed[0])
    _sync_folders(staged)


def keep_foreign(old: Path, staged: Path, wanted: Callable[[str], bool]) -> None:
    """Give files in ``old`` that no save of ours wrote a name in ``staged`` as well. On rank 0, in the background.

    Args:
        old: the directory that will be replaced, if there is one.
        staged: what will replace it.
        wanted: which of them, by their relative path.

    Raises:
        OSError: as the operating system says.
    """
    if not old.is_dir() or old.is_symlink():
        return
    try:
        ours = {entry.path for entry in read_manifest(old).files}
    except SafeCheckpointError:
        ours = set()  # unknown: every file is kept, except for those that are written anew
    made: list[str] = []
    copied: list[str] = []
    for name in _files_below(old, folders=True):
        target = staged / name
        if name in ours or name == MANIFEST_NAME or os.path.lexists(target) or not wanted(name):
            continue
        if (old / name).is_dir() and not (old / name).is_symlink():
            made += _make(staged, name)  # an empty one of the user's
            continue
        made += _make(staged, os.path.dirname(name))
        try:
            os.link(old / name, target, follow_symlinks=False)
        except OSError:  # no hard links here
            copied.append(name)
            shutil.copy2(old / name, target, follow_symlinks=False)
            if not target.is_symlink():
                sync_file(target)
    for name in sorted(made, reverse=True):  # now that all is in them: one may be read-only
        shutil.copymode(old / name, staged / name)
    _sync_folders(staged)
    if copied:
        message = "%s: no hard links here, so %s was copied: what others write to it during a save is lost"
        logger.warning(message, old, listed(copied))


def _make(staged: Path, name: str) -> list[str]:
    """Make a folder of the user's in ``staged``. Returns what was made, the deepest first."""
    made = [str(part) for part in (Path(name), *Path(name).parents) if not os.path.lexists(staged / part)]
    (staged / name).mkdir(parents=True, exist_ok=True)
    return made


def _files_below(folder: Path, *, folders: bool = False) -> Iterator[str]:
    """Yield what is no directory, links to directories too; and, if asked, the directories in which nothing lies."""
    for top, below, names in os.walk(folder, onerror=_raise):
        links = [name for name in below if os.path.islink(os.path.join(top, name))]
        below[:] = sorted(name for name in below if name != HIDDEN and name not in links)
        for name in sorted([*names, *links]):
            yield Path(top, name).relative_to(folder).as_posix()
        if folders and not below and not names and not links and top != str(folder):
            yield Path(top).relative_to(folder).as_posix()


def _raise(error: OSError) -> None:
    raise error


def _sync_folders(top: Path) -> None:
    for folder, _, _ in os.walk(top):
        sync_directory(folder)
