"""The manifest. A checkpoint is committed when it has its final name and a valid manifest.

It is plain JSON with its own digest, so listing, verifying and choosing need no pickle. A directory has ``manifest.json`` with
the size and xxh3-128 of every file. A single-file checkpoint has the same facts in a record of its archive, and a digest of
the whole file in the archive's comment.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import re
import socket
import stat
import sys
import uuid
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from safe_ckpt.core.formats.file_plan import ITSELF
from safe_ckpt.core.formats.zip_archive import COMMENT_BYTES, COMMENT_PREFIX
from safe_ckpt.core.storage import presence
from safe_ckpt.core.storage.objects.place import Place
from safe_ckpt.core.storage.presence import checked_name
from safe_ckpt.core.storage.source import has_folder, in_files, parsed, place_named
from safe_ckpt.errors import (
    CorruptCheckpointError,
    HostileCheckpointError,
    IncompleteCheckpointError,
    SafeCheckpointError,
    StateError,
    UnsupportedFormatError,
)

FORMAT = "safe_ckpt"
FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"
DCP_METADATA = ".metadata"
"""The file in which ``torch.distributed.checkpoint`` says what lies where. It writes it last."""
RECORD_NAME = "archive/.safe_ckpt/manifest.json"
# What zipfile raises on damaged archives; RuntimeError for a flag that says "encrypted".
UNREADABLE = (zipfile.BadZipFile, ValueError, NotImplementedError, EOFError, RuntimeError, zlib.error)
_NOT_OURS = "was not written by safe_ckpt"
_MOST_FILES = 200_000
_MOST_DIRECTORY_BYTES = 16 << 20
_DIGEST = re.compile(r"^[0-9a-f]{32}\Z")
_HEALTH_ROWS: Mapping[str, Mapping[str, type]] = {
    "sick": {"name": str, "numbers": int, "nan": int, "inf": int},
    "changed": {"name": str, "where": str},
}
_HEALTH_TEXTS = ("layout", "ignored", "largest")


@functools.cache
def installed_versions() -> Mapping[str, str]:
    """Look up the versions of Python and of the packages that make a checkpoint: once, which takes milliseconds."""
    names = {"python": ".".join(map(str, sys.version_info[:3]))}
    for package in ("safe-ckpt", "torch"):
        try:
            names[package] = version(package)
        except PackageNotFoundError:
            names[package] = "unknown"
    return names


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """One file of a checkpoint directory.

    Attributes:
        path: relative to it, with forward slashes.
        size_bytes: its length.
        xxh3_128: of its bytes.
        rank: which one wrote it.
        age: how many saves ago it was written; it is one file with that of the checkpoints since.

    Raises:
        TypeError, ValueError: a field is of the wrong type, or no resume would take it.
    """

    path: str
    size_bytes: int
    xxh3_128: str
    rank: int
    age: int = 0

    def __post_init__(self) -> None:
        """Refuse what a reader would, at the commit already."""
        name = checked_name(self.path)
        if not _DIGEST.match(_typed(self.xxh3_128, str)):
            raise ValueError(f"a damaged digest for {name!r}")
        if not 0 <= _typed(self.size_bytes, int) < 1 << 62:
            raise ValueError(f"an impossible size for {name!r}")
        _typed(self.rank, int)
        _typed(self.age, int)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The record of a checkpoint: its content, who wrote it, and its place in the order of commits.

    Attributes:
        sequence: commit order within a directory; neither the step nor a clock tells which is newer.
        op_id: unique to the save.
        items: name given to ``save`` -> how it was stored.
        notes: what an adapter wants to remember.
        frozen: names of parameters that are not trained, see ``extensions.trained``; None where that is not known.
        written_by: host and process of rank 0; empty where the manifest does not say.
        files: every file of a directory checkpoint; empty for a single file.
        health: of its numbers, as ``health.verdict.of_checkpoint`` has it; empty where they were not looked at.
    """

    name: str
    sequence: int
    step: int
    op_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    world_size: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    created_at: str = field(default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="milliseconds"))
    versions: Mapping[str, str] = field(default_factory=installed_versions)
    items: Mapping[str, Any] = field(default_factory=dict)
    notes: Mapping[str, Any] = field(default_factory=dict)
    frozen: Sequence[str] | None = None
    written_by: Mapping[str, Any] = field(default_factory=lambda: {"host": socket.gethostname(), "pid": os.getpid()})
    files: tuple[FileEntry, ...] = ()
    health: Mapping[str, Any] = field(default_factory=dict)

    @property
    def marked(self) -> bool:
        """Whether its numbers are not healthy, so that nothing resumes from it unless it is named."""
        return bool(self.health.get("marked"))

    def to_json(self) -> dict[str, Any]:
        """Describe it as JSON-able data, without digest."""
        facts = {key: value for key, value in vars(self).items() if key != "files" and value is not None}
        files = [{key: value for key, value in vars(entry).items() if key != "age" or value} for entry in self.files]
        return {"format": FORMAT, "format_version": FORMAT_VERSION, **facts, "files": files}

    def to_bytes(self) -> bytes:
        """The content of ``manifest.json``, with its digest. What its own reader refuses is never written.

        Raises:
            StateError: its reader refuses it, such as for its size.
        """
        data = self.to_json()
        text = json.dumps({**data, "digest": _digest(data)}, indent=1).encode() + b"\n"
        try:
            parse_manifest(text, Path(self.name))
        except SafeCheckpointError as error:
            raise StateError(key="checkpoint", message=f"its manifest could not be read again: {error}") from error
        return text

    @classmethod
    def from_json(cls, data: Any, path: str) -> Manifest:
        """Check and build.

        Raises:
            UnsupportedFormatError: not ours, or of a newer version.
            CorruptCheckpointError: a field is missing, of the wrong type or not allowed.
            HostileCheckpointError: the path of a file leads out.
        """
        refuse_other_format(data, path)
        try:
            keys = ("path", "size_bytes", "xxh3_128", "rank")
            files = tuple(FileEntry(**{key: row[key] for key in keys}, age=row.get("age", 0)) for row in data["files"])
            texts = {key: _typed(data[key], str) for key in ("name", "op_id", "created_at")}
            numbers = {key: _typed(data[key], int) for key in ("sequence", "step", "world_size")}
            maps = {key: _typed(data[key], dict) for key in ("metrics", "versions", "items", "notes")}
            for value in maps["metrics"].values():
                if not isinstance(value, int | float) or isinstance(value, bool):
                    raise TypeError(f"expected a number, got {value!r:.80}")
            for item in maps["items"].values():
                _check_item(item)
            _typed(maps["notes"].get("adapter", ""), str)
            maps["written_by"] = _typed(data.get("written_by", {}), dict)
            maps["health"] = checked_health(data.get("health", {}))
            frozen = [_typed(name, str) for name in _typed(data["frozen"], list)] if "frozen" in data else None
        except HostileCheckpointError as error:
            raise HostileCheckpointError(path=path, file=MANIFEST_NAME, message=error.message) from error
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptCheckpointError(path=path, file=MANIFEST_NAME, message=f"damaged manifest: {error}") from error
        return cls(**texts, **numbers, **maps, files=files, frozen=frozen)


