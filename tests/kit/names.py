"""Where the package gives names, as its source says it, and who gave one while something ran.

A name is given by a rename, a link, an exchange of two names, or what of ``durable`` does one of these. A sweep over all of
them has a row for each function that ``places`` finds, and ``watched`` tells which of these a row came through: so one that is
new, and that no row reaches, is found.
"""

from __future__ import annotations

import ast
import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import safe_ckpt

_SRC = Path(safe_ckpt.__file__).parent
_OF_OS = {"rename", "replace", "renames", "link", "symlink"}
_ALWAYS = {
    "exchange", "renameat2", "publish", "publish_file", "publish_directory", "publish_link", "link_or_copy",
    "link_open_file", "symlink_to", "hardlink_to",
}  # fmt: skip


def gives_a_name(node: ast.AST) -> bool:
    """Whether this is a use of what gives a name: also one that is handed on, and called elsewhere."""
    if isinstance(node, ast.Name):
        return node.id in _ALWAYS - {"publish"}  # of ours, ``publish`` alone is a method
    if isinstance(node, ast.Attribute):
        owner = node.value.id if isinstance(node.value, ast.Name) else ""
        known = {"os": _OF_OS, "shutil": {"move"}, "durable": _ALWAYS}.get(owner, _ALWAYS - {"publish"})
        return node.attr in known
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):  # of a path; text has two arguments there
        one = len(node.args) == 1 and not node.keywords
        return one and node.func.attr in ("rename", "replace", "link_to")
    return False


def removes(node: ast.AST) -> bool:
    """Whether this is a use of what takes a name away, or moves what has one."""
    if gives_a_name(node):
        return True
    if isinstance(node, ast.Attribute):
        return node.attr in ("unlink", "rmdir", "rmtree", "remove_tree", "removedirs", "discard")
    return False


def places(uses: Callable[[ast.AST], bool] = gives_a_name, below: str = "") -> set[str]:
    """The functions of the package, as ``core.home.file_home:FileHome.quarantine``, that use it."""
    found = set()
    for path in sorted((_SRC / below).rglob("*.py")):
        module = ".".join(path.relative_to(_SRC).with_suffix("").parts)
        found |= {f"{module}:{name}" for name in _functions(ast.parse(path.read_bytes()), uses)}
    return found


def _functions(tree: ast.AST, uses: Callable[[ast.AST], bool], above: tuple[str, ...] = ()) -> Iterator[str]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from _functions(node, uses, (*above, node.name))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if any(uses(one) for one in ast.walk(node)):
                yield ".".join((*above, node.name))
        else:
            yield from _functions(node, uses, above)


_EVENTS = {"os.rename": 2, "os.link": 2, "os.symlink": 2, "os.remove": 1, "os.rmdir": 1, "os.mkdir": 1}
_NAMING = ("os.rename", "os.link", "os.symlink")
_heard: list[Callable[[str, tuple[Any, ...]], None]] = []


@contextlib.contextmanager
def hearing(below: Path, action: Callable[[str], None], *, every_thread: bool = False) -> Iterator[None]:
    """Call ``action`` with the event's name before each change of names below a folder, by this thread or by every one.

    These are the interpreter's audit events; what ``action`` does itself is not heard.
    """
    thread, busy = threading.get_ident(), []

    def hear(event: str, args: tuple[Any, ...]) -> None:
        exchanged = event == "ctypes.dlsym" and args[1] == "renameat2"
        if busy or not (every_thread or threading.get_ident() == thread):
            return
        if exchanged or (event in _EVENTS and _is_below(below, args[: _EVENTS[event]])):
            busy.append(event)
            try:
                action("os.rename" if exchanged else event)
            finally:
                busy.clear()

    if not _heard:
        sys.addaudithook(lambda event, args: [one(event, args) for one in _heard[1:]] and None)
        _heard.append(lambda *_: None)  # the hook stays for the life of the process
    _heard.append(hear)
    try:
        yield
    finally:
        _heard.remove(hear)


@contextlib.contextmanager
def watched(below: Path, *, removals: bool = False) -> Iterator[set[str]]:
    """The functions of the package that give a name below a folder, or take one away, and those that call them."""
    reached: set[str] = set()
    kinds = (*_NAMING, "os.remove", "os.rmdir") if removals else _NAMING

    def note(event: str) -> None:
        if event in kinds:
            reached.update(_callers())

    with hearing(below, note, every_thread=True):
        yield reached


def _is_below(folder: Path, names: tuple[Any, ...]) -> bool:
    return any(
        os.path.abspath(os.fsdecode(name)).startswith(f"{folder}/")
        for name in names
        if isinstance(name, str | bytes | Path)
    )


def _callers() -> Iterator[str]:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(_SRC):
            name = getattr(frame.f_code, "co_qualname", frame.f_code.co_name).partition(".<locals>")[0]
            yield f"{'.'.join(path.relative_to(_SRC).with_suffix('').parts)}:{name}"
        frame = frame.f_back
