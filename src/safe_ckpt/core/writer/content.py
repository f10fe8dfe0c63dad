"""The bytes of one file in order, hashed and looked at on their way: from memory that is still being filled, or from tensors.

That a file is whole is said by one value, which has the digest, so that no part of it can be taken for all. Standard library,
xxhash and isal only: the writer process uses it.
"""

from __future__ import annotations

import ctypes
import errno
import importlib
import logging
import mmap
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import xxhash

from safe_ckpt.core.formats import zip_archive
from safe_ckpt.core.formats.file_plan import FilePlan, KnownBytes, LazyTensor, WriteTask, closing_of, values_of
from safe_ckpt.core.formats.zip_archive import RecordDigest
from safe_ckpt.core.storage.direct_io import PAGE, ProgressReporter
from safe_ckpt.core.storage.durable import WrittenFile

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)
_NEXT_LOOK_S = 0.0005
_HASH_BYTES = 1 << 20  # so that it stays in the cache from one hash to the next


Ready = Callable[[], int]
"""How far the shared buffer is filled: everything before this offset is in place."""


@dataclass(frozen=True, kw_only=True)
class Closing:
    """The facts of a file when the last of its bytes has been hashed. They are announced as one value, so never in part.

    Attributes:
        xxh3_128: of the whole file, with the tail.
        size_bytes: of the whole file.
        observed: what the observers found, by their names.
        tail: the bytes that follow the pieces: less than a page of the plan, and what follows that.
    """

    xxh3_128: str
    size_bytes: int
    observed: Mapping[str, Any]
    tail: bytes

    def written(self, path: str) -> WrittenFile:
        """Return the record of the file at ``path``, which is there now."""
        return WrittenFile(path=path, size_bytes=self.size_bytes, xxh3_128=self.xxh3_128, observed=self.observed)


class Content(Protocol):
    """The bytes of one file.

    Attributes:
        length: how many there are before those that follow the plan.
        in_memory: whether all of them lie in memory: pieces stay valid, and the closing can be had before them.
    """

    length: int
    in_memory: bool

    def pieces(self, size: int) -> Generator[memoryview, None, None]:
        """Whole pages in file order, each time from the first on. A piece is page-aligned in memory, and valid until the next.

        Args:
            size: how long they are at most; whole pages.

        Raises:
            OSError: they cannot be had a second time.
        """

    def closing(self) -> Closing:
        """Wait until all has been hashed, and return what is known then.

        Raises:
            OSError: it was not: not all pieces were taken.
        """

    def close(self) -> None:
        """Stop, also before the end."""


class Observer(Protocol):
    """Looks at a file while it is hashed. May import neither torch nor YAML. If it raises, what it would find is not known."""

    def __init__(self, task: WriteTask, known: memoryview | KnownBytes, told: Mapping[str, Any]) -> None:
        """``known``: the file, in which what is no tensor can be read already. ``told``: of ``WriteTask.observed``."""

    def take(self, at: int, piece: memoryview) -> None:
        """Bytes of the file, which come in order from ``at`` on."""

    def found(self) -> Any:
        """Return its findings, as JSON-able data; None for nothing. When all bytes were taken."""

    def section(self) -> Mapping[str, Any]:
        """Return its section of the manifest inside the file; empty for none. When all bytes were taken."""


class _Observers:
    """The observers of one file, by the names of their extensions."""

    def __init__(self, task: WriteTask, known: memoryview | KnownBytes) -> None:
        self._path = task.path
        self._all: dict[str, Observer] = {}
        for name, told in task.observed.items():
            if "observer" in told:
                module, _, kind = told["observer"].partition(":")
                try:
                    self._all[name] = getattr(importlib.import_module(module), kind)(task, known, told)
                except Exception as error:
                    self._drop(name, error)

    def take(self, at: int, piece: memoryview) -> None:
        for name, one in self._all.items():
            try:
                one.take(at, piece)
            except Exception as error:
                self._drop(name, error)

    def sections(self) -> dict[str, Any]:
        return {name: dict(section) for name, section in self._asked(lambda one: one.section()).items() if section}

    def found(self) -> dict[str, Any]:
        return {name: found for name, found in self._asked(lambda one: one.found()).items() if found is not None}

    def _asked(self, question: Callable[[Observer], Any]) -> dict[str, Any]:
        answers = {}
        for name, one in self._all.items():
            try:
                answers[name] = question(one)
            except Exception as error:
                self._drop(name, error)
        return answers

    def _drop(self, name: str, error: Exception) -> None:
        self._all = {other: one for other, one in self._all.items() if other != name}
        logger.warning("%s: what %s would find in it is not known: %r", self._path, name, error)


