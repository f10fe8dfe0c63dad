"""Which checkpoints there are, the order of their commits, and what this job knows of them. ``standing_of`` chooses."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from safe_ckpt.core.formats.manifest import MANIFEST_NAME, Manifest, read_manifest
from safe_ckpt.core.home.home import HIDDEN, Candidate, OnError
from safe_ckpt.core.storage import presence
from safe_ckpt.core.storage.objects.place import Place
from safe_ckpt.core.storage.presence import Stamp
from safe_ckpt.core.storage.reader import drop_cache
from safe_ckpt.errors import CorruptCheckpointError, IncompleteCheckpointError, UnsupportedFormatError

logger = logging.getLogger(__name__)
WEIGHTS = "weights"
"""The kind of a directory that holds a model's weights alone: nothing to resume from, and nothing that retention deletes."""
StepOf = Callable[[str], "int | None"]
_ATTEMPTS = 10
_STOCK_FILES = (".ckpt", ".pt", ".pth", ".bin", ".safetensors", ".distcp")


def list_directories(
    directory: Path,
    step_of: StepOf | None = None,
    problem_of_stock: Callable[[Path], str] | None = None,
    on_error: OnError | None = None,
) -> list[Candidate]:
    """The directory checkpoints below ``directory``, unordered. A folder with neither such a name nor our manifest is none.

    Args:
        directory: where to look.
        step_of: the number in a name that a checkpoint would have; None for the names that ``step_name`` gives.
        problem_of_stock: why a directory of such a name, without a manifest, cannot be used; "" if another tool may have
            written it. None when only ours count.
        on_error: called with a checkpoint that cannot be looked at, which is then left out; None to raise instead.

    Raises:
        OSError: the directory could not be listed.
        UnsupportedFormatError: one is of a newer format version.
    """
    number_of = step_of or _step_of
    candidates = []
    with os.scandir(directory) as entries:  # knows which entries are folders without a stat of each
        names = sorted(entry.name for entry in entries if entry.name != HIDDEN and entry.is_dir(follow_symlinks=False))
    for path in (directory / name for name in names):
        with guarded(path, on_error):
            candidate = _directory(path, number_of(path.name), problem_of_stock)
            if candidate is not None:
                candidates.append(candidate)
    return candidates


def _directory(path: Path, number: int | None, problem_of_stock: Callable[[Path], str] | None) -> Candidate | None:
    try:
        described = presence.is_there(path / MANIFEST_NAME)
    except PermissionError as error:
        if number is not None:
            raise
        _not_ours(path, error)  # its name is none of ours either
        return None
    if number is None and not described:
        return None
    if not described and problem_of_stock is not None:
        missing = path / MANIFEST_NAME
        return Candidate(path=path, foreign=True, step=number or 0, problem=problem_of_stock(path), missing=missing)
    candidate = look_at(path)
    if number is not None:
        candidate = replace(candidate, step=number)
    if candidate.foreign:
        candidate = replace(candidate, problem="its manifest was not written by safe_ckpt")
    counts = candidate.manifest is not None or number is not None
    return candidate if counts and not _is_weights(candidate) else None


def holds_weights_alone(notes: Mapping[str, Any]) -> bool:
    """Whether a manifest with these notes is of a model's weights alone, in a directory or in a file of Lightning's."""
    return notes.get("adapter") == WEIGHTS or bool(notes.get("weights_only"))


def _is_weights(candidate: Candidate) -> bool:
    return candidate.manifest is not None and candidate.manifest.notes.get("adapter") == WEIGHTS


@contextlib.contextmanager
def guarded(path: Path, on_error: OnError | None) -> Iterator[None]:
    """Give errors with ``path`` in the block to ``on_error``; None raises them."""
    try:
        yield
    except (OSError, UnsupportedFormatError) as error:
        if on_error is None:
            raise
        on_error(path, error)


