"""Checks the bytes of a checkpoint against those that were written: ours by its digests, any other by what its format has."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from safe_ckpt.core.formats.manifest import (
    DCP_METADATA,
    MANIFEST_NAME,
    FileEntry,
    Manifest,
    archive_digest,
    read_manifest,
)
from safe_ckpt.core.formats.pickles import is_read
from safe_ckpt.core.formats.verify import UNEQUAL, identity_of, verify_archive, verify_entry
from safe_ckpt.core.home.objects.head import manifest_in
from safe_ckpt.core.home.places import is_one
from safe_ckpt.core.storage.objects.place import ObjectPath, Place
from safe_ckpt.core.storage.objects.second_look import look_thrice
from safe_ckpt.core.storage.reader import ReadProgress, Span, wrong_spans
from safe_ckpt.errors import (
    CorruptCheckpointError,
    HostileCheckpointError,
    IncompleteCheckpointError,
    UnsupportedFormatError,
)
from safe_ckpt.tools.inspection import dcp_reader, torch_reader
from safe_ckpt.tools.inspection.files import CheckpointFile, Window, path_inside, read_json, walk
from safe_ckpt.tools.inspection.listing import kind_of
from safe_ckpt.tools.inspection.safetensors_reader import SUFFIX, read_safetensors
from safe_ckpt.tools.inspection.torch_reader import Archive
from safe_ckpt.tools.inspection.zip_reader import read_members

State = Literal["valid", "damaged", "cannot tell", "unreadable"]
_WORST: tuple[State, ...] = ("damaged", "unreadable", "cannot tell")
NO_CHECKSUMS = "carries no checksums"
_LARGE_BYTES = 8 << 20
_large = threading.BoundedSemaphore(2)  # each takes memory for some parts of an object while it is read


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """The judgement on one file.

    Attributes:
        file: relative to the checkpoint.
        state: ``"valid"``: a checksum covers every byte, and all agree. ``"damaged"``. ``"cannot tell"``: no damage was found,
            but part of the data carries no checksums and could not be verified. ``"unreadable"``: it was not read.
        reason: what is wrong, or why that is not known.
        names: tensors, or records, that are damaged, where that is known.
        size_bytes: its size.
        covered_bytes: how many of them a checksum covers.
    """

    file: str
    state: State
    reason: str = ""
    names: tuple[str, ...] = ()
    size_bytes: int = 0
    covered_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The judgement on a checkpoint.

    Attributes:
        path: where it is.
        kind: what wrote it.
        files: one judgement per file.
        remarks: what is not damage but worth knowing.
    """

    path: Place
    kind: str
    files: tuple[Judgement, ...]
    remarks: tuple[str, ...] = ()

    @property
    def state(self) -> State:
        """The worst of all files."""
        states = {judgement.state for judgement in self.files}
        return next((worst for worst in _WORST if worst in states), "valid" if states else "cannot tell")

    @property
    def damaged(self) -> tuple[Judgement, ...]:
        """The judgements of the damaged files."""
        return tuple(judgement for judgement in self.files if judgement.state == "damaged")

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(judgement.size_bytes for judgement in self.files)

    @property
    def covered_bytes(self) -> int:
        """The number of bytes that a checksum covers."""
        return sum(judgement.covered_bytes for judgement in self.files)


def valid(file: str, size: int) -> Judgement:
    """A checksum covers every byte, and all agree."""
    return Judgement(file=file, state="valid", size_bytes=size, covered_bytes=size)


def damaged(file: str, reason: str, *, size: int = 0, names: tuple[str, ...] = ()) -> Judgement:
    """The file is damaged."""
    return Judgement(file=file, state="damaged", reason=reason, names=names, size_bytes=size)


def unverifiable(file: str, reason: str, *, size: int, covered: int = 0) -> Judgement:
    """No damage was found, but part of the data carries no checksums and could not be verified."""
    return Judgement(file=file, state="cannot tell", reason=reason, size_bytes=size, covered_bytes=covered)


def of_error(error: CorruptCheckpointError | UnsupportedFormatError, file: str = "") -> Judgement:
    """An error as a judgement, of the file that it names or of the one given."""
    return damaged(file or getattr(error, "file", "") or Path(error.path).name, error.message)


Job = Callable[[ReadProgress | None], Judgement]


