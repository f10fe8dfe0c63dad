"""Files of ``torch.save``: zip archives since torch 1.6, a row of pickles before. Also the archives within DCP's files."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from safe_ckpt.core.formats.dtypes import ITEM_BYTES
from safe_ckpt.core.storage.reader import Span
from safe_ckpt.errors import CorruptCheckpointError
from safe_ckpt.tools.inspection.files import Window
from safe_ckpt.tools.inspection.pickle_objects import Storage, Tensor
from safe_ckpt.tools.inspection.pickle_reader import MOST_BYTES, read_pickle, read_pickles
from safe_ckpt.tools.inspection.tensors import Entry, TensorPiece, TensorTable, Value, describe, leaves
from safe_ckpt.tools.inspection.zip_reader import Member, is_archive, read_members

SUFFIXES = (".ckpt", ".pt", ".pth", ".bin", ".pkl", ".tar")
_OLD_MAGIC = 0x1950A86A20F9469CFC6C


@dataclass(frozen=True, kw_only=True)
class Archive:
    """A torch archive: its records, and what its pickle would build."""

    source: Window
    members: Sequence[Member]
    root: Any

    def spans(self) -> list[Span]:
        """The records' bytes within the file, with their checksums, where they have one."""
        start, known = self.source.start, [member for member in self.members if not _lacks_checksum(member)]
        return [Span(start=start + m.data_offset, end=start + m.data_offset + m.size, crc=m.crc) for m in known]

    @property
    def unverifiable_bytes(self) -> int:
        """The number of its bytes that have no checksum."""
        return sum(member.size for member in self.members if _lacks_checksum(member))


def _lacks_checksum(member: Member) -> bool:
    # torch under ``skip_data``, and this package in the files of DCP, where their digest is in the manifest, leave it 0.
    return member.crc == 0 and member.size > 0


def looks_like_archive(source: Window) -> bool:
    """Whether it is one, or was before its beginning or its end was damaged."""
    tail = min(source.size, 256)
    return is_archive(source) or b"PK\5\6" in source.read(source.size - tail, tail)


def read_structure(source: Window) -> Archive:
    """Read the structure of an archive.

    Raises:
        CorruptCheckpointError: it contradicts itself.
        HostileCheckpointError: no tool writes such a file.
        OSError: it could not be read.
    """
    members = read_members(source)
    pickles = [member for member in members if member.name.partition("/")[2] == "data.pkl"]
    if len(pickles) != 1:
        raise source.damaged("the archive has no data.pkl, or several")
    if pickles[0].size > MOST_BYTES:
        raise source.damaged("its pickle is refused: it is too large")
    root = read_pickle(source.read(pickles[0].data_offset, pickles[0].size), str(source.path))
    return Archive(source=source, members=members, root=root)


def content_of(archive: Archive) -> TensorTable:
    """Tensors and values of an archive.

    Raises:
        CorruptCheckpointError: a tensor reaches behind its record, or has none.
    """
    return _content(archive.root, str(archive.source.path), Locator(archive))


def content_of_old(root: object, path: str) -> TensorTable:
    """Tensors and values of a file from before the zip format: the tensors' shapes, not where their bytes are."""
    return _content(root, path, None)


def _content(root: object, path: str, locate: Locator | None) -> TensorTable:
    tensors, values = [], []
    for name, leaf in leaves(root, path):
        if isinstance(leaf, Tensor) and locate is not None:
            tensors.append(locate(name, leaf))
        elif isinstance(leaf, Tensor):
            tensors.append(Entry(name=name, dtype=leaf.dtype, shape=leaf.shape, note="in torch's format before 1.6"))
        elif not isinstance(leaf, Storage):
            values.append(value_of(name, leaf))
    return TensorTable(tensors=tuple(tensors), values=tuple(values))


def value_of(name: str, leaf: object) -> Value:
    """A leaf that is no tensor."""
    plain = isinstance(leaf, bool | int | float | str | bytes | list | tuple | dict) or leaf is None
    return Value(name=name, text=describe(leaf), value=leaf, is_plain=plain)


