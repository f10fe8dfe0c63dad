"""What a contract with a framework says, and a look through our sources for private parts that no contract covers."""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

SOURCES = Path(__file__).resolve().parents[2] / "src" / "safe_ckpt"
OURS = {
    **dict.fromkeys(["_safe_ckpt", "_data_place"], "ours, on a framework's objects"),
    **dict.fromkeys(["_getframe", "_exit", "_codecs", "_abc_impl", "_popen"], "CPython's"),
    **dict.fromkeys(
        ["_attach", "_call", "_leave", "_refuse_ended", "_undo", "_whole_or_nothing"],
        "ours, of ``AttachedHandle``, for the handles that are made of it",
    ),
    **dict.fromkeys(
        [
            "_begin",
            "_end",
            "_place",
            "_found",
            "_take_back_draws",
            "_own_process",
            "_left",
            "_inner",
            "_given",
            "_pending",
        ],
        "of data/loader.py and data/workers.py, asked by the other modules of data",
    ),
    **dict.fromkeys(
        ["_discard_each", "_lease", "_lease_s", "_period_s"],
        "of core/home, of what files and objects there derive from",
    ),
    "_is_in_bad_fork": "of torch's module for a device type, where that has it: tests/unit/test_devices.py",
    "_reconstruct": "the name by which numpy pickles arrays; torch_reading asks numpy for the function",
    "_asked_in_vain": "of data/loader.py",
    "_detach": "of adapters/handle.py",
    "_engine": "of Checkpointer, for ray/worker.py, which derives from it",
    "_lock": "of hooks/event_log.py",
    **dict.fromkeys(["_total", "_result", "_s", "_bytes", "_steps"], "ends of names"),
}
"""Private names that are no framework's -> whose they are."""
_NEVER_THEIRS = {*sys.stdlib_module_names, "safe_ckpt", "typing_extensions"}


@dataclass(frozen=True)
class Part:
    """A part of a framework that it does not promise.

    Attributes:
        owner: the class, module or object that has it.
        name: of the attribute.
        used_by: our file, within ``src/safe_ckpt``.
        use: what for.
        arguments: the names of its leading arguments; None where it is no function.
        optional: whether we do without it in the releases that have none.
    """

    owner: Any
    name: str
    used_by: str
    use: str
    arguments: tuple[str, ...] | None = None
    optional: bool = False

    def __str__(self) -> str:
        owner = getattr(self.owner, "__name__", type(self.owner).__name__)
        return f"{owner}.{self.name}"

    def check(self) -> None:
        """It is there and takes what we give it."""
        if self.optional and not hasattr(self.owner, self.name):
            pytest.skip(f"this release has no {self}")
        told = f"{self} has changed. safe_ckpt/{self.used_by} relies on it: {self.use}"
        assert hasattr(self.owner, self.name), told
        if self.arguments is not None:
            found = tuple(inspect.signature(getattr(self.owner, self.name)).parameters)
            assert found[: len(self.arguments)] == self.arguments, f"{told}. It takes {found} now"
        assert f"{self.name}" in (SOURCES / self.used_by).read_text(encoding="utf-8"), f"{self} is not used any more"


def private_names(*folders: str, but: tuple[str, ...] = ()) -> dict[str, str]:
    """Private names in our sources below ``folders`` that our own modules do not define -> where the first use is.

    What is asked of ``super()`` is theirs, whatever we define.

    Args:
        folders: below ``src/safe_ckpt``.
        but: the folders that are left out.
    """
    found: dict[str, str] = {}
    for path in sorted({path for folder in folders for path in (SOURCES / folder).rglob("*.py")}):
        if any(path.is_relative_to(SOURCES / folder) for folder in but):
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        own = _own(tree)
        pieces = {piece for text in ast.walk(tree) if isinstance(text, ast.JoinedStr) for piece in text.values}
        for node in ast.walk(tree):
            if node in pieces:
                continue
            theirs = isinstance(node, ast.Attribute) and ast.unparse(node.value) == "super()"
            for name in _mentioned(node):
                if _is_private(name) and name not in OURS and (theirs or name not in own):
                    found.setdefault(name, f"{path.relative_to(SOURCES)}:{getattr(node, 'lineno', 0)}")
    return found


def overridden(*folders: str) -> dict[str, str]:
    """Private names of other packages' classes that our classes below ``folders`` define, too -> our class."""
    found: dict[str, str] = {}
    for path in sorted(path for folder in folders for path in (SOURCES / folder).rglob("*.py")):
        name = ".".join(("safe_ckpt", *path.relative_to(SOURCES).with_suffix("").parts)).removesuffix(".__init__")
        if name.endswith("__main__"):
            continue
        for kind in vars(importlib.import_module(name)).values():
            if not inspect.isclass(kind) or kind.__module__ != name:
                continue
            theirs = [parent for parent in kind.__mro__ if parent.__module__.partition(".")[0] not in _NEVER_THEIRS]
            for part in vars(kind):
                if _is_private(part) and part not in OURS and any(part in vars(parent) for parent in theirs):
                    found[part] = f"{name}.{kind.__qualname__}"
    return found


def _is_private(name: str) -> bool:
    return name.isidentifier() and name[0] == "_" and name[1:2].isalpha()


def _own(tree: ast.Module) -> set[str]:
    own: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            own.add(node.attr)
    return own


def _mentioned(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Attribute):
        return [node.attr]
    if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("safe_ckpt"):
        return [*(node.module or "").split("."), *(alias.name for alias in node.names)]
    if isinstance(node, ast.Constant) and isinstance(node.value, str):  # getattr, stand-ins, tables of names
        return [node.value]
    return []


def unlisted(package: str, parts: list[Part]) -> dict[str, Any]:
    """The private parts of a framework that the sources use, and that no contract of ``parts`` covers."""
    known = {part.name for part in parts}
    found = private_names(package) | overridden(package)
    return {name: where for name, where in found.items() if name not in known}