@dataclass(frozen=True, kw_only=True)
class Task:
    """A checkpoint that is to be judged.

    Attributes:
        path: where it is.
        kind: what wrote it.
        size_bytes: how much there is to read.
        jobs: one per file; each reads it and judges.
        remarks: what is not damage but worth knowing.
    """

    path: Place
    kind: str
    size_bytes: int
    jobs: Sequence[Job]
    remarks: tuple[str, ...] = ()

    def judged(self, files: Sequence[Judgement]) -> Verdict:
        """The verdict that these judgements are."""
        return Verdict(path=self.path, kind=self.kind, files=tuple(files), remarks=self.remarks)


@functools.singledispatch
def plan_tasks(place: Place, *, follow_symlinks: bool = False) -> Task:  # noqa: ARG001 - each storage has its own below
    """Read names, sizes and manifests, and no payload. A problem that they show becomes a job that reports it.

    Args:
        place: a checkpoint.
        follow_symlinks: in a file system whether links to files will do.

    Raises:
        OSError: it could not be read, or is not there; it is not treated as corrupt.
    """
    raise TypeError(place)


@plan_tasks.register
def _(path: ObjectPath, *, follow_symlinks: bool = False) -> Task:
    del follow_symlinks
    try:
        manifest, data = read_committed(path)
    except (CorruptCheckpointError, UnsupportedFormatError) as error:
        return unreadable(path, of_error(error, MANIFEST_NAME))
    top = f"{path.key}/" if path.key else ""
    present = {entry.key.removeprefix(top) for entry in path.bucket.entries(path.key)}
    return _of_manifest(path, manifest, len(data), present, [partial(_object, path, entry) for entry in manifest.files])


@plan_tasks.register
def _(path: Path, *, follow_symlinks: bool = False) -> Task:
    try:
        return _ours(path, follow_symlinks=follow_symlinks) or _others(path, follow_symlinks=follow_symlinks)
    except (CorruptCheckpointError, UnsupportedFormatError) as error:
        of_manifest = isinstance(error, UnsupportedFormatError) and (path / MANIFEST_NAME).is_file()
        return unreadable(path, of_error(error, MANIFEST_NAME if of_manifest else ""))


def verify_tasks(tasks: Iterable[Task], *, progress: ReadProgress | None = None) -> list[Verdict]:
    """Read everything, several files at a time. One verdict per task.

    Raises:
        OSError: something could not be read; it is not treated as corrupt.
    """
    tasks, stop = list(tasks), threading.Event()

    def report(count: int) -> None:
        if stop.is_set():
            raise InterruptedError(errno.EINTR, "interrupted")
        if progress is not None:
            progress(count)

    with ThreadPoolExecutor(max(2, min(8, os.cpu_count() or 2)), thread_name_prefix="safe_ckpt-verify") as pool:
        try:
            shared: dict[object, Future[Judgement]] = {}

            def submit(job: Job) -> Future[Judgement]:
                if (key := getattr(job, "key", None)) is None:
                    return pool.submit(job, report)
                if key not in shared:  # bytes that several checkpoints share are read once
                    shared[key] = pool.submit(job, report)
                return shared[key]

            pending = [(task, [submit(job) for job in task.jobs]) for task in tasks]
            return [task.judged([future.result() for future in futures]) for task, futures in pending]
        except BaseException:
            stop.set()  # Ctrl-C: every thread ends after the piece that it reads
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def bytes_to_read(tasks: Iterable[Task]) -> int:
    """The number of bytes that ``verify_tasks`` reads of these."""
    tasks, total, seen = list(tasks), 0, set()
    for task in tasks:
        total += task.size_bytes
        for job in task.jobs:
            if (key := getattr(job, "key", None)) is not None:
                total -= key[2] if key in seen else 0
                seen.add(key)
    return total


def known(judgement: Judgement) -> Job:
    """A job that has nothing to read any more."""
    return lambda _: judgement


def unreadable(path: Place, judgement: Judgement) -> Task:
    """A task of which nothing is read any more."""
    return Task(path=path, kind="unreadable", size_bytes=0, jobs=[known(judgement)])