@dataclass(frozen=True, kw_only=True)
class CheckpointInfo:
    """One committed checkpoint.

    Attributes:
        path: the directory or file; in an object store its folder.
        name: its name within its directory.
        step: the step given to ``save``.
        sequence: commit order; the highest is the newest.
        metrics: the metrics given to ``save``.
        created_at: ISO 8601, UTC.
        world_size: number of ranks that saved it.
        size_bytes: bytes of all its files.
        verified: whether it carries our manifest; False for what other tools wrote.
        op_id: unique to the save.
        marked: whether its numbers are not healthy, so that nothing resumes from it unless it is named.
        problem: why it cannot be used, as far as a look without reading its payload tells; "" when nothing is wrong so far.

    Example:
        ```python
        info = safe_ckpt.newest("runs/exp")
        print(info.name, info.step, info.metrics, info.marked)
        ```

        ```text
        step-00000020 20 {'loss': 0.5} False
        ```
    """

    path: Place
    name: str
    step: int
    sequence: int
    metrics: Mapping[str, float]
    created_at: str
    world_size: int
    size_bytes: int
    verified: bool = True
    op_id: str = ""
    marked: bool = False
    problem: str = ""

    @property
    def whole(self) -> bool:
        """Whether nothing of it is missing or damaged, as far as a look without reading its payload tells."""
        return not self.problem

    @property
    def healthy(self) -> bool:
        """Whether no bad numbers were found in it. Nobody has looked into what other tools wrote."""
        return not self.marked

    @classmethod
    def of(cls, manifest: Manifest, path: Place, size_bytes: int) -> CheckpointInfo:
        """From a manifest and the path of its checkpoint."""
        return cls(
            path=path,
            name=manifest.name,
            step=manifest.step,
            sequence=manifest.sequence,
            metrics=dict(manifest.metrics),
            created_at=manifest.created_at,
            world_size=manifest.world_size,
            size_bytes=size_bytes,
            op_id=manifest.op_id,
            marked=manifest.marked,
        )

    @property
    def file_path(self) -> Path:
        """Where it is in a file system.

        Raises:
            TypeError: it is in an object store.
        """
        return in_files(self.path)

    def to_json(self) -> dict[str, Any]:
        """Describe it as JSON-able data."""
        return {**vars(self), "path": str(self.path), "metrics": dict(self.metrics)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any], beside: Place | None = None) -> CheckpointInfo:
        """From what ``to_json`` returned, of a checkpoint in the same file system or bucket as ``beside``."""
        return cls(**{**data, "path": place_named(data["path"], beside)})