def list_files(
    directory: Path,
    suffix: str,
    is_directory: Callable[[Path], bool] = lambda _: False,
    on_error: OnError | None = None,
) -> list[Candidate]:
    """The single-file checkpoints in ``directory``, in no order; those of other tools are marked foreign.

    A folder below it that a job holds, or held, for itself has an order of its own and is left out.

    Args:
        directory: where to look.
        suffix: how their names end.
        is_directory: which directories of such a name are checkpoints although they have no manifest of ours.
        on_error: called with a file or folder that cannot be looked at, which is then left out; None to raise instead.

    Raises:
        OSError: the directory could not be listed, nor a folder below it; one that denies it, or has gone, is passed over.
        UnsupportedFormatError: one is of a newer format version.
    """
    files, whole = [], []
    for folder, below, names in _walk(directory, on_error):
        # A checkpoint that is a directory is one thing: nothing below it is looked at.
        ours = []
        for path in (Path(folder, name) for name in below if name.endswith(suffix)):
            with guarded(path, on_error):
                if presence.is_there(path / MANIFEST_NAME) or is_directory(path):
                    ours.append(path)
        whole += ours
        besides = {HIDDEN, *(path.name for path in ours)}
        others = [name for name in below if name not in besides]
        below[:] = sorted(name for name in others if not presence.is_seen(Path(folder, name, HIDDEN)))
        files += [Path(folder, name) for name in sorted(names) if name.endswith(suffix)]
    candidates = []
    for path in files:
        with guarded(path, on_error):
            # A pipe or a socket is none.
            if not path.is_symlink() and (not presence.is_there(path) or presence.is_file(path)):
                candidates.append(look_at(path))
    for path in whole:
        with guarded(path, on_error):
            manifest = path / MANIFEST_NAME
            if not path.is_symlink():
                is_ours = presence.is_there(manifest)
                candidates.append(look_at(path) if is_ours else Candidate(path=path, foreign=True, missing=manifest))
    return [candidate for candidate in candidates if not _is_weights(candidate)]