class Locator:
    """Finds the bytes of tensors in an archive."""

    def __init__(self, archive: Archive) -> None:
        self._source = archive.source
        self._records = {member.name.partition("/")[2]: member for member in archive.members}
        order = self._records.get("byteorder")
        self._little = order is None or self._source.read(order.data_offset, min(order.size, 16)) == b"little"

    def __call__(self, name: str, tensor: Tensor) -> Entry:
        """A tensor with the place of its bytes; without it if there are none, or their order is not this machine's.

        Raises:
            CorruptCheckpointError: it reaches behind its record, or has none.
        """
        entry = Entry(name=name, dtype=tensor.dtype, shape=tensor.shape, note=tensor.note)
        if tensor.storage is None:
            return entry
        record, item = self._records.get(f"data/{tensor.storage.key}"), ITEM_BYTES.get(tensor.dtype)
        if record is None:
            raise self._source.damaged(f"the bytes of {name} are missing")
        if not self._little:
            return replace(entry, note=f"{tensor.note} big-endian".strip())
        if item is None:
            return entry
        last = tensor.offset + sum(step * (size - 1) for step, size in zip(tensor.stride, tensor.shape, strict=True))
        if 0 not in tensor.shape and (last + 1) * item > record.size:
            raise self._source.damaged(f"{name} reaches behind its record")
        piece = TensorPiece(
            file=self._source.path,
            offset=self._source.start + record.data_offset + tensor.offset * item,
            stride=tensor.stride,
            starts=tuple(0 for _ in tensor.shape),
            shape=tensor.shape,
        )
        return replace(entry, pieces=(piece,))


def tensor_names_in(archive: Archive, bad: Iterable[Span]) -> list[str]:
    """The names of the tensors in these spans; of the records, if no tensor is in them."""
    starts = {span.start - archive.source.start for span in bad}
    records = [member for member in archive.members if member.data_offset in starts and member.size]
    keys = {member.name.partition("/")[2].removeprefix("data/"): member.name for member in records}
    names = []
    with contextlib.suppress(CorruptCheckpointError):
        for name, leaf in leaves(archive.root, str(archive.source.path)):
            if isinstance(leaf, Tensor) and leaf.storage is not None and leaf.storage.key in keys:
                names.append(name)
    return names or [member.name for member in records]


def root_of(source: Window) -> Any | None:
    """Return what a file of either format would build; None when it is none.

    Raises:
        CorruptCheckpointError: it contradicts itself.
        HostileCheckpointError: no tool writes such a file: it would run code.
        UnsupportedFormatError: its pickle is too long.
        OSError: it could not be read.
    """
    return read_structure(source).root if looks_like_archive(source) else read_old_file(source)


def read_old_file(source: Window) -> Any | None:
    """Return what a file from before the zip format would build; None when it is none. Plain pickles are read too.

    Raises:
        CorruptCheckpointError: it is shorter or longer than it says.
        HostileCheckpointError: it is a pickle, and one that no tool writes.
        OSError: it could not be read.
    """
    head = source.read(0, min(source.size, MOST_BYTES))
    if head[:1] != b"\x80":
        return None
    first = read_pickle(head, str(source.path))
    if first != _OLD_MAGIC:
        return first
    (_, _, _, root, keys), at = read_pickles(head, str(source.path), count=5)
    _check_old_length(source, root, keys, at)
    return root


def _check_old_length(source: Window, root: object, keys: object, at: int) -> None:
    """Compare the length: after the pickles come the storages in the order of ``keys``, each after its count."""
    storages = (leaf.storage for _, leaf in leaves(root, str(source.path)) if isinstance(leaf, Tensor))
    items = {storage.key: ITEM_BYTES.get(storage.dtype) for storage in storages if storage is not None}
    for key in keys if isinstance(keys, list) else []:
        item = items.get(key) if isinstance(key, str) else None
        if item is None:
            return  # of a tensor in some object, whose type is not known here
        at += 8 + int.from_bytes(source.read(at, 8), "little") * item
    if at != source.size:
        raise source.damaged(f"has {source.size} bytes instead of {at}")
