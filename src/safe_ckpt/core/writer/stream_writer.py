"""Writing a state that is larger than the host memory it may take: straight from the tensors, through a small buffer.

The caller waits meanwhile, so nothing changes under it, and no writer process is needed.
"""

from __future__ import annotations

import ctypes
import mmap
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import xxhash

from safe_ckpt.core.formats import zip_archive
from safe_ckpt.core.formats.file_plan import FilePlan, LazyTensor, WriteTask, closing_of
from safe_ckpt.core.formats.zip_archive import RecordDigest
from safe_ckpt.core.health.examine import Examination, marked
from safe_ckpt.core.health.regions import Pieces
from safe_ckpt.core.storage.direct_io import (
    PAGE,
    ProgressReporter,
    WriteOptions,
    fill_new_file,
    once_more_after_eio,
    write_all,
    write_rest,
)
from safe_ckpt.core.storage.durable import WrittenFile
from safe_ckpt.core.writer.closing import Closing
from safe_ckpt.core.writer.object_writer import is_object, send_stream

_PIECE = 1 << 20  # hashed at a time


def stream_file(
    image: FilePlan, task: WriteTask, buffer_bytes: int, options: WriteOptions, progress: ProgressReporter
) -> WrittenFile:
    """Write one file without a copy of it in memory, and make its bytes durable.

    Args:
        image: what to write; its tensors must not change meanwhile.
        task: where, and what goes into the manifest of an archive.
        buffer_bytes: how much memory to use, a multiple of 4096.
        options: how to write.
        progress: called at every step.

    Raises:
        OSError: as the operating system says, with the path.
    """
    return once_more_after_eio(lambda: _stream_file(image, task, buffer_bytes, options, progress))


def _stream_file(
    image: FilePlan, task: WriteTask, buffer_bytes: int, options: WriteOptions, progress: ProgressReporter
) -> WrittenFile:
    progress.entered("write")
    content = _Content(image, task)
    if is_object(task.path):
        sent = send_stream(task.path, image.length, content.pieces, options, progress)
        return content.written(sent)

    def fill(fd: int, direct: bool) -> int:
        return _pour(fd, content, buffer_bytes, progress, direct=direct)

    size = fill_new_file(task.path, options, progress, fill)
    return content.written(size)


def _pour(fd: int, content: _Content, buffer_bytes: int, progress: ProgressReporter, *, direct: bool) -> int:
    written = filled = 0
    with mmap.mmap(-1, buffer_bytes) as memory, memoryview(memory) as buffer:
        for piece in content.pieces():
            done = 0
            while done < len(piece):
                count = min(len(piece) - done, buffer_bytes - filled)
                buffer[filled : filled + count] = piece[done : done + count]
                done, filled = done + count, filled + count
                if filled == buffer_bytes:
                    direct = write_all(fd, buffer, written, progress, direct=direct)
                    written, filled = written + filled, 0
        body = filled // PAGE * PAGE
        with buffer[:body] as whole_pages:
            direct = write_all(fd, whole_pages, written, progress, direct=direct)
        write_rest(fd, bytes(buffer[body:filled]), written + body, progress, direct=direct)
    return written + filled


class _Content:
    """The bytes of a file in order, hashed as they are handed out."""

    def __init__(self, image: FilePlan, task: WriteTask) -> None:
        self._whole = xxhash.xxh3_128()
        self._closing: Closing | None = None
        self._task = task
        self._length = image.length
        self._examination = Examination(task, Pieces(image.length, image.pieces))
        self._health: Mapping[str, Any] | None = None
        parts: list[tuple[int, int, bytes | torch.Tensor | LazyTensor]] = [
            *((at, len(data), data) for at, data in image.pieces),
            *((at, tensor.numel() * tensor.element_size(), tensor) for at, tensor in image.tensors),
            *((at, lazy.size_bytes, lazy) for at, lazy in image.lazies),
        ]
        self._parts = deque(sorted(parts, key=lambda part: part[0]))

    def pieces(self) -> Iterator[memoryview]:
        at = 0
        for piece in self._body():
            self._whole.update(piece)
            self._examination.take(at, piece)
            at += len(piece)
            yield piece
        if self._task.records is not None:
            comment = zip_archive.COMMENT_PREFIX + self._whole.hexdigest().encode()
            self._whole.update(comment)
            yield memoryview(comment)
        health = self._health or self._examination.verdict()
        self._closing = Closing(xxh3_128=self._whole.hexdigest(), health=health)

    def written(self, size_bytes: int) -> WrittenFile:
        """What is there, once all pieces were taken.

        Raises:
            OSError: they were not.
        """
        if self._closing is None:
            raise OSError(None, "the writing ended before all bytes were written", self._task.path)
        return self._closing.written(self._task.path, size_bytes)

    def _body(self) -> Iterator[memoryview]:
        crcs: dict[str, int] = {}
        hashes: dict[str, str] = {}
        if self._task.records is None:
            yield from self._between(0, self._length)
            return
        for record in self._task.records:
            digest = RecordDigest()
            yield from self._between(record.header_offset, record.data_offset)
            end = record.data_offset + record.size
            for piece in self._between(record.data_offset, end):
                digest.update(piece)
                yield piece
            yield memoryview(zip_archive.descriptor(digest.crc, record.size))
            crcs[record.name], hashes[record.name] = digest.crc, digest.hexdigest()
        self._health = self._examination.verdict()
        yield memoryview(closing_of(self._task, self._length, crcs, hashes, marked(self._task, self._health)))

    def _between(self, start: int, end: int) -> Iterator[memoryview]:
        """The image's bytes from ``start`` to ``end``; zeros where nothing was placed."""
        at = start
        while self._parts and self._parts[0][0] < end:
            offset, size, source = self._parts.popleft()
            if offset > at:
                yield memoryview(bytes(offset - at))
            yield from _slices(source)
            at = offset + size
        if at < end:
            yield memoryview(bytes(end - at))


def _slices(source: bytes | torch.Tensor | LazyTensor) -> Iterator[memoryview]:
    if isinstance(source, bytes):
        yield memoryview(source)
        return
    if isinstance(source, LazyTensor):
        yield from _slices(_fetched(source))
        if source.release is not None:
            source.release()
        return
    # One that is not contiguous is brought into order as a whole: the buffer plus the largest of these is the memory taken.
    flat = source.detach().contiguous().view(-1).view(torch.uint8)
    for at in range(0, flat.numel(), _PIECE):
        piece = flat[at : at + _PIECE].cpu()
        yield memoryview((ctypes.c_ubyte * piece.numel()).from_address(piece.data_ptr())).cast("B")


def _fetched(lazy: LazyTensor) -> torch.Tensor:
    tensor = lazy.fetch()
    if tensor.is_meta or tuple(tensor.shape) != lazy.shape or tensor.dtype != lazy.dtype:
        fetched = f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"
        raise ValueError(f"a tensor was announced as {lazy.shape} {lazy.dtype} and is {fetched}")
    return tensor