def _ours(path: Path, *, follow_symlinks: bool) -> Task | None:
    if not path.is_dir():
        if not path.stat().st_size or archive_digest(path) is None:
            return None
        with contextlib.suppress(UnsupportedFormatError):  # a file out of a directory has its manifest there
            read_manifest(path)
        size = path.stat().st_size
        return Task(path=path, kind="safe_ckpt file", size_bytes=size, jobs=[partial(_archive, path)])
    if not (path / MANIFEST_NAME).exists():
        return None
    manifest = read_manifest(path)
    present = {file.name for file in walk(path, follow_symlinks=follow_symlinks)}
    own_bytes = (path / MANIFEST_NAME).stat().st_size
    metadata = functools.cache(_metadata)  # for the files of one folder
    return _of_manifest(path, manifest, own_bytes, present, [_Entry(path, entry, metadata) for entry in manifest.files])


def _of_manifest(path: Place, manifest: Manifest, own_bytes: int, present: set[str], jobs: Sequence[Job]) -> Task:
    """A directory of ours: the jobs of its files, and a remark on those that its manifest does not name."""
    extra = sorted(present - {entry.path for entry in manifest.files} - {MANIFEST_NAME})
    return Task(
        path=path,
        kind="safe_ckpt directory",
        size_bytes=sum(entry.size_bytes for entry in manifest.files),
        jobs=[known(valid(MANIFEST_NAME, own_bytes)), *jobs],
        remarks=(f"not part of it, and not read: {', '.join(extra[:10])}",) if extra else (),
    )


class _Entry:
    """The job of one file of a directory.

    Args:
        folder: the directory.
        entry: the file, as the manifest has it.
        metadata: gives what ``.metadata`` in a folder says.

    Attributes:
        key: equal where the same bytes are compared with the same hash.
    """

    def __init__(self, folder: Path, entry: FileEntry, metadata: Callable[[Path], Metadata]) -> None:
        self._folder, self._entry, self._metadata = folder, entry, metadata
        identity = identity_of(folder / entry.path)
        self.key = None if identity is None else (identity, entry.path, entry.size_bytes, entry.xxh3_128)

    def __call__(self, progress: ReadProgress | None) -> Judgement:
        folder, entry = self._folder, self._entry
        compare = partial(verify_entry, folder, entry, cached=None, links=True, progress=progress)
        judgement = _compared(folder, entry, compare, folder.exists)
        if judgement is None:
            return _located(folder, entry.path, entry.size_bytes)
        return _looked_through(judgement, path_inside(folder, entry.path), self._metadata)


def _compared(
    folder: Place, entry: FileEntry, compare: Callable[[], object], is_there: Callable[[], bool]
) -> Judgement | None:
    """The judgement on one file of ours; None where its bytes differ, so that it remains to be said which."""
    try:
        compare()
    except IncompleteCheckpointError:
        if not is_there():
            raise FileNotFoundError(errno.ENOENT, "was deleted meanwhile", str(folder)) from None
        return damaged(entry.path, "is missing", size=entry.size_bytes)
    except CorruptCheckpointError as error:
        unequal = error.message == UNEQUAL
        return None if unequal else replace(of_error(error, entry.path), size_bytes=entry.size_bytes)
    return valid(entry.path, entry.size_bytes)


def _archive(path: Path, progress: ReadProgress | None) -> Judgement:
    try:
        judgement = valid(path.name, verify_archive(path, cached=None, progress=progress))
    except CorruptCheckpointError:
        return _located(path.parent, path.name, path.stat().st_size)
    return _looked_through(judgement, path, _metadata)


def _looked_through(judgement: Judgement, place: Path, metadata: Callable[[Path], Metadata]) -> Judgement:
    """The judgement on a file with the bytes that were written: whether a resume would refuse it, for it would run code."""
    if judgement.state != "valid":
        return judgement
    name, size = judgement.file, judgement.size_bytes
    try:
        if place.name == DCP_METADATA and isinstance(found := metadata(place.parent), HostileCheckpointError):
            raise found
        with Window(place) as window:
            if place.suffix == ".distcp":
                _look_at_objects(place, metadata, window)
            elif is_read(place.name):
                torch_reader.root_of(window)
    except HostileCheckpointError as error:
        return damaged(name, error.message, size=size)
    except (CorruptCheckpointError, UnsupportedFormatError):
        return judgement  # no pickle, or one too long for a command: a resume looks through any
    return judgement