class _Pass:
    """One pass over a file: hashes it, fills in the data descriptors, and makes the bytes that follow the plan."""

    def __init__(
        self, task: WriteTask, length: int, source: MemoryContent | TensorContent, observers: _Observers
    ) -> None:
        self._task = task
        self._length = length
        self._source = source
        self._observers = observers
        self._whole = xxhash.xxh3_128()
        self._crcs: dict[str, int] = {}
        self._hashes: dict[str, str] = {}

    def pieces(self) -> Iterator[memoryview]:
        """The bytes of the plan."""
        if self._task.records is None:
            yield from self._absorb(0, self._length)
            return
        for record in self._task.records:
            digest, end = RecordDigest(), record.data_offset + record.size
            yield from self._absorb(record.header_offset, record.data_offset)
            yield from self._absorb(record.data_offset, end, digest)
            piece = self._source.put(end, zip_archive.descriptor(digest.crc, record.size))
            self._whole.update(piece)
            yield piece
            self._crcs[record.name], self._hashes[record.name] = digest.crc, digest.hexdigest()

    def closing(self, rest: bytes) -> Closing:
        """Close the file after the last piece; ``rest``: the last bytes, which are no whole page."""
        if self._task.records is not None:
            sections = self._observers.sections()
            tail = closing_of(self._task, self._length, self._crcs, self._hashes, sections)
            self._whole.update(tail)
            comment = zip_archive.COMMENT_PREFIX + self._whole.hexdigest().encode()
            self._whole.update(comment)
            rest += tail + comment
        size = self._length // PAGE * PAGE + len(rest)
        return Closing(xxh3_128=self._whole.hexdigest(), size_bytes=size, observed=self._observers.found(), tail=rest)

    def _absorb(self, start: int, end: int, digest: RecordDigest | None = None) -> Iterator[memoryview]:
        at = start
        for piece in self._source.between(start, end):
            self._whole.update(piece)
            if digest is not None:
                digest.update(piece)
            self._observers.take(at, piece)
            at += len(piece)
            yield piece


