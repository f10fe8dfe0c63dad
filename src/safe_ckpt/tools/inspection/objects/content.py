"""The content of a checkpoint in an object store, as far as headers and small objects tell it."""

from __future__ import annotations

from dataclasses import dataclass

from safe_ckpt.core.formats.manifest import FileEntry, Manifest, parse_json
from safe_ckpt.core.home.object_head import in_parallel
from safe_ckpt.core.storage.objects.place import ObjectPath
from safe_ckpt.core.storage.objects.second_look import look_twice
from safe_ckpt.errors import CorruptCheckpointError
from safe_ckpt.tools.inspection.content import stem_of
from safe_ckpt.tools.inspection.objects.check import read_committed
from safe_ckpt.tools.inspection.safetensors_reader import SUFFIX, content_of_header
from safe_ckpt.tools.inspection.tensors import Content, leaves
from safe_ckpt.tools.inspection.torch_reader import value_of

_MOST_JSON_BYTES = 8 << 20


@dataclass(frozen=True, kw_only=True)
class ObjectContent:
    """What is known of a checkpoint without reading it whole.

    Attributes:
        manifest: its manifest.
        content: tensors and values, each with the name of its item and a colon before it.
        unread: files that would have to be read whole.
    """

    manifest: Manifest
    content: Content
    unread: tuple[str, ...]


def read_object_content(path: ObjectPath) -> ObjectContent:
    """The headers of safetensors and small JSON; of other files nothing is read.

    Raises:
        CorruptCheckpointError: an object contradicts itself, or the manifest.
        UnsupportedFormatError: it is not ours, or was never committed.
        OSError: it could not be read, or is not there.
    """
    manifest, _ = read_committed(path)
    parts = in_parallel(lambda entry: look_twice(path, lambda place: _content_of(place, entry)), manifest.files)
    known = [part for part in parts if part is not None]
    return ObjectContent(
        manifest=manifest,
        content=Content(
            tensors=tuple(entry for part in known for entry in part.tensors),
            values=tuple(value for part in known for value in part.values),
        ),
        unread=tuple(entry.path for entry, part in zip(manifest.files, parts, strict=True) if part is None),
    )


def _content_of(folder: ObjectPath, entry: FileEntry) -> Content | None:
    place = folder / entry.path
    if place.suffix == SUFFIX:
        return content_of_header(place, entry.size_bytes, lambda at, size: _read(place, at, size)).under(
            stem_of(entry.path)
        )
    if place.suffix == ".json" and entry.size_bytes <= _MOST_JSON_BYTES:
        try:
            values = leaves(parse_json(_read(place, 0, entry.size_bytes)), str(place))
        except ValueError as error:
            raise CorruptCheckpointError(path=str(folder), file=entry.path, message=f"is no JSON: {error}") from error
        return Content(values=tuple(value_of(name, leaf) for name, leaf in values)).under(stem_of(entry.path))
    return None


def _read(place: ObjectPath, at: int, size: int) -> bytes:
    data = bytes(place.bucket.read_range(place.key, at, size))
    if len(data) < size:
        raise CorruptCheckpointError(path=str(place), message="is cut off")
    return data
