"""From memory, or from a file, to an object: in parts, several under way at a time, hashed on the way, no copy on a disk.

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
from typing import TYPE_CHECKING, Any

import xxhash

from safe_ckpt.core.storage.copier import FileCopy, Stamp
from safe_ckpt.core.storage.direct_io import ProgressReporter, WriteOptions
from safe_ckpt.core.storage.durable import WrittenFile
from safe_ckpt.core.storage.objects.object_copy import ObjectCopy
from safe_ckpt.core.storage.objects.place import ObjectPath, open_place
from safe_ckpt.core.storage.objects.second_look import is_there
from safe_ckpt.core.storage.presence import opened

if TYPE_CHECKING:
    from safe_ckpt.core.writer.file_writer import Hasher

_AT_A_TIME = 4
_PATIENCE = 3  # so many times the limit of one request; then the bytes go through this process


def send_image(
    path: str, image: memoryview, hasher: Hasher, options: WriteOptions, progress: ProgressReporter
) -> WrittenFile:
    """Upload a file whose bytes are in memory, or will be, as ``hasher`` lets them pass.

    Raises:
        OSError: the store gave no answer in time, or refuses.
    """
    place, part = place_of(path, options, progress)

    def pieces() -> Iterator[Any]:
        for start in range(0, len(image), part):
            end = min(start + part, len(image))
            hasher.wait_for(end)
            progress.moved(end - start)
            yield image[start:end]
        tail = hasher.closing().tail
        progress.moved(0)
        if tail:
            yield tail

    place.bucket.upload(place.key, len(image), pieces)
    closing = hasher.closing()
    return closing.written(path, len(image) + len(closing.tail))


def send_stream(
    path: str, length: int, begin: Callable[[], Iterator[memoryview]], options: WriteOptions, progress: ProgressReporter
) -> int:
    """Upload what comes piece by piece. Returns how many bytes came.

    Args:
        path: the object's address.
        length: about how many bytes there will be.
        begin: returns the pieces; each is valid until the next one is asked for. Called once: what was streamed is not there
            any more, so a failed upload fails the save.
        options: how.
        progress: called at every step.

    Raises:
        OSError: the store gave no answer in time, or refuses.
    """
    place, part = place_of(path, options, progress)
    sent, begun = 0, False

    def pieces() -> Iterator[bytes]:
        nonlocal sent, begun
        if begun:
            raise OSError(None, "the upload failed, and what was streamed cannot be sent again", path)
        begun = True
        held = bytearray()
        for piece in begin():
            sent += len(piece)
            held += piece
            while len(held) >= part:
                progress.moved(part)
                yield bytes(held[:part])
                del held[:part]
        progress.moved(len(held))
        yield bytes(held)

    place.bucket.upload(place.key, length, pieces)
    return sent


def send_copy(copy: FileCopy, options: WriteOptions, progress: ProgressReporter) -> WrittenFile:
    """Upload a file as it is.

    Raises:
        OSError: it changed meanwhile, or could not be read; or the store gave no answer in time, or refuses.
    """
    place, part = place_of(copy.path, options, progress)
    digests: list[str] = []

    def pieces() -> Iterator[bytes]:
        digest = xxhash.xxh3_128()
        with opened(copy.source, os.O_RDONLY) as fd:
            at = 0
            while at < copy.stamp.size_bytes:
                piece = os.pread(fd, min(part, copy.stamp.size_bytes - at), at)
                if not piece:
                    break
                digest.update(piece)
                at += len(piece)
                progress.moved(len(piece))
                yield piece
            if at != copy.stamp.size_bytes or Stamp.of(os.fstat(fd)) != copy.stamp:
                raise OSError(errno.ESTALE, "it changed while it was being sent", copy.source)
        digests.append(digest.hexdigest())

    place.bucket.upload(place.key, copy.stamp.size_bytes, pieces)
    return _sent(copy.path, copy.stamp.size_bytes, digests)


def copy_objects(copies: Sequence[ObjectCopy], options: WriteOptions, progress: ProgressReporter) -> list[WrittenFile]:
    """Let the store copy objects, several at a time. One that it does not copy is sent, and those that come after it.

    Returns:
        What is there now; ``shared_bytes`` is 0 for what was sent.

    Raises:
        FileNotFoundError: all sources of one are gone.
        OSError: the store gave no answer in time, or refuses.
    """
    refused = threading.Event()
    return _at_once([functools.partial(_copy_object, one, options, progress, refused) for one in copies])


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


def _copy_object(
    one: ObjectCopy, options: WriteOptions, progress: ProgressReporter, refused: threading.Event
) -> WrittenFile:
    place, part = place_of(one.path, options, progress)
    limits = place.bucket.options
    bucket = place.bucket.within(min(limits.give_up_after_s, _PATIENCE * limits.request_timeout_s), place.bucket.stop)
    keys = deque(place.at(source).key for source in one.sources)
    while keys and not refused.is_set():
        try:
            bucket.copy(keys[0], place.key, one.size_bytes)
        except FileNotFoundError:
            if is_there(ObjectPath(bucket, keys[0])):
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
        return send_copy(one.instead, options, progress)
    for key in keys:
        with contextlib.suppress(FileNotFoundError):
            return _send_object(key, one, place, part, progress)
    raise FileNotFoundError(errno.ENOENT, f"what it is a copy of is gone: {', '.join(one.sources)}", one.path)


def _send_object(key: str, one: ObjectCopy, place: ObjectPath, part: int, progress: ProgressReporter) -> WrittenFile:
    digests: list[str] = []

    def pieces() -> Iterator[memoryview]:
        digest = xxhash.xxh3_128()
        for at in range(0, one.size_bytes, part):
            piece = place.bucket.read_range(key, at, min(part, one.size_bytes - at))
            digest.update(piece)
            progress.moved(len(piece))
            yield piece
        digests.append(digest.hexdigest())

    place.bucket.upload(place.key, one.size_bytes, pieces)
    return _sent(one.path, one.size_bytes, digests)


def _sent(path: str, size_bytes: int, digests: Sequence[str]) -> WrittenFile:
    """What is there after an upload, by the digest of its last pass. A pass that did not come to its end has none."""
    if not digests:
        raise OSError(None, "the upload ended before all bytes were sent", path)
    return WrittenFile(path=path, size_bytes=size_bytes, xxh3_128=digests[-1])


def place_of(path: str, options: WriteOptions, progress: ProgressReporter) -> tuple[ObjectPath, int]:
    """Where ``path`` is, and how large a piece should be. A request that is tried again counts as progress.

    Raises:
        OSError: no storage is set up for it.
    """
    if options.storage is None:
        raise OSError(None, "is in an object store, and nothing says how to reach it", path)
    place = open_place(path, options.storage)
    progress.entered("upload")
    tried = functools.partial(progress.moved, 0)
    bucket = place.bucket.within(options.storage.give_up_after_s, tried)
    return ObjectPath(bucket, place.key), options.storage.part_bytes


def is_object(path: str) -> bool:
    """Whether a file of a job goes to an object store."""
    return not path.startswith("/") and "://" in path