def refuse_other_format(data: Any, path: str) -> None:
    """Refuse what is no manifest of ours, or one of a newer version. There is one version so far.

    Raises:
        UnsupportedFormatError: see above.
    """
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise UnsupportedFormatError(path=path, message="its manifest was not written by safe_ckpt")
    written = data.get("format_version")
    if not isinstance(written, int) or written > FORMAT_VERSION:
        message = f"format version {written} is newer than {FORMAT_VERSION}, the newest that this release reads"
        raise UnsupportedFormatError(path=path, message=f"{message}: upgrade safe-ckpt")


def read_manifest(path: Place) -> Manifest:
    """The manifest of a directory or single-file checkpoint; checks the manifest, not the payload.

    Raises:
        CorruptCheckpointError: damaged.
        IncompleteCheckpointError: it, or the checkpoint as a whole, is not there.
        UnsupportedFormatError: not ours, or of a newer version.
        OSError: it could not be read; it is not treated as corrupt.
    """
    if not has_folder(path) and presence.is_file(in_files(path)):
        return _read_from_archive(in_files(path))
    try:
        place = path / MANIFEST_NAME
        return parsed(place, lambda text: parse_manifest(text, path), lambda _: _read_file(in_files(path)))
    except (FileNotFoundError, NotADirectoryError):
        file = MANIFEST_NAME if has_folder(path) else ""
        raise IncompleteCheckpointError(path=str(path), file=file, message="is missing") from None


