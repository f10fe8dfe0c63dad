"""What the writer is asked to write: one file, whose bytes lie in shared memory. Needs no torch."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from safe_ckpt.core.formats import zip_archive
from safe_ckpt.core.formats.zip_archive import Record
from safe_ckpt.core.storage.checksum import crc32


@dataclass(frozen=True, kw_only=True)
class WriteTask:
    """One file to write.

    Attributes:
        path: where; replaced if it exists.
        offset: where its bytes start in the shared buffer, a multiple of 4096.
        length: how many there are.
        records: for a zip archive, the records in file order; None for a plain file.
        manifest_name: for a zip archive, the name of the manifest record that is appended.
        manifest: for a zip archive, the manifest; the hashes of the records are added to it.
    """

    path: str
    offset: int
    length: int
    records: tuple[Record, ...] | None = None
    manifest_name: str = ""
    manifest: Mapping[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """As JSON-able data."""
        data = dataclasses.asdict(self)
        if self.records is not None:
            data["records"] = [[r.name, r.header_offset, r.data_offset, r.size] for r in self.records]
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> WriteTask:
        """From what ``to_json`` returned."""
        records = data["records"]
        if records is not None:
            names = ("name", "header_offset", "data_offset", "size")
            records = tuple(Record(**dict(zip(names, row, strict=True))) for row in records)
        return cls(**{**data, "records": records})


def closing_of(task: WriteTask, length: int, crcs: dict[str, int], hashes: Mapping[str, str]) -> bytes:
    """What follows the ``length`` bytes of an archive: its manifest record and directory, up to the comment."""
    manifest = json.dumps({**(task.manifest or {}), "records": dict(hashes)}, separators=(",", ":")).encode()
    own = zip_archive.place(task.manifest_name, len(manifest), length)
    crcs[own.name] = crc32(manifest)
    body = zip_archive.local_header(own) + manifest + zip_archive.descriptor(crcs[own.name], own.size)
    return body + zip_archive.closing([*(task.records or ()), own], crcs, own.end)