class MemoryContent:
    """The content of a file that lies in memory, or will. Hashing runs ahead, on a thread: it releases the interpreter lock.

    Args:
        task: what is written.
        buffer: the memory that holds its bytes.
        chunk_bytes: how much is hashed before whoever takes the pieces hears of it.
        progress: called at every step; while there is nothing to hash yet, of none.
        ready: tells how far the memory is filled; None when all of it is.
    """

    in_memory = True

    def __init__(
        self,
        task: WriteTask,
        buffer: memoryview,
        chunk_bytes: int,
        progress: ProgressReporter,
        ready: Ready | None = None,
    ) -> None:
        self.length = task.length
        self._task = task
        self._image = buffer[task.offset : task.offset + task.length]
        self._chunk = chunk_bytes
        self._progress = progress
        self._filled = ready
        self._hashed = 0
        self._closing: Closing | None = None
        self._failure: BaseException | None = None
        self._stopped = False
        self._turn = threading.Condition()
        self._thread = _started(self._run) if self.length > 2 * chunk_bytes else None
        if self._thread is None:
            self._run()

    def close(self) -> None:
        """See ``Content``."""
        self._stopped = True
        if self._thread is not None:
            self._thread.join()

    def pieces(self, size: int) -> Generator[memoryview, None, None]:
        """See ``Content``."""
        body = self.length // PAGE * PAGE
        for start in range(0, body, size):
            end = min(start + size, body)
            self._wait_for(end)
            yield self._image[start:end]

    def _wait_for(self, end: int) -> None:
        """Wait until everything before ``end`` has been hashed and will not change."""
        with self._turn:
            self._turn.wait_for(lambda: self._hashed >= end or self._failure is not None)
        if self._failure is not None:
            raise self._failure

    def closing(self) -> Closing:
        """See ``Content``."""
        with self._turn:
            self._turn.wait_for(lambda: self._closing is not None or self._failure is not None)
        if self._closing is None:
            raise self._failure or RuntimeError("the hasher ended without a result")
        return self._closing

    def between(self, start: int, end: int) -> Iterator[memoryview]:
        """The bytes from ``start``, where the last call ended, to ``end``."""
        for at in range(start, end, _HASH_BYTES):
            stop = min(at + _HASH_BYTES, end)
            if self._stopped:
                raise OSError(errno.ECANCELED, "stopped")
            self._await_bytes(stop)
            yield self._image[at:stop]

    def put(self, at: int, data: bytes) -> memoryview:
        """These come next, at ``at``."""
        self._image[at : at + len(data)] = data
        return self._image[at : at + len(data)]

    def _run(self) -> None:
        try:
            self._progress.moved(0)
            observers = _Observers(self._task, self._image)
            self._progress.moved(0)
            self._announce(self._hash(_Pass(self._task, self.length, self, observers)))
        except BaseException as error:  # it belongs to the thread that writes
            with self._turn:
                self._failure = error
                self._turn.notify_all()

    def _hash(self, one: _Pass) -> Closing:
        hashed = 0
        for piece in one.pieces():
            hashed += len(piece)
            if hashed - self._hashed >= self._chunk:  # thousands of small records must not cost a wake-up each
                self._progress.moved(hashed - self._hashed)
                with self._turn:
                    self._hashed = hashed
                    self._turn.notify_all()
        # The last bytes of the plan are as they stay only now.
        return one.closing(bytes(self._image[self.length // PAGE * PAGE :]))

    def _announce(self, closing: Closing) -> None:
        with self._turn:
            self._closing = closing
            self._hashed = self.length
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


def _started(run: Callable[[], None]) -> threading.Thread | None:
    """A thread that hashes while this one writes; None where none can begin any more."""
    thread = threading.Thread(target=run, name="safe_ckpt-hash", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the last save, written in this process while Python 3.12 shuts down: hashed first, then
        return None
    return thread


class TensorContent:
    """The content of a state that is larger than the host memory for it: straight from the tensors, through a small buffer.

    Args:
        task: what is written.
        plan: where in the file the tensors are, which must not change meanwhile.
    """

    in_memory = False

    def __init__(self, task: WriteTask, plan: FilePlan) -> None:
        self.length = plan.length
        self._task = task
        self._plan = plan
        self._begun = False
        self._closing: Closing | None = None
        self._parts: deque[tuple[int, int, bytes | torch.Tensor | LazyTensor]] = deque()

    def close(self) -> None:
        """See ``Content``. There is nothing to stop."""

    def pieces(self, size: int) -> Generator[memoryview, None, None]:
        """See ``Content``. What is fetched is not there a second time."""
        if self._begun and self._plan.lazies:
            raise OSError(
                None, "it could not be written, and what was streamed is not there a second time", self._task.path
            )
        plan, self._begun, self._closing = self._plan, True, None
        parts: list[tuple[int, int, bytes | torch.Tensor | LazyTensor]] = [
            *((at, len(data), data) for at, data in plan.pieces),
            *((at, tensor.numel() * tensor.element_size(), tensor) for at, tensor in plan.tensors),
            *((at, lazy.size_bytes, lazy) for at, lazy in plan.lazies),
        ]
        self._parts = deque(sorted(parts, key=lambda part: part[0]))
        observers = _Observers(self._task, KnownBytes(plan.length, plan.pieces))
        one = _Pass(self._task, self.length, self, observers)
        buffer = memoryview(mmap.mmap(-1, size))  # not closed here: an error on its way may still hold a piece
        filled = 0
        for piece in one.pieces():
            done = 0
            while done < len(piece):
                count = min(len(piece) - done, size - filled)
                buffer[filled : filled + count] = piece[done : done + count]
                done, filled = done + count, filled + count
                if filled == size:
                    yield buffer
                    filled = 0
        body = filled // PAGE * PAGE
        if body:
            yield buffer[:body]
        self._closing = one.closing(bytes(buffer[body:filled]))

    def closing(self) -> Closing:
        """See ``Content``."""
        if self._closing is None:
            raise OSError(None, "the writing ended before all bytes were written", self._task.path)
        return self._closing

    def between(self, start: int, end: int) -> Iterator[memoryview]:
        """The bytes from ``start``, where the last call ended, to ``end``; zeros where nothing was placed."""
        at = start
        while self._parts and self._parts[0][0] < end:
            offset, size, source = self._parts.popleft()
            yield from _zeros(offset - at)
            yield from _slices(source)
            at = offset + size
        yield from _zeros(end - at)

    def put(self, at: int, data: bytes) -> memoryview:
        """These come next."""
        del at
        return memoryview(data)


def _zeros(count: int) -> Iterator[memoryview]:
    if count > 0:
        yield memoryview(bytes(count))


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
    flat, item_bytes = values_of(source).contiguous().view(-1), source.element_size()
    for at in range(0, flat.numel(), _HASH_BYTES // item_bytes):
        piece = flat[at : at + _HASH_BYTES // item_bytes].cpu()
        yield memoryview((ctypes.c_ubyte * (piece.numel() * item_bytes)).from_address(piece.data_ptr())).cast("B")


def _fetched(lazy: LazyTensor) -> torch.Tensor:
    tensor = lazy.fetch()
    if tensor.is_meta or tuple(tensor.shape) != lazy.shape or tensor.dtype != lazy.dtype:
        fetched = f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"
        raise ValueError(f"a tensor was announced as {lazy.shape} {lazy.dtype} and is {fetched}")
    return tensor