@contextlib.contextmanager
def open_archive(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open a single-file checkpoint with ``zipfile``, unless its directory is larger than that of any checkpoint.

    Raises:
        ValueError: it is, or what else ``UNREADABLE`` names: it is damaged.
        OSError: it could not be read.
    """
    with path.open("rb") as stream:
        bounded = _Bounded(stream)
        with zipfile.ZipFile(bounded) as archive:
            bounded.most_bytes = sys.maxsize
            yield archive


class _Bounded:
    """A file of which not much is read at a time: ``zipfile`` takes 10 seconds for a directory of a million records."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.most_bytes = _MOST_DIRECTORY_BYTES
        self.seek, self.tell, self.seekable = stream.seek, stream.tell, stream.seekable

    def read(self, size: int = -1) -> bytes:
        if size > self.most_bytes:
            raise ValueError(f"a directory of {size} bytes is refused, at most {self.most_bytes} are read")
        data = self._stream.read(size)
        if not 0 <= size <= len(data) and self.tell() < os.fstat(self._stream.fileno()).st_size:
            raise presence.ShortReadError(str(self._stream.name), self.tell())
        return data


def archive_digest(path: Path) -> str | None:
    """The whole-file digest that a single-file checkpoint of ours carries; None when it is not ours."""
    size = path.stat().st_size
    length = COMMENT_BYTES
    if size < length:
        return None
    with path.open("rb") as stream:
        stream.seek(size - length)
        comment = stream.read(length)
    digest = comment[len(COMMENT_PREFIX) :].decode("ascii", "replace")
    return digest if comment.startswith(COMMENT_PREFIX) and _DIGEST.match(digest) else None


def _read_from_archive(path: Path) -> Manifest:
    try:
        with open_archive(path) as archive:
            info = archive.getinfo(RECORD_NAME)
            if info.file_size > MOST_BYTES:
                raise CorruptCheckpointError(path=str(path), file=RECORD_NAME, message="the manifest is too large")
            data = json_of(archive.read(info))
    except KeyError:
        if archive_digest(path) is not None:
            raise CorruptCheckpointError(path=str(path), file=RECORD_NAME, message="is missing") from None
        raise UnsupportedFormatError(path=str(path), message=f"{_NOT_OURS}: it has no manifest") from None
    except (OSError, *UNREADABLE) as error:
        # A damaged offset makes zipfile seek out of range. Any other OSError is the disk's, and no sign of corruption.
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise
        # A file that is empty, begins as an archive or ends with our comment may be a corrupt one of ours.
        with path.open("rb") as stream:
            may_be_ours = stream.read(4) in (b"", b"PK\3\4") or archive_digest(path) is not None
        if not may_be_ours:
            raise UnsupportedFormatError(path=str(path), message=f"{_NOT_OURS}: it is no archive") from None
        raise CorruptCheckpointError(path=str(path), message=f"not a readable archive: {error}") from error
    return Manifest.from_json({**data, "files": []} if isinstance(data, dict) else data, str(path))


def parse_manifest(text: bytes, path: Place) -> Manifest:
    """The content of a ``manifest.json``; ``path`` is the checkpoint, for messages.

    Raises:
        CorruptCheckpointError: damaged.
        UnsupportedFormatError: not ours, or of a newer version.
    """
    try:
        data = json_of(text, exact=True)  # its digest is of the values
    except ValueError as error:
        raise CorruptCheckpointError(path=str(path), file=MANIFEST_NAME, message=f"is not JSON: {error}") from error
    if isinstance(data, dict) and isinstance(rows := data.get("files"), list) and len(rows) > _MOST_FILES:
        message = f"names {len(rows)} files, more than any checkpoint has"
        raise CorruptCheckpointError(path=str(path), file=MANIFEST_NAME, message=message)
    # Check before the version is trusted: every format version has this digest.
    if isinstance(data, dict) and data.get("format") == FORMAT and data.pop("digest", None) != _digest(data):
        message = "its bytes are not those that were written"
        raise CorruptCheckpointError(path=str(path), file=MANIFEST_NAME, message=message)
    return Manifest.from_json(data, str(path))


def _read_file(path: Path) -> bytes:
    fd = os.open(path / MANIFEST_NAME, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would keep us waiting
    with open(fd, "rb") as stream:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise CorruptCheckpointError(path=str(path), file=MANIFEST_NAME, message="is not a regular file")
        if status.st_size > MOST_BYTES:
            raise CorruptCheckpointError(path=str(path), file=MANIFEST_NAME, message="the manifest is too large")
        data = stream.read(status.st_size)  # not more: so much memory is asked for
        if len(data) < status.st_size:
            raise presence.ShortReadError(str(path / MANIFEST_NAME), len(data))
        return data


def _check_item(item: Any) -> None:
    """Refuse what no resume could find the files of."""
    per_rank, files = _typed(item, dict)["per_rank"], _typed(item["files"], dict)
    for text in (item["form"], *files.values()):
        _typed(text, str)
    if not isinstance(per_rank, bool) or not (per_rank or "0" in files):
        raise ValueError(f"an item without a file: {item!r:.80}")


def _typed(value: Any, kind: type) -> Any:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TypeError(f"expected {kind.__name__}, got {value!r:.80}")
    return value


def _digest(data: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


MOST_BYTES = 64 << 20
_MOST_VALUES = 3_000_000  # each takes some 60 to 100 bytes in memory


def json_of(text: bytes, *, exact: bool = False) -> Any:
    """Parse it.

    Args:
        text: what the file has.
        exact: refuse a number that ``json`` would have written with other digits: it was changed since.

    Raises:
        ValueError: it is no JSON, has one key twice in one object, or is larger than any checkpoint needs.
    """
    if len(text) > MOST_BYTES:
        raise ValueError(f"{len(text)} bytes are too many")
    if sum(text.count(mark) for mark in (b",", b"[", b"{")) > _MOST_VALUES:
        raise ValueError(f"more than {_MOST_VALUES} values are too many")
    try:
        return json.loads(text, object_pairs_hook=_without_twins, parse_float=_exactly if exact else float)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a key stands in it twice")
    return values


def _exactly(digits: str) -> float:
    number = float(digits)
    if repr(number) != digits:
        raise ValueError(f"{digits:.40} is not how a number is written")
    return number


def checked_health(data: Any) -> dict[str, Any]:
    """The section as the extension makes it; empty where nothing was looked at.

    Raises:
        TypeError, ValueError, KeyError: it is not that.
    """
    section: dict[str, Any] = _typed(data, dict)
    if not section:
        return {}
    for key in ("healthy", "marked"):
        if type(section[key]) is not bool:
            raise TypeError(f"health: {key} is {section[key]!r:.80}")
    for facts in _typed(section["files"], dict).values():
        for key, value in _typed(facts, dict).items():
            _check_health_fact(key, value)
    return section


def describe_unhealthy(health: Mapping[str, Any]) -> str:
    """Say what is wrong: the worst tensors by name. Empty where nothing is."""
    words = []
    for path, facts in sorted(health.get("files", {}).items()):
        where = f"{path}: " if path != ITSELF else ""
        for row in facts.get("sick", ()):
            counts = ", ".join(f"{row[key]} {word}" for key, word in (("nan", "NaN"), ("inf", "Inf")) if row[key])
            words.append(f"{where}{row['name']} has {counts} among {row['numbers']} numbers")
        words += [
            f"{where}{row['name']} changed and nothing had written to it: the memory of {row['where']} is at fault"
            for row in facts.get("changed", ())
        ]
        if facts.get("jump"):
            words.append(f"{where}the norm is {facts['jump']:.3g} times that of the last healthy checkpoint")
    more = sum(facts.get("sick_tensors", 0) for facts in health.get("files", {}).values()) - 3
    return "; ".join(words[:3]) + (f"; and {more} tensors more" if more > 0 else "")


def _check_health_fact(key: str, value: Any) -> None:
    if key in _HEALTH_ROWS:
        for row in _typed(value, list):
            for name, kind in _HEALTH_ROWS[key].items():
                _typed(row[name], kind)
    elif key == "learnt":
        for pattern, count in _typed(value, dict).values():
            _typed(pattern, str)
            _typed(count, int)
    elif key == "hashes":
        for digest in _typed(value, dict).values():
            _typed(digest, str)
    elif key in _HEALTH_TEXTS:
        _typed(value, str)
    elif type(value) not in (int, float):
        raise TypeError(f"health: expected a number, got {value!r:.80}")
