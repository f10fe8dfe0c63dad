"""One file, written at once in this process: for saves outside a running pipeline. Atomic and durable like all others.

Its place in the order of commits is at least the clock's, see ``home.sequence_after``, so that jobs that do not know of each
other have comparable numbers. Within this process each is above those before it, whatever the clock does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safe_ckpt.core.formats import file_plan, torch_archive
from safe_ckpt.core.formats.manifest import CheckpointInfo, Manifest
from safe_ckpt.core.formats.verify import refuse_unreadable
from safe_ckpt.core.home.home import sequence_after
from safe_ckpt.core.staging import snapshot
from safe_ckpt.core.staging.buffer import SharedBuffer
from safe_ckpt.core.storage import durable
from safe_ckpt.core.storage.direct_io import Unwatched, WriteOptions
from safe_ckpt.core.writer.content import MemoryContent
from safe_ckpt.core.writer.sink import FileSink, write_file
from safe_ckpt.errors import DirectoryError, SafeCheckpointError, named

_given: dict[Path, int] = {}
_FOLDER = "there is a folder of this name, and what is saved is one file: give another name, or move the folder away"


def save_archive(
    obj: Any,
    path: Path,
    *,
    sequence: int,
    step: int = 0,
    rank: int = 0,
    notes: Mapping[str, Any] | None = None,
    look: Callable[[bytes], None] = lambda _: None,
) -> CheckpointInfo:
    """Save ``obj`` as a torch archive with our manifest. Blocks until it is durable.

    Args:
        obj: what to save.
        path: the file.
        sequence: its place in the order of commits.
        step: the training step.
        rank: named in errors.
        notes: what the manifest says besides.
        look: is given the pickle, to warn of what is in it.

    Raises:
        StateError: something in it cannot be pickled.
        DirectoryError: the file system refused.
    """
    file = torch_archive.torch_plan(path.name, obj, strict=False, key="checkpoint")
    look(file.pieces[-1][1])
    manifest = Manifest(name=path.name, sequence=sequence, step=step, world_size=1, notes=dict(notes or {}))
    buffer = SharedBuffer()
    near = path.with_name(f".{path.name}.{manifest.op_id}.tmp")
    try:
        try:
            durable.make_directory(path.parent)
            if path.is_dir():
                raise DirectoryError(path=str(path), message=_FOLDER, rank=rank, phase=f"saving {path.name}")
            plan = file_plan.single(file, near.name)
            (task,) = snapshot.take([plan], buffer, str(path.parent), manifest.to_json())
            options = WriteOptions(direct=True, chunk_bytes=8 << 20, flush_every_bytes=64 << 20)
            content = MemoryContent(task, memoryview(buffer.memory), options.chunk_bytes, Unwatched())
            result = write_file(FileSink(options), task, content, Unwatched())
            refuse_unreadable(near)
            durable.publish_file(near, path)
        except SafeCheckpointError:
            raise
        except OSError as error:
            raise named(error, rank=rank, phase=f"saving {path.name}", path=path) from error
    finally:
        with contextlib.suppress(OSError):  # what was raised says more
            near.unlink(missing_ok=True)
        buffer.close()
    return CheckpointInfo.of(manifest, path, result.size_bytes)


def sequence_beside(path: Path, after: int = 0) -> int:
    """A number for a file that is saved outside of a running pipeline: above that of every file it may compete with.

    Args:
        path: the file.
        after: the last number that is known to be given out there.
    """
    _given[path.parent] = sequence_after(max(after, last_beside(path)))
    return _given[path.parent]


def last_beside(path: Path) -> int:
    """The last number that this process gave out where ``path`` is to be saved; 0 for none."""
    return _given.get(path.parent, 0)
