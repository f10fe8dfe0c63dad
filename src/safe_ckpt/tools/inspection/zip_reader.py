"""Zip archives as torch writes them, read strictly: every byte that is not payload must be what its copies say it is.

A zip file says most things twice, in front of each record and in the directory at its end. ``torch.load`` compares neither
and never looks at the CRC-32s; here both are done. Records that are compressed, that overlap, or that leave a gap are refused:
torch writes none of these, and bombs are made of them. Format: PKWARE APPNOTE.TXT 6.3.10.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass

from safe_ckpt.core.formats.zip_archive import COMMENT_PREFIX
from safe_ckpt.core.storage.presence import checked_name
from safe_ckpt.errors import CorruptCheckpointError, HostileCheckpointError
from safe_ckpt.tools.inspection.files import Window

MOST_MEMBERS = 250_000
_MOST_DIRECTORY_BYTES = 64 << 20
_LIMIT16, _LIMIT32 = 0xFFFF, 0xFFFFFFFF
_PADDING = {0x4246: b"Z", 0xD935: b"\0"}  # torch's, and zipalign's, which this package writes
_END = struct.Struct("<4s4H2IH")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_OURS = re.compile(re.escape(COMMENT_PREFIX) + rb"[0-9a-f]{32}")
_LOCAL = struct.Struct("<4s5H3I2H")


@dataclass(frozen=True, kw_only=True)
class Member:
    """A record: where its bytes lie in the archive, and their CRC-32."""

    name: str
    data_offset: int
    size: int
    crc: int


@dataclass(frozen=True, kw_only=True)
class _Entry:
    name: str
    header_offset: int
    size: int
    crc: int
    flags: int
    twice: tuple[int, ...]  # version, method, time, date: as in front of the record
    once: tuple[int, ...]  # what only the directory says, and says of all records alike


def is_archive(source: Window) -> bool:
    """Whether it begins as one."""
    return source.size >= 22 and source.read(0, 4) == b"PK\3\4"


def read_members(source: Window) -> list[Member]:
    """Every record, in the order of the file, with the structure checked.

    Raises:
        CorruptCheckpointError: the structure contradicts itself.
        HostileCheckpointError: no tool writes such an archive.
        OSError: it could not be read.
    """
    reader = _Reader(source)
    entries, end = reader.directory()
    return reader.members(sorted(entries, key=lambda entry: entry.header_offset), end)


class _Reader:
    def __init__(self, source: Window) -> None:
        self._source = source

    def damaged(self, why: str) -> CorruptCheckpointError:
        return self._source.damaged(f"the archive is damaged: {why}")

    def refused(self, why: str) -> HostileCheckpointError:
        return self._source.refused(f"the archive is refused: {why}")

    def _check(self, condition: bool, why: str) -> None:
        if not condition:
            raise self.damaged(why)

    def directory(self) -> tuple[list[_Entry], int]:
        """The entries of the directory at the end, and where it begins."""
        at, count, size, start = self._end()
        if count > MOST_MEMBERS or size > _MOST_DIRECTORY_BYTES:
            raise self.refused(f"{count} records in a directory of {size} bytes; at most {MOST_MEMBERS} are read")
        self._check(start + size == at and start >= 0, "its directory does not lie where it should")
        body = self._source.read(start, size)
        entries, offset = [], 0
        for _ in range(count):
            entry, offset = self._entry(body, offset)
            entries.append(entry)
        self._check(offset == size, "its directory is not as long as it says")
        names = {entry.name for entry in entries}
        self._check(len(names) == count, "two records have one name")
        self._check(len({entry.once for entry in entries}) <= 1, "records differ in what is equal for all")
        return entries, start

    def _end(self) -> tuple[int, int, int, int]:
        """The place of the end record (of the two, the first), and what it says: records, bytes and offset of the directory."""
        size = self._source.size
        tail = self._source.read(max(0, size - _LIMIT16 - 22), min(size, _LIMIT16 + 22))
        for place in range(len(tail) - 22, -1, -1):
            comment = len(tail) - 22 - place
            if (
                tail[place : place + 4] == b"PK\5\6"
                and int.from_bytes(tail[place + 20 : place + 22], "little") == comment
            ):
                break
        else:
            raise self.damaged("it has no directory: cut off, or altered")
        _, disk, first, count, total, length, start, _ = _END.unpack_from(tail, place)
        accounted = place + 22 == len(tail) or _OURS.fullmatch(tail, place + 22)  # torch writes no comment
        self._check(bool(accounted), "it ends in bytes that nothing accounts for")
        self._check(disk == first == 0 and count == total, "its end record contradicts itself")
        at = size - len(tail) + place
        if at < 76 or (locator := self._source.read(at - 20, 20))[:4] != b"PK\6\7":
            self._check(count != _LIMIT16 and _LIMIT32 not in (length, start), "an end record is missing")
            return at, count, length, start
        return self._end64(at, locator, (count, length, start))

    def _end64(self, at: int, locator: bytes, narrow: tuple[int, int, int]) -> tuple[int, int, int, int]:
        _, disk, place, disks = struct.unpack("<4sIQI", locator)
        self._check(disk == 0 and disks == 1 and place == at - 76, "its end records contradict each other")
        fields = struct.unpack("<4sQ2H2I4Q", self._source.read(place, 56))
        mark, length, made, needed, disk, first, count, total, size, start = fields
        usual = mark == b"PK\6\6" and length == 44 and needed == 45 and made in (45, 0x031E, 0x032D)
        self._check(usual and disk == first == 0 and count == total, "its end record is wrong")
        for wide, short, limit in zip((count, size, start), narrow, (_LIMIT16, _LIMIT32, _LIMIT32), strict=True):
            self._check(short in (wide, limit), "its end records contradict each other")
        return place, count, size, start

    def _entry(self, body: bytes, at: int) -> tuple[_Entry, int]:
        self._check(at + 46 <= len(body) and body[at : at + 4] == b"PK\1\2", "its directory is cut off")
        _, made, version, flags, method, time, date, crc, packed, size, *rest = _CENTRAL.unpack_from(body, at)
        name_bytes, extra_bytes, comment_bytes, disk, internal, external, offset = rest
        end = at + 46 + name_bytes + extra_bytes + comment_bytes
        self._check(end <= len(body) and comment_bytes == 0 and disk == 0, "its directory is wrong")
        name = self._name(body[at + 46 : at + 46 + name_bytes])
        if method != 0:
            raise self.refused(f"{name!r} is compressed, which torch never does")
        if flags & 0x41:
            raise self.refused(f"{name!r} is encrypted")
        extra = dict(self._fields(body[at + 46 + name_bytes : end], name))
        wide, place = extra.pop(1, b""), 0
        values = []
        for value in (size, packed, offset):
            if value == _LIMIT32:
                self._check(place + 8 <= len(wide), f"{name!r} has a wrong size")
                value, place = int.from_bytes(wide[place : place + 8], "little"), place + 8  # noqa: PLW2901
            values.append(value)
        self._check(place == len(wide) and not extra, f"{name!r} has fields that nothing accounts for")
        self._check(values[0] == values[1], f"{name!r} has two sizes")
        size, _, offset = values
        twice, once = (version, method, time, date), (made, internal, external)
        return _Entry(name=name, header_offset=offset, size=size, crc=crc, flags=flags, twice=twice, once=once), end

    def _name(self, raw: bytes) -> str:
        try:
            name = raw.decode()
        except UnicodeDecodeError:
            raise self.damaged("a name in its directory is no text") from None
        if "\\" in name:
            raise self.refused(f"a name in it leads out of it: {name[:200]!r}")
        return checked_name(name, self._source.path)

    def _fields(self, extra: bytes, name: str) -> list[tuple[int, bytes]]:
        fields, at = [], 0
        while at < len(extra):
            self._check(at + 4 <= len(extra), f"the header of {name!r} is wrong")
            kind, size = struct.unpack_from("<2H", extra, at)
            self._check(at + 4 + size <= len(extra), f"the header of {name!r} is wrong")
            fields.append((kind, extra[at + 4 : at + 4 + size]))
            at += 4 + size
        return fields

    def members(self, entries: list[_Entry], end: int) -> list[Member]:
        """The records one after the other: each must begin where the one before it ends."""
        records, at = [], 0
        for entry in entries:
            self._check(entry.header_offset == at, f"{entry.name!r} does not follow the record before it")
            member, at = self._member(entry)
            records.append(member)
        self._check(at == end, "something lies between its records and its directory")
        return records

    def _member(self, entry: _Entry) -> tuple[Member, int]:
        head = _LOCAL.unpack(self._source.read(entry.header_offset, 30))
        mark, version, flags, method, time, date, crc, packed, size, name_bytes, extra_bytes = head
        rest = self._source.read(entry.header_offset + 30, name_bytes + extra_bytes)
        name, streamed = entry.name, bool(entry.flags & 8)
        same = mark == b"PK\3\4" and (version, method, time, date) == entry.twice and flags == entry.flags
        self._check(same and rest[:name_bytes] == name.encode(), f"the header of {name!r} is not that of the directory")
        wide = b""
        for kind, field in self._fields(rest[name_bytes:], name):
            if kind == 1:
                wide = field
            else:
                self._check(_is_padding(kind, field), f"the header of {name!r} has bytes that nothing accounts for")
        data = entry.header_offset + 30 + name_bytes + extra_bytes
        known = (0, 0, 0) if streamed else (entry.crc, entry.size, entry.size)
        if wide:
            self._check((packed, size) == (_LIMIT32, _LIMIT32) and len(wide) == 16, f"the header of {name!r} is wrong")
            packed, size = struct.unpack("<2Q", wide)
        fits = (crc, packed, size) == known or (crc, packed, size) == (entry.crc, entry.size, entry.size)
        self._check(fits, f"the header of {name!r} is not that of the directory")
        after = data + entry.size
        if streamed:
            after += self._descriptor(entry, after, wide=bool(wide))
        return Member(name=name, data_offset=data, size=entry.size, crc=entry.crc), after

    def _descriptor(self, entry: _Entry, at: int, *, wide: bool) -> int:
        """The length of what follows a record's bytes: its CRC-32 and its sizes once more."""
        for form in ("<4sIQQ", "<4sIII") if wide or entry.size >= _LIMIT32 else ("<4sIII", "<4sIQQ"):
            size = struct.calcsize(form)
            if form == "<4sIII" and entry.size > _LIMIT32:
                continue
            if at + size <= self._source.size:
                fields = struct.unpack(form, self._source.read(at, size))
                if fields == (b"PK\7\10", entry.crc, entry.size, entry.size):
                    return size
        raise self.damaged(f"what follows {entry.name!r} is not what the directory says of it")


def _is_padding(kind: int, field: bytes) -> bool:
    fill = _PADDING.get(kind)
    if fill is None:
        return False
    if kind == 0xD935:  # the alignment, then zeros
        return len(field) >= 2 and field[:2] == b"\0\x10" and not any(field[2:])
    return field == fill * len(field)
