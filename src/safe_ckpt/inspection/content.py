"""What is in a checkpoint, whoever wrote it: every tensor and value under one naming."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from safe_ckpt.core.formats.manifest import MANIFEST_NAME, MOST_BYTES, parse_json
from safe_ckpt.errors import CorruptCheckpointError, UnsupportedFormatError
from safe_ckpt.inspection import dcp_reader, safetensors_reader, torch_reader
from safe_ckpt.inspection.files import Found, Window, walk
from safe_ckpt.inspection.tensors import Content, Value, leaves

_SHARD = re.compile(r"-\d{5}-of-\d{5}$")
_BESIDE = (MANIFEST_NAME, dcp_reader.METADATA)


def read_content(path: Path, *, follow_symlinks: bool = False) -> Content:
    """Tensors and values of a checkpoint. In a directory each name begins with that of its file, or item, and a colon.

    Raises:
        CorruptCheckpointError: a file contradicts itself.
        UnsupportedFormatError: nothing in it can be read.
        OSError: it could not be read.
    """
    files = walk(path, follow_symlinks=follow_symlinks)
    if not path.is_dir():
        found = _of_file(files[0])
        if found is None:
            raise UnsupportedFormatError(path=str(path), message="is of no format that can be read without running it")
        return found
    parts = [_of_folder(path, file) for file in files if file.path.name == dcp_reader.METADATA]
    sharded = {file.path.parent for file in files if file.path.name == dcp_reader.METADATA}
    for file in files:
        if file.path.name not in _BESIDE and not (file.path.suffix == ".distcp" and file.path.parent in sharded):
            found = _of_file(file)
            if found is not None:
                parts.append(found.under(stem_of(file.name)))
    if not parts:
        raise UnsupportedFormatError(path=str(path), message="has no file that can be read without running it")
    return _joined(parts)


def _joined(parts: Iterable[Content]) -> Content:
    parts = list(parts)
    return Content(
        tensors=tuple(entry for part in parts for entry in part.tensors),
        values=tuple(value for part in parts for value in part.values),
    )


def stem_of(name: str) -> str:
    """The name of a file without its ending, the same for all shards of one."""
    stem = name.rpartition(".")[0] or name
    return _SHARD.sub("", stem.removesuffix(".safetensors"))


def _of_folder(path: Path, metadata: Found) -> Content:
    folder = metadata.path.parent
    found = dcp_reader.content_of_directory(dcp_reader.read_directory(folder))
    return found if folder == path else found.under(folder.relative_to(path).as_posix())


def _of_file(file: Found) -> Content | None:
    try:
        suffix = file.path.suffix
        if suffix == safetensors_reader.SUFFIX:
            return safetensors_reader.read_safetensors(file.path)
        if suffix == ".json":
            return _of_json(file)
        with Window(file.path) as window:
            if torch_reader.looks_like_archive(window):
                return torch_reader.content_of(torch_reader.open_archive(window))
            root = torch_reader.read_old_file(window) if suffix in torch_reader.SUFFIXES else None
    except CorruptCheckpointError as error:
        error.file = error.file or file.name
        raise
    return None if root is None else torch_reader.without_places(root, str(file.path))


def _of_json(file: Found) -> Content:
    if file.size_bytes > MOST_BYTES:
        return Content()
    with Window(file.path) as window:
        text = window.read(0, window.size)
    try:
        root = parse_json(text)
    except ValueError as error:
        raise CorruptCheckpointError(path=str(file.path), message=f"is no JSON: {error}") from error
    values: list[Value] = [torch_reader.value_of(name, leaf) for name, leaf in leaves(root, str(file.path))]
    return Content(values=tuple(values))
