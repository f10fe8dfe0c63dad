"""What a power cut may leave on a disk: computed from a recorded trace of file operations.

The model is the strict reading of POSIX, as in ALICE (Pillai et al., OSDI 2014): what was written to a file is durable once
an fsync of it returned, a directory entry once an fsync of its directory returned, and of the rest any part may be there, in
any combination. A rename is done as a whole or not at all.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_ENTRY = {"create", "create_new", "create_empty", "mkdir", "rename", "exchange", "link", "symlink", "unlink", "rmdir"}
_DATA = {"write", "pwrite", "truncate"}


@dataclass(frozen=True, kw_only=True)
class FileOperation:
    """One recorded operation.

    Attributes:
        name: ``create``, ``pwrite``, ``sync``, ``rename`` and so on.
        path: what it was done to.
        other: the new name of a rename or link; for a symbolic link, ``path`` is what it says.
        data: the bytes of a write.
        offset: of a write, -1 for the end; the size of a truncation.
    """

    name: str
    path: str
    other: str = ""
    data: bytes = b""
    offset: int = 0

    @property
    def target(self) -> str:
        """The entry that it is about."""
        return self.other or self.path


@dataclass(frozen=True, kw_only=True)
class CrashState:
    """What may be found after the power came back.

    Attributes:
        after: how many operations had been started.
        lost: which of those are missing.
        files: path to content; None for a directory, a string for a symbolic link.
    """

    after: int
    lost: tuple[int, ...]
    files: dict[str, bytes | str | None]

    def write_to(self, folder: Path, root: Path) -> None:
        """Make it real below ``folder``, which stands in for ``root``."""
        for path, content in sorted(self.files.items()):
            here = folder / os.path.relpath(path, root)
            if content is None:
                here.mkdir(parents=True, exist_ok=True)
            elif isinstance(content, str):
                here.parent.mkdir(parents=True, exist_ok=True)
                here.symlink_to(content)
            else:
                here.parent.mkdir(parents=True, exist_ok=True)
                here.write_bytes(content)


@dataclass
class _Node:
    data: bytearray = field(default_factory=bytearray)
    children: dict[str, _Node] | None = None
    points_to: str | None = None


def read_trace(log: Path) -> list[FileOperation]:
    """Read what ``FaultyStorage.watch(..., log=...)`` recorded."""
    content, at, found = log.read_bytes(), 0, []
    while at < len(content):
        end = content.index(b"\n", at)
        name, path, other, offset, size = content[at:end].decode().split("\t")
        data = content[end + 1 : end + 1 + int(size)]
        found.append(FileOperation(name=name, path=path, other=other, data=data, offset=int(offset)))
        at = end + 2 + int(size)
    return found


def crash_states(
    before: Path, trace: Sequence[FileOperation], root: Path, *, seed: int = 0, samples: int = 4
) -> Iterator[CrashState]:
    """All prefixes of the trace, each with what was not yet durable dropped or reordered; no state twice.

    For every prefix: everything arrived; only what is durable; all but one; that one alone; and some random parts.

    Args:
        before: the tree below ``root`` as it was, all of it durable.
        trace: what was done then.
        root: the directory that the paths of the trace lie in.
        seed: for the random parts.
        samples: how many random parts for each prefix.
    """
    chance = random.Random(seed)
    seen: set[tuple[tuple[str, bytes | str | None], ...]] = set()
    start = _read(before, root)
    for count in range(len(trace) + 1):
        pending = [i for i in range(count) if trace[i].name != "sync" and not _durable(trace, i, count)]
        for lost in _choices(pending, chance, samples):
            files = _replay(start, trace[:count], set(lost))
            key = tuple(sorted(files.items(), key=lambda item: item[0]))
            if key not in seen:
                seen.add(key)
                yield CrashState(after=count, lost=lost, files=files)


def _choices(pending: list[int], chance: random.Random, samples: int) -> Iterator[tuple[int, ...]]:
    yield ()
    yield tuple(pending)
    for one in pending:
        yield (one,)
        yield tuple(i for i in pending if i != one)
    for _ in range(samples if len(pending) > 2 else 0):
        yield tuple(i for i in pending if chance.random() < 0.5)


def _durable(trace: Sequence[FileOperation], index: int, end: int) -> bool:
    op = trace[index]
    # A file is synced under the name that it has then, and so is the folder of an entry.
    names = {op.path if op.name in _DATA else os.path.dirname(op.target)}
    for later in trace[index + 1 : end]:
        if later.name in ("rename", "exchange"):
            names |= {new for name in names if (new := _renamed(name, later)) is not None}
        if later.name == "sync" and later.path in names:
            return True
    return False


def _renamed(path: str, op: FileOperation) -> str | None:
    if path == op.path or path.startswith(op.path + "/"):
        return op.other + path[len(op.path) :]
    return None


def _read(folder: Path, root: Path) -> dict[str, bytes | str | None]:
    found: dict[str, bytes | str | None] = {str(root): None}
    for path in sorted(folder.rglob("*")):
        name = str(root / path.relative_to(folder))
        found[name] = os.readlink(path) if path.is_symlink() else None if path.is_dir() else path.read_bytes()
    return found


def _replay(
    start: dict[str, bytes | str | None], trace: Sequence[FileOperation], lost: set[int]
) -> dict[str, bytes | str | None]:
    tree = _Node(children={})
    for path, content in sorted(start.items()):
        node = _Node(children={}) if content is None else _Node()
        if isinstance(content, str):
            node.points_to = content
        elif content is not None:
            node.data = bytearray(content)
        _put(tree, path, node)
    # Writes go to the file that had the name when they were made, whatever became of the name.
    live, opened = tree, {path: _find(tree, path) for path in start}
    for index, op in enumerate(trace):
        _apply(live, opened, op, entry=index not in lost)
    return _flatten(tree)


def _apply(tree: _Node, opened: dict[str, _Node | None], op: FileOperation, *, entry: bool) -> None:
    if op.name in _DATA:
        node = opened.get(op.path) or _find(tree, op.path)
        if node is not None and entry:
            _change(node, op)
    elif op.name.startswith("create"):
        opened[op.path] = _create(tree, op, entry=entry)
    elif op.name in ("rename", "exchange"):
        for path in [path for path in opened if _renamed(path, op) is not None]:
            opened[_renamed(path, op) or ""] = opened.pop(path)
        if entry:
            _move(tree, op)
    elif entry:
        _change_entry(tree, op)


def _create(tree: _Node, op: FileOperation, *, entry: bool) -> _Node:
    node = _find(tree, op.path)
    if node is None or op.name == "create_new":
        node = _Node()
        if entry:
            _put(tree, op.path, node)
    elif op.name == "create_empty" and entry:
        node.data.clear()
    return node


def _change(node: _Node, op: FileOperation) -> None:
    if op.name == "truncate":
        del node.data[op.offset :]
        node.data.extend(bytes(max(0, op.offset - len(node.data))))
        return
    at = len(node.data) if op.offset < 0 else op.offset
    node.data.extend(bytes(max(0, at - len(node.data))))
    node.data[at : at + len(op.data)] = op.data


def _move(tree: _Node, op: FileOperation) -> None:
    node, there = _find(tree, op.path), _find(tree, op.other)
    if node is None or (op.name == "exchange" and there is None):
        return
    _drop(tree, op.path)
    if op.name == "exchange" and there is not None:
        _put(tree, op.path, there)
    _put(tree, op.other, node)


def _change_entry(tree: _Node, op: FileOperation) -> None:
    if op.name == "mkdir":
        if _find(tree, op.path) is None:
            _put(tree, op.path, _Node(children={}))
    elif op.name == "symlink":
        _put(tree, op.other, _Node(points_to=op.path))
    elif op.name == "link":
        node = _find(tree, op.path)
        if node is not None:
            _put(tree, op.other, node)
    elif op.name == "unlink" or (op.name == "rmdir" and not _has_entries(_find(tree, op.path))):
        _drop(tree, op.path)  # no disk removes a folder in which something still has a name


def _has_entries(node: _Node | None) -> bool:
    return node is not None and bool(node.children)


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part]


def _find(tree: _Node, path: str) -> _Node | None:
    node: _Node | None = tree
    for part in _parts(path):
        node = (node.children or {}).get(part) if node is not None else None
    return node


def _put(tree: _Node, path: str, node: _Node) -> None:
    *above, name = _parts(path)
    for part in above:
        if tree.children is None:
            return
        tree = tree.children.setdefault(part, _Node(children={}))
    if tree.children is not None:
        tree.children[name] = node


def _drop(tree: _Node, path: str) -> None:
    *above, name = _parts(path)
    folder = _find(tree, "/".join(above))
    if folder is not None and folder.children is not None:
        folder.children.pop(name, None)


def _flatten(tree: _Node, prefix: str = "") -> dict[str, bytes | str | None]:
    found: dict[str, bytes | str | None] = {}
    for name, node in (tree.children or {}).items():
        path = f"{prefix}/{name}"
        if node.children is not None:
            found[path] = None
            found.update(_flatten(node, path))
        else:
            found[path] = node.points_to if node.points_to is not None else bytes(node.data)
    return found
