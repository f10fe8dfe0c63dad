"""Paths, open files and entries of the simulated processes, and what each call of the disk begins with.

Descriptors below ``FIRST`` are real: those of anonymous memory, which is no part of the disk.
"""

from __future__ import annotations

import errno
import os as real_os
from collections.abc import Callable, Iterator
from typing import Any

from sim.disk import Node, fail
from sim.world import here

FIRST = 1_000_000


class Open:
    """An open file."""

    __slots__ = ("at", "flags", "node", "path", "wrote")

    def __init__(self, node: Node, flags: int, path: str) -> None:
        self.node, self.flags, self.path, self.at, self.wrote = node, flags, path, 0, False


class Entry:
    """See ``os.DirEntry``."""

    def __init__(self, folder: str, name: str, node: Node) -> None:
        self.name, self.path, self._node = name, f"{folder}/{name}" if folder else name, node

    def __fspath__(self) -> str:
        return self.path

    def inode(self) -> int:
        """See ``os.DirEntry``."""
        return self._node.number

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        """See ``os.DirEntry``."""
        node = follow(self._node, self.path) if follow_symlinks else self._node
        return node is not None and node.kind == "folder"

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        """See ``os.DirEntry``."""
        node = follow(self._node, self.path) if follow_symlinks else self._node
        return node is not None and node.kind == "file"

    def is_symlink(self) -> bool:
        """See ``os.DirEntry``."""
        return self._node.kind == "link"

    def stat(self, *, follow_symlinks: bool = True) -> Any:
        """See ``os.DirEntry``."""
        node = follow(self._node, self.path) if follow_symlinks else self._node
        if node is None:
            raise fail(errno.ENOENT, self.path)
        return node.status()


class Scan:
    def __init__(self, entries: list[Entry]) -> None:
        self._entries = iter(entries)

    def __enter__(self) -> Iterator[Entry]:
        return self._entries

    def __exit__(self, *_: object) -> None:
        pass

    def __iter__(self) -> Iterator[Entry]:
        return self._entries

    def __next__(self) -> Entry:
        return next(self._entries)

    def close(self) -> None:
        pass


def text_of(path: Any) -> str:
    return real_os.fsdecode(real_os.fspath(path))


def parts_of(path: str) -> list[str]:
    parts: list[str] = []
    for part in path.split("/"):
        if part == "..":
            if parts:
                parts.pop()
        elif part not in ("", "."):
            parts.append(part)
    return parts


def open_files() -> dict[int, Open]:
    return here().proc.facts.setdefault("fds", {})  # type: ignore[no-any-return]


def descriptor(fd: int) -> Open:
    opened = open_files().get(fd)
    if opened is None:
        raise fail(errno.EBADF)
    return opened


def follow(node: Node | None, path: str, depth: int = 0) -> Node | None:
    """What a link leads to."""
    while node is not None and node.kind == "link":
        if depth > 20:
            raise fail(errno.ELOOP, path)
        base = path.rpartition("/")[0]
        path = node.target if node.target.startswith("/") else f"{base}/{node.target}"
        folder, name = folder_of(path, None, depth + 1)
        node, depth = (folder.children.get(name) if name else folder), depth + 1
    return node


def folder_of(path: str, dir_fd: int | None, depth: int = 0) -> tuple[Node, str]:
    """The folder in which the last part of a path lies, and that part."""
    node = here().world.disk.root
    if dir_fd is not None and dir_fd >= 0 and not path.startswith("/"):
        node = descriptor(dir_fd).node
    parts, walked = here().world.located(parts_of(path)), ""
    for part in parts[:-1]:
        child = node.children.get(part)
        walked = f"{walked}/{part}"
        child = follow(child, walked, depth)
        if child is None:
            raise fail(errno.ENOENT, path)
        if child.kind != "folder":
            raise fail(errno.ENOTDIR, path)
        node = child
    return node, parts[-1] if parts else ""


def begin_call(name: str, path: object = None) -> Callable[[], None]:
    """What every call of the disk begins with. Returns what it ends with."""
    task = here()
    return task.world.mounts.enter(task, name, path)  # type: ignore[no-any-return]


def kernel_text(path: str) -> bytes | None:
    """The text of a file of the kernel's; None if there is none of that name."""
    task = here()
    if path == "/proc/sys/kernel/random/boot_id":
        return f"boot-{task.proc.host.number}-{task.proc.host.boot}\n".encode()
    parts = path.split("/")
    if len(parts) == 4 and parts[3] == "stat":
        number = task.proc.pid if parts[2] == "self" else int(parts[2]) if parts[2].isdigit() else -1
        for proc in task.proc.host.procs:
            if proc.pid == number and proc.alive:
                fields = ["T" if proc.paused else "S", *["0"] * 18, str(int(proc.started * 100))]
                return f"{number} (python) {' '.join(fields)} 0 0\n".encode()
    return None


def is_kernels(path: str) -> bool:
    return path.startswith(("/proc/", "/sys/", "/dev/"))
