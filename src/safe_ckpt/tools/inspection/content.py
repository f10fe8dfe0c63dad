"""The content of a checkpoint of any tool: a flat list of named tensors and values, or nested as it was saved."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from safe_ckpt.core.formats.manifest import DCP_METADATA, MANIFEST_NAME, MOST_BYTES, FileEntry, Manifest, json_of
from safe_ckpt.core.home.objects.head import in_parallel
from safe_ckpt.core.storage.objects.place import ObjectPath, Place
from safe_ckpt.core.storage.objects.second_look import look_thrice
from safe_ckpt.errors import CorruptCheckpointError, HostileCheckpointError, UnsupportedFormatError
from safe_ckpt.tools.inspection import dcp_reader, safetensors_reader, torch_reader
from safe_ckpt.tools.inspection.check import read_committed
from safe_ckpt.tools.inspection.files import CheckpointFile, Window, path_inside, read_json, walk
from safe_ckpt.tools.inspection.pickle_objects import Ordered, Tensor
from safe_ckpt.tools.inspection.safetensors_reader import SUFFIX, content_of_header
from safe_ckpt.tools.inspection.tensors import Entry, TensorTable, leaves

_SHARD = re.compile(r"-\d{5}-of-\d{5}\Z")
_MOST_NODES = 2_000_000
_MOST_DEPTH = 64
_MOST_JSON_BYTES = 8 << 20
_NOTHING = "has no file that can be read without running it"
_BESIDE = (MANIFEST_NAME, DCP_METADATA)


def read_content(path: Path, *, follow_symlinks: bool = False) -> TensorTable:
    """Tensors and values of a checkpoint. In a directory each name begins with that of its file, or item, and a colon.

    Raises:
        CorruptCheckpointError: a file contradicts itself.
        UnsupportedFormatError: nothing in it can be read.
        OSError: it could not be read.
    """
    files = walk(path, follow_symlinks=follow_symlinks)
    if not path.is_dir():
        whole = _content_of_file(files[0])
        if whole is None:
            raise UnsupportedFormatError(path=str(path), message="is of no format that can be read without running it")
        return whole
    folders, others = _parts_of(files)
    parts = []
    for folder in folders:
        directory = dcp_reader.read_directory(folder)
        content = _by_item(dcp_reader.content_of_directory(directory), directory)
        parts.append(content if folder == path else content.under(folder.relative_to(path).as_posix()))
    parts += [part.under(stem_of(file.name)) for file in others if (part := _content_of_file(file)) is not None]
    if not parts:
        raise UnsupportedFormatError(path=str(path), message=_NOTHING)
    return TensorTable.of(parts)


def read_structure(path: Path, *, follow_symlinks: bool = False) -> Any:
    """The whole of a checkpoint as it was nested: dicts and lists of tensors (``Entry``), plain values and ``Opaque`` objects.

    Of a directory: a dict with an entry for every file, or item.

    Raises:
        CorruptCheckpointError: a file contradicts itself.
        UnsupportedFormatError: it is of no format that can be read without running it.
        OSError: it could not be read.
    """
    files = walk(path, follow_symlinks=follow_symlinks)
    if not path.is_dir():
        return _structure_of_file(files[0])
    folders, others = _parts_of(files)
    whole: dict[str, Any] = {}
    for folder in folders:
        inner = _structure_of_folder(folder)
        whole.update(inner if folder == path else {folder.relative_to(path).as_posix(): inner})
    readable = (safetensors_reader.SUFFIX, ".json", *torch_reader.SUFFIXES)
    for file in others:
        is_index = file.name.endswith(".safetensors.index.json")
        if file.path.parent in folders or file.path.suffix not in readable or is_index:
            continue
        stem, inner = stem_of(file.name), _structure_of_file(file)
        if isinstance(whole.get(stem), dict) and isinstance(inner, dict):
            whole[stem].update(inner)  # the next shard
        else:
            whole[stem] = inner
    if not whole:
        raise UnsupportedFormatError(path=str(path), message=_NOTHING)
    return whole


def _parts_of(files: Sequence[CheckpointFile]) -> tuple[Collection[Path], list[CheckpointFile]]:
    """The folders that DCP wrote, and the files that are read one by one."""
    folders = dict.fromkeys(file.path.parent for file in files if file.path.name == DCP_METADATA).keys()
    others = [file for file in files if file.path.name not in _BESIDE]
    return folders, [file for file in others if file.path.suffix != ".distcp" or folders.isdisjoint(file.path.parents)]


def _by_item(content: TensorTable, directory: dcp_reader.Directory) -> TensorTable:
    """Put the name of an item and a colon before the names in it, where the files of items lie in folders of their own."""
    items = sorted({file.rpartition("/")[0] for file in directory.items} - {""}, key=len, reverse=True)

    def shown(name: str) -> str:
        item = next((one for one in items if name == one or name.startswith(f"{one}.")), None)
        return name if item is None else f"{item}:{name[len(item) + 1 :] or item}"

    return TensorTable(
        tensors=tuple(replace(one, name=shown(one.name)) for one in content.tensors),
        values=tuple(replace(one, name=shown(one.name)) for one in content.values),
    )


def stem_of(name: str) -> str:
    """The name of a file without its ending, the same for all shards of one."""
    stem = name.rpartition(".")[0] or name
    return _SHARD.sub("", stem.removesuffix(".safetensors"))


def _content_of_file(file: CheckpointFile) -> TensorTable | None:
    suffix = file.path.suffix
    try:
        if suffix == safetensors_reader.SUFFIX:
            return safetensors_reader.read_safetensors(file.path)
        if suffix == ".json":
            return TensorTable() if file.size_bytes > MOST_BYTES else _content_of_json(read_json(file), file.path)
        with Window(file.path) as window:
            if torch_reader.looks_like_archive(window):
                return torch_reader.content_of(torch_reader.read_structure(window))
            root = torch_reader.read_old_file(window) if suffix in torch_reader.SUFFIXES else None
    except CorruptCheckpointError as error:
        error.file = error.file or file.name
        raise
    return None if root is None else torch_reader.content_of_old(root, str(file.path))


def _content_of_json(parsed: object, path: Place) -> TensorTable:
    return TensorTable(values=tuple(torch_reader.value_of(name, leaf) for name, leaf in leaves(parsed, str(path))))


def tensors_in(structure: object) -> Iterator[tuple[str, Entry]]:
    """The tensors with their names: keys and indices joined by dots."""
    stack: list[tuple[str, object]] = [("", structure)]
    while stack:
        name, value = stack.pop()
        if isinstance(value, Entry):
            yield name, value
        if isinstance(value, dict | list | tuple):
            parts = value.items() if isinstance(value, dict) else enumerate(value)
            stack += reversed([(f"{name}.{key}" if name else str(key), part) for key, part in parts])


def _structure_of_file(file: CheckpointFile) -> Any:
    if file.path.suffix == safetensors_reader.SUFFIX:
        return {entry.name: entry for entry in safetensors_reader.read_safetensors(file.path).tensors}
    if file.path.suffix == ".json":
        return read_json(file)
    with Window(file.path) as window:
        if not torch_reader.looks_like_archive(window):
            message = (
                "is of no format that can be converted; load a file of torch before 1.6 with torch, and save it again"
            )
            raise UnsupportedFormatError(path=str(file.path), message=message)
        archive = torch_reader.read_structure(window)
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


def _structure_of_folder(folder: Path) -> dict[str, Any]:
    """The nested state: DCP flattens what it saves, and ``.metadata`` has the nesting."""
    directory = dcp_reader.read_directory(folder)
    content = dcp_reader.content_of_directory(directory)
    leaves: dict[str, Any] = {entry.name: entry for entry in content.tensors}
    for file in sorted(directory.items):
        with Window(path_inside(folder, file)) as window:
            for item, archive in dcp_reader.archives_in(directory, file, window):
                if archive is not None and item.name not in directory.tensors:
                    leaves[item.name] = _Builder(archive).build(archive.root, item.name, 0)
    root: dict[str, Any] = {}
    for name, path in sorted(directory.paths.items(), key=lambda pair: repr(pair[1])):
        if name in leaves:
            _put(root, path, leaves[name])
    return {key: _with_lists(part) for key, part in root.items()}


def _with_lists(value: Any) -> Any:
    """Dicts of which all keys are indices become lists. In paths an index is a number, and every other key is text."""
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


def read_object_content(path: ObjectPath) -> tuple[Manifest, TensorTable, list[str]]:
    """The headers of safetensors and small JSON; of other files nothing is read.

    Returns:
        The manifest; tensors and values, each with the name of its item and a colon before it; and the files that would have
        to be read whole.

    Raises:
        CorruptCheckpointError: an object contradicts itself, or the manifest.
        UnsupportedFormatError: it is not ours, or was never committed.
        OSError: it could not be read, or is not there.
    """
    manifest, _ = read_committed(path)
    parts = in_parallel(lambda entry: look_thrice(path, lambda place: _content_of_object(place, entry)), manifest.files)
    unread = [entry.path for entry, part in zip(manifest.files, parts, strict=True) if part is None]
    return manifest, TensorTable.of([part for part in parts if part is not None]), unread


def _content_of_object(folder: ObjectPath, entry: FileEntry) -> TensorTable | None:
    place = folder / entry.path
    if place.suffix == SUFFIX:
        return content_of_header(place, entry.size_bytes, lambda at, size: _read(place, at, size)).under(
            stem_of(entry.path)
        )
    if place.suffix == ".json" and entry.size_bytes <= _MOST_JSON_BYTES:
        try:
            parsed = json_of(_read(place, 0, entry.size_bytes))
        except ValueError as error:
            raise CorruptCheckpointError(path=str(folder), file=entry.path, message=f"is no JSON: {error}") from error
        return _content_of_json(parsed, place).under(stem_of(entry.path))
    return None


def _read(place: ObjectPath, at: int, size: int) -> bytes:
    data = bytes(place.read_range(at, size))
    if len(data) < size:
        raise CorruptCheckpointError(path=str(place), message="is cut off")
    return data