def _look_at_objects(place: Path, metadata: Callable[[Path], Metadata], window: Window) -> None:
    for folder in place.parents[:2]:  # of an item alone, or of all
        if isinstance(found := metadata(folder), dcp_reader.Directory):
            for item in found.items.get(place.relative_to(folder).as_posix(), ()):
                if item.name not in found.tensors and torch_reader.looks_like_archive(
                    part := window.part(item.offset, item.size)
                ):
                    torch_reader.read_structure(part)
            return


def _located(folder: Path, name: str, size: int) -> Judgement:
    """A file whose digest is wrong, with the names of the damaged tensors where its format has checksums."""
    place = path_inside(folder, name)
    metadata = _metadata(place.parent) or _metadata(folder) if place.suffix == ".distcp" else None
    judgement = check_file(CheckpointFile(path=place, name=name, size_bytes=size), metadata, None)
    reason = UNEQUAL
    if judgement.state == "damaged" and judgement.reason != UNEQUAL:
        reason = f"{UNEQUAL} ({judgement.reason})"
    elif place.suffix == SUFFIX:
        reason = unlocated(name)
    elif judgement.state == "cannot tell" and judgement.covered_bytes:
        reason = f"{UNEQUAL}; in which of its tensors is not known: {judgement.reason}"
    return damaged(name, reason, size=size, names=judgement.names)


def unlocated(name: str) -> str:
    """The message about a file whose digest is wrong, where nothing tells which part of it is."""
    is_safetensors = name.endswith(SUFFIX)
    return f"{UNEQUAL}; in which of its tensors is not known: safetensors {NO_CHECKSUMS}" if is_safetensors else UNEQUAL


def _metadata(folder: Path) -> Metadata:
    try:
        return dcp_reader.read_directory(folder)
    except FileNotFoundError:
        return None
    except (CorruptCheckpointError, UnsupportedFormatError) as error:
        return error


def _others(path: Path, *, follow_symlinks: bool) -> Task:
    files = walk(path, follow_symlinks=follow_symlinks)
    if not files:
        raise UnsupportedFormatError(path=str(path), message="is empty: there is no checkpoint in it")
    folders = {f.path.parent: _metadata(f.path.parent) for f in files if f.path.name == DCP_METADATA}
    above = {file: next((of for at in file.path.parents if (of := folders.get(at))), None) for file in files}
    jobs: list[Job] = [partial(check_file, file, above[file]) for file in files]
    jobs += map(known, _missing(path, files, folders))
    size = sum(file.size_bytes for file in files)
    return Task(path=path, kind=kind_of(files), size_bytes=size, jobs=jobs)


def _missing(path: Path, files: Sequence[CheckpointFile], known: dict[Path, Metadata]) -> Iterator[Judgement]:
    """The files that an index or ``.metadata`` names and that are missing."""
    for folder, metadata in known.items():
        for name in sorted(metadata.items) if isinstance(metadata, dcp_reader.Directory) else ():
            if not (folder / name).is_file():
                yield damaged(name, "is missing: .metadata says that tensors are in it")
    for file in files:
        if file.name.endswith(".safetensors.index.json") and path.is_dir():
            try:
                names = {str(name) for name in read_json(file).get("weight_map", {}).values()}
                absent = [name for name in sorted(names) if not path_inside(file.path.parent, name).is_file()]
            except (ValueError, AttributeError) as error:
                absent = []
                yield damaged(file.name, getattr(error, "message", f"is no index of shards: {error}"))
            for name in absent:
                yield damaged(name, f"is missing: {file.name} says that tensors are in it")


Metadata = dcp_reader.Directory | CorruptCheckpointError | UnsupportedFormatError | None
"""The content of ``.metadata`` beside a file; the error if it is damaged or too long; None where there is none."""


def check_file(file: CheckpointFile, metadata: Metadata, progress: ReadProgress | None) -> Judgement:
    """Read a file and judge it.

    Raises:
        OSError: it could not be read; it is not treated as corrupt.
    """
    name, size, suffix = file.name, file.size_bytes, file.path.suffix
    if not size:
        tensors = suffix in (*torch_reader.SUFFIXES, SUFFIX)
        return damaged(name, "is empty") if tensors else unverifiable(name, "is empty", size=0)
    try:
        if suffix == ".distcp":
            return _check_distcp(file, metadata, progress)
        kind = _structure_alone(file, metadata)
        return unverifiable(name, f"{kind} {NO_CHECKSUMS}", size=size) if kind else _check_torch(file, progress)
    except CorruptCheckpointError as error:
        return of_error(error, name)
    except UnsupportedFormatError as error:  # larger than what is read
        return unverifiable(name, error.message, size=size)


