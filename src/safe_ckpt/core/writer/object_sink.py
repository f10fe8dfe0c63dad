"""Writing to objects: in parts, several under way at a time, hashed on the way, no copy on a disk.

Used by the writer process, and by the parent when it writes itself. Standard library, xxhash, isal and obstore only.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import xxhash

from safe_ckpt.core.formats.file_plan import WriteTask
from safe_ckpt.core.storage.copier import FileCopy
from safe_ckpt.core.storage.direct_io import PAGE, ProgressReporter
from safe_ckpt.core.storage.durable import WrittenFile
from safe_ckpt.core.storage.objects.options import StorageOptions
from safe_ckpt.core.storage.objects.place import ObjectPath, open_place
from safe_ckpt.core.storage.objects.second_look import is_object_there
from safe_ckpt.core.storage.presence import Stamp, opened
from safe_ckpt.core.writer.content import Content
from safe_ckpt.core.writer.existing import Adoption

_AT_A_TIME = 4
_PATIENCE = 3  # so many times the limit of one request; then the bytes go through this process


class ObjectSink:
    """See ``Sink``.

    Args:
        storage: how the store is reached.
    """

    def __init__(self, storage: StorageOptions) -> None:
        self._storage = storage

    def write(self, task: WriteTask, content: Content, progress: ProgressReporter) -> WrittenFile:
        """See ``Sink``."""
        place = self._place(task.path, progress)

        def pieces() -> Iterator[memoryview | bytes]:
            with contextlib.closing(content.pieces(self._storage.part_bytes // PAGE * PAGE)) as found:
                for piece in found:
                    progress.moved(len(piece))
                    yield piece if content.in_memory else bytes(piece)
            tail = content.closing().tail
            progress.moved(0)
            if tail:
                yield tail

        place.upload(content.length, pieces)
        return content.closing().written(task.path)

    def copy(self, copies: Sequence[FileCopy], progress: ProgressReporter) -> list[WrittenFile]:
        """See ``Sink``."""
        results = []
        for number, copy in enumerate(copies):
            progress.begin(number)
            results.append(self._copy(copy, progress))
        return results

    def adopt(self, adoptions: Sequence[Adoption], progress: ProgressReporter) -> list[WrittenFile]:
        """Let the store copy objects, several at a time. One that it does not copy is sent, and those that come after it.

        Returns:
            What is there now; ``shared_bytes`` is 0 for what was sent.

        Raises:
            FileNotFoundError: all sources of one are gone.
            OSError: the store gave no answer in time, or refuses.
        """
        refused = threading.Event()
        return _at_once([functools.partial(self._adopt, one, progress, refused) for one in adoptions])

    def sync(self, folders: Sequence[str], progress: ProgressReporter) -> None:
        """See ``Sink``. An object is durable when the store has answered."""

    def _copy(self, copy: FileCopy, progress: ProgressReporter) -> WrittenFile:
        """Send a file as it is."""

        def pieces() -> Iterator[bytes]:
            with opened(copy.source, os.O_RDONLY) as fd:
                at = 0
                while at < copy.stamp.size_bytes:
                    piece = os.pread(fd, min(self._storage.part_bytes, copy.stamp.size_bytes - at), at)
                    if not piece:
                        break
                    at += len(piece)
                    yield piece
                if at != copy.stamp.size_bytes or Stamp.of(os.fstat(fd)) != copy.stamp:
                    raise OSError(errno.ESTALE, "it changed while it was being sent", copy.source)

        return self._send(copy.path, copy.stamp.size_bytes, pieces, progress)

    def _adopt(self, one: Adoption, progress: ProgressReporter, refused: threading.Event) -> WrittenFile:
        place, limits = self._place(one.path, progress), self._storage
        bucket = place.bucket.within(
            min(limits.give_up_after_s, _PATIENCE * limits.request_timeout_s), place.bucket.stop
        )
        keys = deque(place.at(source).key for source in one.sources)
        while keys and not refused.is_set():
            try:
                bucket.copy(keys[0], place.key, one.size_bytes)
            except FileNotFoundError:
                if is_object_there(ObjectPath(bucket, keys[0])):
                    refused.set()  # so it is read and sent
                else:
                    keys.popleft()
            except OSError:
                refused.set()
            else:
                progress.moved(one.size_bytes)
                size = one.size_bytes
                return WrittenFile(path=one.path, size_bytes=size, xxh3_128=one.xxh3_128, shared_bytes=size)
        if one.instead is not None:
            return self._copy(one.instead, progress)
        for key in keys:
            with contextlib.suppress(FileNotFoundError):
                return self._send_object(key, one, place, progress)
        raise FileNotFoundError(errno.ENOENT, f"what it is a copy of is gone: {', '.join(one.sources)}", one.path)

    def _send_object(self, key: str, one: Adoption, place: ObjectPath, progress: ProgressReporter) -> WrittenFile:
        """Read an object, and send it as another one."""

        def pieces() -> Iterator[memoryview]:
            for at in range(0, one.size_bytes, part := self._storage.part_bytes):
                yield place.bucket.read_range(key, at, min(part, one.size_bytes - at))

        return self._send(one.path, one.size_bytes, pieces, progress)

    def _send(
        self,
        path: str,
        size_bytes: int,
        begin: Callable[[], Iterator[bytes | memoryview]],
        progress: ProgressReporter,
    ) -> WrittenFile:
        """Upload what ``begin`` returns, and hash it."""
        place, digests = self._place(path, progress), list[str]()

        def pieces() -> Iterator[bytes | memoryview]:
            digest = xxhash.xxh3_128()
            for piece in begin():
                digest.update(piece)
                progress.moved(len(piece))
                yield piece
            digests.append(digest.hexdigest())

        place.upload(size_bytes, pieces)
        if not digests:  # a pass that did not come to its end has none
            raise OSError(None, "the upload ended before all bytes were sent", path)
        return WrittenFile(path=path, size_bytes=size_bytes, xxh3_128=digests[-1])

    def _place(self, path: str, progress: ProgressReporter) -> ObjectPath:
        """Return the place of ``path``. A request that is tried again counts as progress."""
        place = open_place(path, self._storage)
        progress.entered("upload")
        tried = functools.partial(progress.moved, 0)
        return place.within(self._storage.give_up_after_s, tried)


def _at_once(calls: Sequence[Callable[[], WrittenFile]]) -> list[WrittenFile]:
    """Make the calls, several at a time, and raise the first error once none is under way.

    Not by ``concurrent.futures``: a save that the end of the program waits for may start none of its threads, and a call that
    hangs would hold up that end.
    """
    waiting, results = deque(enumerate(calls)), dict[int, WrittenFile]()
    errors: list[BaseException] = []

    def work() -> None:
        while waiting and not errors:
            try:
                number, call = waiting.popleft()
                results[number] = call()
            except IndexError:  # another thread was faster
                return
            except BaseException as error:
                errors.append(error)

    helpers = [threading.Thread(target=work, name="safe_ckpt-copy-object", daemon=True) for _ in calls[1:_AT_A_TIME]]
    for helper in list(helpers):
        try:
            helper.start()
        except RuntimeError:  # Python 3.12 starts none while it shuts down
            helpers.remove(helper)
    work()
    for helper in helpers:
        helper.join()
    if errors:
        raise errors[0]
    return [results[number] for number in range(len(calls))]
