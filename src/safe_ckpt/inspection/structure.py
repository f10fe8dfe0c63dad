"""A checkpoint as it was nested: dicts and lists whose leaves are tensors (``Entry``), plain values and ``Opaque`` objects."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safe_ckpt.core.formats.manifest import MANIFEST_NAME, MOST_BYTES, parse_json
from safe_ckpt.errors import CorruptCheckpointError, HostileCheckpointError, UnsupportedFormatError
from safe_ckpt.inspection import dcp_reader, safetensors_reader, torch_reader
from safe_ckpt.inspection.content import stem_of
from safe_ckpt.inspection.files import Found, Window, inside, walk
from safe_ckpt.inspection.pickle_objects import Ordered, Tensor
from safe_ckpt.inspection.tensors import Entry

_MOST_NODES = 2_000_000
_MOST_DEPTH = 64


def read_structure(path: Path, *, follow_symlinks: bool = False) -> Any:
    """The whole of a checkpoint. Of a directory: a dict with an entry for every file, or item.

    Raises:
        CorruptCheckpointError: a file contradicts itself.
        UnsupportedFormatError: it is of no format that can be read without running it.
        OSError: it could not be read.
    """
    files = walk(path, follow_symlinks=follow_symlinks)
    if not path.is_dir():
        return _of_file(files[0])
    sharded = {file.path.parent for file in files if file.path.name == dcp_reader.METADATA}
    found: dict[str, Any] = {}
    for file in files:
        folder = file.path.parent
        if file.path.name == dcp_reader.METADATA:
            inner = _of_folder(folder)
            if folder == path:
                found.update(inner)
            else:
                found[folder.relative_to(path).as_posix()] = inner
        elif file.path.name != MANIFEST_NAME and folder not in sharded and _is_readable(file):
            stem, inner = stem_of(file.name), _of_file(file)
            if isinstance(found.get(stem), dict) and isinstance(inner, dict):
                found[stem].update(inner)  # the next shard
            else:
                found[stem] = inner
    if not found:
        raise UnsupportedFormatError(path=str(path), message="has no file that can be read without running it")
    return found


def tensors_in(structure: object) -> Iterator[tuple[str, Entry]]:
    """The tensors with their names: keys and indices joined by dots."""
    stack: list[tuple[str, object]] = [("", structure)]
    while stack:
        name, value = stack.pop()
        if isinstance(value, Entry):
            yield name, value
        parts = (
            value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
        )
        stack += reversed([(f"{name}.{key}" if name else str(key), part) for key, part in parts])


def _is_readable(file: Found) -> bool:
    index = file.name.endswith(".safetensors.index.json")
    return not index and file.path.suffix in (safetensors_reader.SUFFIX, ".json", *torch_reader.SUFFIXES)


def _of_file(file: Found) -> Any:
    if file.path.suffix == safetensors_reader.SUFFIX:
        return {entry.name: entry for entry in safetensors_reader.read_safetensors(file.path).tensors}
    with Window(file.path) as window:
        if file.path.suffix == ".json":
            if window.size > MOST_BYTES:
                raise CorruptCheckpointError(path=str(file.path), message="is too large to be JSON of a checkpoint")
            try:
                return parse_json(window.read(0, window.size))
            except ValueError as error:
                raise CorruptCheckpointError(path=str(file.path), message=f"is no JSON: {error}") from error
        if not torch_reader.looks_like_archive(window):
            message = "is of no format that can be converted; a file of torch before 1.6 needs --to torch --allow-pickle first"
            raise UnsupportedFormatError(path=str(file.path), message=message)
        archive = torch_reader.open_archive(window)
        return _Builder(archive).build(archive.root, "", 0)


class _Builder:
    def __init__(self, archive: torch_reader.Archive) -> None:
        self._locate = torch_reader.Locator(archive)
        self._path = str(archive.source.path)
        self._count = 0

    def build(self, value: Any, name: str, depth: int) -> Any:
        """The same with an ``Entry`` for every tensor."""
        self._count += 1
        if self._count > _MOST_NODES or depth > _MOST_DEPTH:
            raise HostileCheckpointError(path=self._path, message="its structure is too large, or contains itself")
        if isinstance(value, Tensor):
            return self._locate(name, value)
        if isinstance(value, dict):
            made: dict[Any, Any] = Ordered() if isinstance(value, Ordered) else {}
            made.update((key, self.build(part, f"{name}.{key}".lstrip("."), depth + 1)) for key, part in value.items())
            if isinstance(made, Ordered) and isinstance(value, Ordered):
                made.state = value.state
            return made
        if isinstance(value, list | tuple):
            return type(value)(self.build(part, f"{name}.{index}", depth + 1) for index, part in enumerate(value))
        return value


def _of_folder(folder: Path) -> dict[str, Any]:
    """DCP flattens what it saves, and says how it was nested."""
    directory = dcp_reader.read_directory(folder)
    content = dcp_reader.content_of_directory(directory)
    leaves: dict[str, Any] = {entry.name: entry for entry in content.tensors}
    for file in sorted(directory.items):
        with Window(inside(folder, file)) as window:
            for item, archive in dcp_reader.archives_in(directory, file, window):
                if archive is not None and item.name not in directory.tensors:
                    leaves[item.name] = _Builder(archive).build(archive.root, item.name, 0)
    root: dict[str, Any] = {}
    for name, path in sorted(directory.paths.items(), key=lambda pair: repr(pair[1])):
        if name in leaves:
            _put(root, path, leaves[name])
    return {key: _with_lists(part) for key, part in root.items()}


def _with_lists(value: Any) -> Any:
    """Indices of lists are numbers in the paths; keys of dicts are text, whatever they were."""
    if not isinstance(value, dict):
        return value
    parts = {key: _with_lists(part) for key, part in value.items()}
    return [parts[index] for index in range(len(parts))] if parts and parts.keys() == set(range(len(parts))) else parts


def _put(root: dict[str, Any], path: tuple[str | int, ...], leaf: Any) -> None:
    at: Any = root
    for key in path[:-1]:
        at = at.setdefault(key, {})
        if not isinstance(at, dict):
            raise CorruptCheckpointError(path=str(path), message="two names in .metadata contradict each other")
    at[path[-1]] = leaf
