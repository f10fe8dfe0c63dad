"""To files: large aligned writes of what has been hashed, then fsync. Standard library and xxhash only.

Used by the writer process, and by the parent when it has to write itself.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence

from safe_ckpt.core.formats.file_plan import WriteTask
from safe_ckpt.core.storage.copier import FileCopy, copy_files
from safe_ckpt.core.storage.direct_io import ProgressReporter, WriteOptions, fill_new_file, write_all, write_rest
from safe_ckpt.core.storage.durable import WrittenFile, sync_directory
from safe_ckpt.core.storage.reflink import SharedPieces
from safe_ckpt.core.writer.content import Content
from safe_ckpt.core.writer.existing import UNCHANGED, Adoption


class FileSink:
    """See ``Sink``. The directories exist. A file shares blocks of the disk with the file before it, where that can be.

    Args:
        options: how to write.
    """

    def __init__(self, options: WriteOptions) -> None:
        self._options = options

    def write(self, task: WriteTask, content: Content, progress: ProgressReporter) -> WrittenFile:
        """See ``Sink``."""
        earlier = task.observed.get(UNCHANGED, {}).get("earlier")
        if earlier is None:
            self._write(task, content, progress, write_all)
            return content.closing().written(task.path)
        with contextlib.closing(SharedPieces(task.path, content.length, earlier, self._options)) as pieces:
            self._write(task, content, progress, pieces.put)
            pieces.remember()
        return content.closing().written(task.path, shared_bytes=pieces.shared_bytes)

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

    def _write(self, task: WriteTask, content: Content, progress: ProgressReporter, put: Callable[..., bool]) -> None:
        """``put`` brings a piece to its place in an open file, as ``write_all`` does."""

        def fill(fd: int, direct: bool) -> int:
            at = unflushed = 0
            with contextlib.closing(content.pieces(self._options.chunk_bytes)) as pieces:
                for piece in pieces:
                    direct = put(fd, piece, at, progress, direct=direct)
                    at, unflushed = at + len(piece), unflushed + len(piece)
                    if not direct and unflushed >= self._options.flush_every_bytes:
                        os.fdatasync(fd)
                        unflushed = 0
            tail = content.closing().tail
            write_rest(fd, tail, at, progress, direct=direct)
            return at + len(tail)

        progress.entered("write")
        fill_new_file(task.path, self._options, progress, fill)