def _structure_alone(file: CheckpointFile, metadata: Metadata) -> str:
    """Check a file of a format without checksums; returns what it is, and "" for a file of another format."""
    if file.path.name == DCP_METADATA:
        if isinstance(metadata, Exception):
            raise metadata
        return "its structure is in order, and it"
    if file.path.suffix == SUFFIX:
        read_safetensors(file.path)
        return "its header fits the file, and safetensors"
    if file.path.suffix == ".json":
        read_json(file)
        return "is JSON, which"
    return ""


def _check_torch(file: CheckpointFile, progress: ReadProgress | None) -> Judgement:
    too_long = ""
    with Window(file.path) as window:
        if not torch_reader.looks_like_archive(window):
            return _check_old(file, window)
        try:
            archive = torch_reader.read_structure(window)
        except UnsupportedFormatError as error:  # its pickle is too long; its checksums can be compared
            archive, too_long = Archive(source=window, members=read_members(window), root=None), error.message
        bad = wrong_spans(file.path, window.size, archive.spans(), progress)
        if not too_long:
            torch_reader.content_of(archive)
        names = tuple(torch_reader.tensor_names_in(archive, bad)) if bad else ()
    if bad:
        return damaged(file.name, UNEQUAL, size=file.size_bytes, names=names)
    return _as_far_as_covered(file, file.size_bytes - archive.unverifiable_bytes, too_long)


def _as_far_as_covered(file: CheckpointFile, covered: int, unread: str = "") -> Judgement:
    size = file.size_bytes
    if covered == size and not unread:
        return valid(file.name, size)
    reason = unread or f"{size - covered} of its bytes carry no checksums"
    return unverifiable(file.name, reason, size=size, covered=covered)


def _check_old(file: CheckpointFile, window: Window) -> Judgement:
    if file.path.suffix not in torch_reader.SUFFIXES:
        return unverifiable(file.name, f"is of no known format, and {NO_CHECKSUMS}", size=file.size_bytes)
    if torch_reader.read_old_file(window) is None:
        return damaged(file.name, "is neither an archive nor a pickle", size=file.size_bytes)
    return unverifiable(file.name, f"is a plain pickle, which {NO_CHECKSUMS}", size=file.size_bytes)


def _check_distcp(file: CheckpointFile, metadata: Metadata, progress: ReadProgress | None) -> Judgement:
    size = file.size_bytes
    if not isinstance(metadata, dcp_reader.Directory):
        reason = "its .metadata is missing, damaged or too long, so that nothing says what is in it"
        return unverifiable(file.name, reason, size=size)
    spans: list[Span] = []
    names: dict[int, str] = {}
    covered = 0
    with Window(file.path) as window:
        place = file.path.relative_to(metadata.folder).as_posix()
        for item, archive in dcp_reader.archives_in(metadata, place, window):
            if archive is not None:
                spans += archive.spans()
                names |= {span.start: item.name for span in archive.spans()}
                covered += item.size - archive.unverifiable_bytes
        bad = wrong_spans(file.path, window.size, spans, progress)
    if bad:
        return damaged(file.name, UNEQUAL, size=size, names=tuple(sorted({names[span.start] for span in bad})))
    return _as_far_as_covered(file, covered)


def read_committed(path: ObjectPath) -> tuple[Manifest, bytes]:
    """The manifest of a checkpoint, and its bytes.

    Raises:
        CorruptCheckpointError: damaged.
        UnsupportedFormatError: not ours, of a newer version, or in place of one that was never committed.
        OSError: it could not be read, or is not there.
    """
    found = manifest_in(path)
    if found is None:
        raise UnsupportedFormatError(path=str(path), message="was never committed: a later job has said so")
    return found


def _object(folder: ObjectPath, entry: FileEntry, progress: ReadProgress | None) -> Judgement:
    def compare() -> int:
        return look_thrice(folder, lambda at: verify_entry(at, entry, progress=progress if at is folder else None))

    with _large if entry.size_bytes > _LARGE_BYTES else contextlib.nullcontext():
        judgement = _compared(folder, entry, compare, partial(is_one, folder))
    return judgement or damaged(entry.path, unlocated(entry.path), size=entry.size_bytes)