def by_commit(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Ours by commit sequence, newest first, then those of other tools by step."""

    def age(candidate: Candidate) -> tuple[int, int | str, bool]:
        manifest = candidate.manifest
        if manifest is None:
            return (-1, candidate.step, False)
        # Only a file that was saved outside of an engine can have the number of another one. Of several names of one file
        # the name that it was saved under comes first.
        return (manifest.sequence, manifest.created_at, candidate.path.name == manifest.name)

    return sorted((c for c in candidates if not c.problem), key=age, reverse=True)


def looks_like_checkpoint(path: Path) -> bool:
    """Whether a stock tool or ours may have written a checkpoint here: decided by names, sizes and archive ends only.

    Raises:
        OSError: something in it could not be looked at.
    """
    # No recursion, and each folder once: folders may be nested deeply, or linked in a circle.
    folders, seen = [path] if presence.is_directory(path) else [], set()
    while folders:
        folder = folders.pop()
        status = folder.stat()
        if folder.name == HIDDEN or (status.st_dev, status.st_ino) in seen:
            continue
        seen.add((status.st_dev, status.st_ino))
        if presence.is_there(folder / MANIFEST_NAME):
            if not look_at(folder).problem:
                return True
            continue
        with os.scandir(folder) as entries:
            for entry in entries:
                is_link = entry.is_symlink()  # and may be one in a circle
                if presence.is_directory(Path(entry.path)) if is_link else entry.is_dir():
                    folders.append(folder / entry.name)
                elif _is_stock_file(folder / entry.name):
                    return True
    return _is_stock_file(path)


def _is_stock_file(path: Path) -> bool:
    if path.suffix not in _STOCK_FILES or not presence.is_file(path) or path.stat().st_size == 0:
        return False
    if path.suffix in (".ckpt", ".pt", ".pth", ".bin"):
        with path.open("rb") as stream:
            if stream.read(4) == b"PK\3\4":
                return presence.ends_as_archive(path)
    return True


def newest_sequence(candidates: Iterable[Candidate]) -> int:
    """The highest number in the order of commits; 0 when there is none."""
    return max((c.manifest.sequence for c in candidates if c.manifest is not None), default=0)


def _walk(directory: Path, on_error: OnError | None) -> Iterator[tuple[str, list[str], list[str]]]:
    """Walk as ``os.walk`` does, which recurses before Python 3.12. Folders that cannot be listed raise."""
    folders = [os.fspath(directory)]
    while folders:
        folder = folders.pop()
        below: list[str] = []
        names: list[str] = []
        with (
            guarded(Path(folder), None if folder == os.fspath(directory) else on_error or _not_ours),
            _opened(folder) as entries,
        ):
            for entry in entries:
                # The target of a link is no checkpoint of this directory, so it is not looked at.
                (names if entry.is_symlink() or not entry.is_dir() else below).append(entry.name)
        yield folder, below, names
        folders += [os.path.join(folder, name) for name in below]


def _opened(folder: str) -> AbstractContextManager[Iterator[os.DirEntry[str]]]:
    for _ in range(_ATTEMPTS):
        try:
            return os.scandir(folder)
        except FileNotFoundError:
            if presence.is_gone(Path(folder)):
                raise
    return os.scandir(folder)  # each time it had been replaced by another one of the same name


def _not_ours(folder: Path, error: Exception) -> None:
    """Skip a folder that may not be listed: whoever saved into it could list it. Errors of the disk are raised."""
    if isinstance(error, PermissionError):
        logger.warning("%s is passed over, with all that may be in it: %s", folder, error)
    elif not isinstance(error, FileNotFoundError):
        raise error


def _step_of(name: str) -> int | None:
    digits = name.removeprefix("step-")
    fits = digits != name and digits.isascii() and digits.isdecimal() and len(name) >= len(step_name(0))
    return int(digits) if fits else None


def look_at(path: Path) -> Candidate:
    """Look at a candidate: its manifest says if it is ours or another tool's.

    Raises:
        OSError: it cannot be looked at.
        UnsupportedFormatError: it is of a newer format version.
    """
    try:
        stamp = stamp_of(path)
        return Candidate(path=path, manifest=_manifest_of(path), stamp=stamp)
    except IncompleteCheckpointError as error:
        missing = path / error.file if error.file else path
        return Candidate(path=path, problem=f"{missing.name} is missing", missing=missing)
    except CorruptCheckpointError as error:
        problem = error.message if not error.file else f"{error.file} {error.message}"
        return Candidate(path=path, problem=problem, damaged=True)
    except UnsupportedFormatError as error:
        if "newer" in error.message:
            raise
        return Candidate(path=path, foreign=True)


def _manifest_of(path: Path) -> Manifest:
    try:
        return read_manifest(path)
    except IncompleteCheckpointError:
        raise
    except (CorruptCheckpointError, UnsupportedFormatError) as error:
        # If a second read shows no mismatch, the memory or the network was at fault; the bytes may be those of the format.
        drop_cache(path / MANIFEST_NAME if presence.is_directory(path) else path)
        if isinstance(error, CorruptCheckpointError):
            with contextlib.suppress(UnsupportedFormatError):  # that it is of another format, two reads must say
                return read_manifest(path)
        return read_manifest(path)


def stamp_of(path: Place) -> Stamp | None:
    """Return what is equal as long as the same checkpoint stands at ``path``; None where that cannot be told.

    Of a directory that of its manifest, which is replaced with it; of any other file or folder its own. In an object store
    there is none, and a name is there once.
    """
    for place in (path / MANIFEST_NAME, path) if isinstance(path, Path) else ():
        with contextlib.suppress(OSError):
            status = place.lstat()
            # Further names, and those taken away, change the time of the inode.
            return replace(Stamp.of(status), ctime_ns=0)
    return None


def is_still(path: Place, stamp: Stamp | None) -> bool:
    """Whether it is what ``stamp`` was of, and no other one of its name."""
    return not isinstance(path, Path) or (stamp is not None and stamp_of(path) == stamp)


def step_name(step: int) -> str:
    """The directory name of a step: sorts like the steps do."""
    return f"step-{step:08d}"


def is_of_step(candidate: Candidate, step: int) -> bool:
    """Whether it is the checkpoint of a step, by its name."""
    name = candidate.manifest.name if candidate.manifest is not None else candidate.path.name
    return name == step_name(step)
