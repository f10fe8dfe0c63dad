"""From memory to a durable file: large aligned writes, hashed on the way, then fsync.

Used by the writer process, and by the parent when it has to write itself. Standard library, xxhash and isal only. The
hashing runs one step ahead of the writing, on a thread of its own, because both release the interpreter lock.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence

import xxhash

from safe_ckpt.core.formats import zip_archive
from safe_ckpt.core.formats.file_plan import WriteTask, closing_of
from safe_ckpt.core.formats.zip_archive import Record, RecordDigest
from safe_ckpt.core.health.examine import Examination, marked
from safe_ckpt.core.staging.progress import read_mark
from safe_ckpt.core.storage.copier import FileCopy, copy_files
from safe_ckpt.core.storage.direct_io import (
    PAGE,
    ProgressReporter,
    WriteOptions,
    fill_new_file,
    once_more_after_eio,
    write_all,
    write_rest,
)
from safe_ckpt.core.storage.durable import WrittenFile, sync_directory
from safe_ckpt.core.storage.objects.object_copy import ObjectCopy
from safe_ckpt.core.storage.reflink import SharedPieces
from safe_ckpt.core.writer.closing import Closing
from safe_ckpt.core.writer.object_writer import copy_objects, is_object, send_copy, send_image

logger = logging.getLogger(__name__)
_NEXT_LOOK_S = 0.0005
_HASH_BYTES = 1 << 20  # so that it stays in the cache from one hash to the next


Ready = Callable[[], int]
"""How far the shared buffer is filled: everything before this offset is in place."""


def write_files(
    copies: Sequence[FileCopy],
    files: Sequence[WriteTask],
    directories: Sequence[str],
    buffer: memoryview,
    options: WriteOptions,
    progress: ProgressReporter,
    objects: Sequence[ObjectCopy] = (),
) -> list[WrittenFile]:
    """Do what one job asks for: copy files and objects, write files from the buffer, make the directories durable.

    Returns:
        What is there now: copies of files, of objects, and what was written.

    Raises:
        OSError: as the operating system says, with the path.
    """
    written = copy_files([copy for copy in copies if not is_object(copy.path)], options, progress)
    for number, copy in enumerate(copies):
        if is_object(copy.path):
            progress.begin(number)
            written.append(send_copy(copy, options, progress))
    progress.begin(len(copies))
    written += copy_objects(objects, options, progress)
    ready = functools.partial(read_mark, buffer)
    for number, task in enumerate(files, len(written)):
        progress.begin(number)
        written.append(write_file(task, buffer, options, progress, ready))
    for directory in directories:
        progress.entered("fsync")
        sync_directory(directory)
    return written


def write_file(
    task: WriteTask, buffer: memoryview, options: WriteOptions, progress: ProgressReporter, ready: Ready | None = None
) -> WrittenFile:
    """Write one file and make its bytes durable; the directory entry is the caller's to fsync.

    Args:
        task: what and where.
        buffer: the memory that holds its bytes, or will.
        options: how.
        progress: called at every step; while there is nothing to write yet, of none.
        ready: tells how far the shared buffer is filled; None when all of it is.

    Raises:
        OSError: as the operating system says, with the path.
    """
    return once_more_after_eio(lambda: _write_file(task, buffer, options, progress, ready))


def _write_file(
    task: WriteTask, buffer: memoryview, options: WriteOptions, progress: ProgressReporter, ready: Ready | None
) -> WrittenFile:
    progress.entered("write")
    image = buffer[task.offset : task.offset + task.length]
    pieces = SharedPieces(task, options.chunk_bytes)  # before the thread of the hasher begins: both must be ended
    try:
        return _write_pieces(task, image, pieces, options, progress, ready)
    finally:
        pieces.close()


def _write_pieces(
    task: WriteTask,
    image: memoryview,
    pieces: SharedPieces,
    options: WriteOptions,
    progress: ProgressReporter,
    ready: Ready | None,
) -> WrittenFile:
    hasher = Hasher(task, image, options.chunk_bytes, progress, ready)
    try:
        if task.same_as and (closing := hasher.closing()).xxh3_128 == task.same_as:
            return closing.written(task.path, len(image), left_out=True)
        if is_object(task.path):
            return send_image(task.path, image, hasher, options, progress)
        return _write_file_of(task, image, hasher, pieces, options, progress)
    finally:
        hasher.stop()


def _write_file_of(
    task: WriteTask,
    image: memoryview,
    hasher: Hasher,
    pieces: SharedPieces,
    options: WriteOptions,
    progress: ProgressReporter,
) -> WrittenFile:
    def fill(fd: int, direct: bool) -> int:
        return _write_image(fd, image, hasher, options, progress, pieces, direct=direct)

    size = fill_new_file(task.path, options, progress, fill)
    pieces.remember()
    return hasher.closing().written(task.path, size, shared_bytes=pieces.shared_bytes)


def _write_image(
    fd: int,
    image: memoryview,
    hasher: Hasher,
    options: WriteOptions,
    progress: ProgressReporter,
    pieces: SharedPieces,
    *,
    direct: bool,
) -> int:
    body = len(image) // PAGE * PAGE
    unflushed = 0
    for start in range(0, body, options.chunk_bytes):
        end = min(start + options.chunk_bytes, body)
        hasher.wait_for(end)
        for begin, stop, same in pieces.runs(image[start:end], start):
            if same and pieces.share(fd, start + begin, stop - begin):
                progress.moved(stop - begin)
                continue
            direct = write_all(fd, image[start + begin : start + stop], start + begin, progress, direct=direct)
            unflushed += stop - begin
        if not direct and unflushed >= options.flush_every_bytes:
            os.fdatasync(fd)
            unflushed = 0
    tail = hasher.closing().tail  # the last bytes of the image are as they stay only then
    rest = bytes(image[body:]) + tail
    write_rest(fd, rest, body, progress, direct=direct)
    return body + len(rest)


def _started(run: Callable[[], None]) -> threading.Thread | None:
    """A thread that hashes while this one writes; None where none can begin any more."""
    thread = threading.Thread(target=run, name="safe_ckpt-hash", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the last save, written in this process while Python 3.12 shuts down: hashed first, then
        return None
    return thread


class Hasher:
    """Hashes an image in file order, fills in the data descriptors, and makes the bytes that follow the image."""

    def __init__(
        self, task: WriteTask, image: memoryview, chunk_bytes: int, progress: ProgressReporter, ready: Ready | None
    ) -> None:
        self._filled = ready
        self._task = task
        self._image = image
        self._chunk = chunk_bytes
        self._progress = progress
        self._whole = xxhash.xxh3_128()
        self._hashed = 0
        self._ready = 0
        self._closing: Closing | None = None
        self._failure: BaseException | None = None
        self._stopped = False
        self._turn = threading.Condition()
        self._thread: threading.Thread | None = None
        if len(image) > 2 * chunk_bytes:
            self._thread = _started(self._run)
        if self._thread is None:
            self._run()

    def wait_for(self, end: int) -> None:
        """Wait until everything before ``end`` has been hashed and will not change."""
        with self._turn:
            self._turn.wait_for(lambda: self._ready >= end or self._failure is not None)
        if self._failure is not None:
            raise self._failure

    def closing(self) -> Closing:
        """Wait until the whole image has been hashed, and return what is known then."""
        with self._turn:
            self._turn.wait_for(lambda: self._closing is not None or self._failure is not None)
        if self._closing is None:
            raise self._failure or RuntimeError("the hasher ended without a result")
        return self._closing

    def stop(self) -> None:
        """Stop early; used when the writing failed."""
        self._stopped = True
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            self._progress.moved(0)
            self._examination = Examination(self._task, self._image)
            self._progress.moved(0)
            closing = self._hash()
            with self._turn:
                self._closing = closing
                self._ready = len(self._image)
                self._turn.notify_all()
        except BaseException as error:  # it belongs to the thread that writes
            with self._turn:
                self._failure = error
                self._turn.notify_all()

    def _hash(self) -> Closing:
        records = self._task.records
        if records is None:
            self._absorb(0, len(self._image), [self._whole.update])
            return Closing(xxh3_128=self._whole.hexdigest(), health=self._examination.verdict())
        crcs, hashes = self._hash_records(records)
        health = self._examination.verdict()
        tail = closing_of(self._task, len(self._image), crcs, hashes, marked(self._task, health))
        self._whole.update(tail)
        comment = zip_archive.COMMENT_PREFIX + self._whole.hexdigest().encode()
        self._whole.update(comment)
        return Closing(xxh3_128=self._whole.hexdigest(), health=health, tail=tail + comment)

    def _hash_records(self, records: Sequence[Record]) -> tuple[dict[str, int], dict[str, str]]:
        crcs: dict[str, int] = {}
        hashes: dict[str, str] = {}
        for record in records:
            digest = RecordDigest()
            self._absorb(record.header_offset, record.data_offset, [self._whole.update])
            end = record.data_offset + record.size
            self._absorb(record.data_offset, end, [self._whole.update, digest.update])
            self._image[end : record.end] = zip_archive.descriptor(digest.crc, record.size)
            self._absorb(end, record.end, [self._whole.update])
            crcs[record.name], hashes[record.name] = digest.crc, digest.hexdigest()
        return crcs, hashes

    def _absorb(self, start: int, end: int, receivers: Sequence[Callable[[memoryview], None]]) -> None:
        for at in range(start, end, _HASH_BYTES):
            if self._stopped:
                raise OSError(errno.ECANCELED, "stopped")
            self._await_bytes(min(at + _HASH_BYTES, end))
            piece = self._image[at : min(at + _HASH_BYTES, end)]
            for receive in receivers:
                receive(piece)
            self._examination.take(at, piece)
            self._hashed = at + len(piece)
            if self._hashed - self._ready >= self._chunk:  # thousands of small records must not cost a wake-up each
                self._progress.moved(self._hashed - self._ready)
                with self._turn:
                    self._ready = self._hashed
                    self._turn.notify_all()

    def _await_bytes(self, end: int) -> None:
        seen = -1
        while self._filled is not None and (now := self._filled()) < self._task.offset + end:
            if self._stopped:
                raise OSError(errno.ECANCELED, "stopped")
            if now != seen:  # a copy that goes on is progress, one that hangs is not
                seen = now
                self._progress.moved(0)
            self._progress.waiting()
            time.sleep(_NEXT_LOOK_S)
