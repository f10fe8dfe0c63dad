"""From memory, or from a file, to an object: in parts, several under way at a time, hashed on the way, no copy on a disk.

Used by the writer process, and by the parent when it writes itself. Standard library, xxhash, isal and obstore only.
"""

from __future__ import annotations

import errno
import functools
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import xxhash

from safe_ckpt.core.storage.copier import FileCopy, Stamp
from safe_ckpt.core.storage.direct_io import ProgressReporter, WriteOptions
from safe_ckpt.core.storage.durable import WrittenFile
from safe_ckpt.core.storage.objects.place import ObjectPath, open_place
from safe_ckpt.core.storage.presence import opened

if TYPE_CHECKING:
    from safe_ckpt.core.writer.file_writer import Hasher


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
        hasher.wait_for(len(image))
        progress.moved(0)
        if hasher.tail:
            yield hasher.tail

    place.bucket.upload(place.key, len(image), pieces)
    size = len(image) + len(hasher.tail)
    return WrittenFile(path=path, size_bytes=size, xxh3_128=hasher.digest, health=hasher.health)


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
    digest = xxhash.xxh3_128()

    def pieces() -> Iterator[bytes]:
        digest.reset()
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

    place.bucket.upload(place.key, copy.stamp.size_bytes, pieces)
    return WrittenFile(path=copy.path, size_bytes=copy.stamp.size_bytes, xxh3_128=digest.hexdigest())


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
