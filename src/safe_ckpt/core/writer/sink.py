"""Where the bytes of one checkpoint go, and one job of writing: in the writer process, on a thread, or in the parent."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from safe_ckpt.core.formats.file_plan import WriteTask
from safe_ckpt.core.staging.progress import read_mark
from safe_ckpt.core.storage.copier import FileCopy, copy_files
from safe_ckpt.core.storage.direct_io import (
    ProgressReporter,
    WriteOptions,
    fill_new_file,
    once_more_after_eio,
    write_all,
    write_rest,
)
from safe_ckpt.core.storage.durable import WrittenFile, sync_directory
from safe_ckpt.core.storage.objects.options import is_url
from safe_ckpt.core.writer.content import Content, MemoryContent
from safe_ckpt.core.writer.existing import UNCHANGED, Adoption
from safe_ckpt.core.writer.object_sink import ObjectSink

if TYPE_CHECKING:
    from safe_ckpt.core.staging.buffer import SharedBuffer


class Sink(Protocol):
    """Where the bytes of one checkpoint go. Every method raises ``OSError`` as the storage says, with the path."""

    def write(self, task: WriteTask, content: Content, progress: ProgressReporter) -> WrittenFile:
        """Write one file, whose bytes come in order. Its name is durable after ``sync``."""

    def copy(self, copies: Sequence[FileCopy], progress: ProgressReporter) -> list[WrittenFile]:
        """Files of this machine, as they are. Raises if one changed meanwhile."""

    def adopt(self, adoptions: Sequence[Adoption], progress: ProgressReporter) -> list[WrittenFile]:
        """Files that an earlier checkpoint has: copies by the storage, else their bytes; ``shared_bytes`` is 0 for those."""

    def sync(self, folders: Sequence[str], progress: ProgressReporter) -> None:
        """Make the names durable."""


class FileSink:
    """Writes to files, by large aligned writes, then fsync: see ``Sink``. The directories exist.

    Args:
        options: how to write.
    """

    def __init__(self, options: WriteOptions) -> None:
        self._options = options

    def write(self, task: WriteTask, content: Content, progress: ProgressReporter) -> WrittenFile:
        """See ``Sink``."""

        def fill(fd: int, direct: bool) -> int:
            at = unflushed = 0
            with contextlib.closing(content.pieces(self._options.chunk_bytes)) as pieces:
                for piece in pieces:
                    direct = write_all(fd, piece, at, progress, direct=direct)
                    at, unflushed = at + len(piece), unflushed + len(piece)
                    if not direct and unflushed >= self._options.flush_every_bytes:
                        os.fdatasync(fd)
                        unflushed = 0
            tail = content.closing().tail
            write_rest(fd, tail, at, progress, direct=direct)
            return at + len(tail)

        progress.entered("write")
        fill_new_file(task.path, self._options, progress, fill)
        return content.closing().written(task.path)

    def copy(self, copies: Sequence[FileCopy], progress: ProgressReporter) -> list[WrittenFile]:
        """See ``Sink``."""
        return copy_files(copies, self._options, progress)

    def adopt(self, adoptions: Sequence[Adoption], progress: ProgressReporter) -> list[WrittenFile]:
        """See ``Sink``. Those that could get a further name have it already: ``Existing.link``."""
        return self.copy([one.instead for one in adoptions if one.instead is not None], progress)

    def sync(self, folders: Sequence[str], progress: ProgressReporter) -> None:
        """See ``Sink``."""
        for folder in folders:
            progress.entered("fsync")
            sync_directory(folder)


def open_sink(folder: str, options: WriteOptions) -> Sink:
    """The sink of the checkpoint that is written below ``folder``. Nothing else in the writer asks which storage it is.

    Raises:
        OSError: no storage is set up for it.
    """
    if not is_url(folder):
        return FileSink(options)
    if options.storage is None:
        raise OSError(None, "is in an object store, and nothing says how to reach it", folder)
    return ObjectSink(options.storage)


@dataclass(frozen=True, kw_only=True)
class WriteJob:
    """A job for a writer.

    Attributes:
        name: of the checkpoint, for messages.
        rank: the same.
        folder: where all of it goes: a directory, or the address of one.
        buffer: holds the bytes of ``files``; None when there are only copies.
        files: to be written.
        copies: files of this machine to be copied.
        adoptions: files that an earlier checkpoint has.
        directories: made durable afterwards.
    """

    name: str
    rank: int
    folder: str
    buffer: SharedBuffer | None = None
    files: Sequence[WriteTask] = ()
    copies: Sequence[FileCopy] = ()
    adoptions: Sequence[Adoption] = ()
    directories: Sequence[str] = ()

    @property
    def paths(self) -> list[str]:
        """The paths that are there afterwards, in the order of the results."""
        copied = (*(copy.path for copy in self.copies), *(one.path for one in self.adoptions))
        return [*copied, *(task.path for task in self.files)]

    def to_json(self) -> dict[str, Any]:
        """Describe it as JSON-able data, without the buffer."""
        rows = {name: [one.to_json() for one in getattr(self, name)] for name in ("files", "copies", "adoptions")}
        return {**vars(self), "buffer": None, **rows, "directories": list(self.directories)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> WriteJob:
        """From what ``to_json`` returned."""
        return cls(
            **{
                **data,
                "files": [WriteTask.from_json(row) for row in data["files"]],
                "copies": [FileCopy.from_json(row) for row in data["copies"]],
                "adoptions": [Adoption.from_json(row) for row in data["adoptions"]],
            }
        )


def write_job(
    job: WriteJob,
    options: WriteOptions,
    progress: ProgressReporter,
    memory: memoryview | None = None,
    contents: Iterable[Content] | None = None,
) -> list[WrittenFile]:
    """Do what a job asks for.

    Args:
        job: what.
        options: how.
        progress: called at every step.
        memory: that of the job's buffer, which may still be being filled.
        contents: of the job's files; None: they lie in ``memory``.

    Returns:
        What is there now, in the order of ``job.paths``.

    Raises:
        OSError: as the storage says, with the path.
    """
    sink = open_sink(job.folder, options)
    written = sink.copy(job.copies, progress)
    progress.begin(len(job.copies))
    written += sink.adopt(job.adoptions, progress)
    if contents is None:
        buffer = memoryview(b"") if memory is None else memory
        ready = functools.partial(read_mark, buffer)
        contents = (MemoryContent(task, buffer, options.chunk_bytes, progress, ready) for task in job.files)
    for number, (task, content) in enumerate(zip(job.files, contents, strict=True), len(written)):
        progress.begin(number)
        written.append(write_file(sink, task, content, progress))
    sink.sync(job.directories, progress)
    return written


def write_file(sink: Sink, task: WriteTask, content: Content, progress: ProgressReporter) -> WrittenFile:
    """Write one file and make its bytes durable, unless it is one that is there already; close its content.

    Raises:
        OSError: as the storage says, with the path.
    """
    with contextlib.closing(content):
        same_as = task.observed.get(UNCHANGED, {}).get("same_as")
        if same_as and content.in_memory and (closing := content.closing()).xxh3_128 == same_as:
            written = closing.written(task.path)
            return replace(written, observed={**written.observed, UNCHANGED: {"left_out": True}})
        return once_more_after_eio(lambda: sink.write(task, content, progress))
