"""The shape of the tree: what a reader can hold in the head."""

import ast
from pathlib import Path

import pytest

import safe_ckpt

TESTS = Path(__file__).parents[1]
SOURCES = Path(safe_ckpt.__file__).parent
MODULES, LINES, TEST_LINES = 13, 420, 600


def named(paths, below):
    return {path.relative_to(below).as_posix() for path in paths}


def too_long(folder, most, pattern="*.py"):
    files = [file for file in folder.rglob(pattern) if len(file.read_text(encoding="utf-8").splitlines()) > most]
    return named(files, folder)


def imported_by(file):
    """The modules that a file imports, in functions as well."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module


def offenders(rule):
    if rule == "modules":
        folders = [folder for folder in SOURCES.rglob("*") if folder.is_dir()]
        return named([f for f in folders if len(set(f.glob("*.py")) - {f / "__init__.py"}) > MODULES], SOURCES)
    if rule == "lines of source":
        return too_long(SOURCES, LINES)
    if rule == "lines of tests":
        return too_long(TESTS, TEST_LINES)
    if rule == "rooms":
        rooms = {folder.name for folder in (*SOURCES.iterdir(), *(SOURCES / "core").iterdir())}
        return {folder.name for folder in (TESTS / "unit").iterdir() if folder.is_dir()} - rooms - {"__pycache__"}
    files = [f for f in TESTS.rglob("*.py") if any(n.rpartition(".")[2].startswith("test_") for n in imported_by(f))]
    return named(files, TESTS)


@pytest.mark.parametrize("rule", ["modules", "lines of source", "lines of tests", "rooms", "imports"])
def test_the_tree_keeps_its_shape(rule):
    """At most 13 modules a folder, 420 lines each, 600 a test; unit tests lie as the rooms do; no test imports another."""
    assert offenders(rule) == set()


def test_locks_can_be_taken_again_by_their_thread():
    """A signal's handler saves on the thread that it interrupts: a lock that this thread holds would never come free."""
    lines = [
        f"{file.relative_to(SOURCES)}:{number}"
        for file in SOURCES.rglob("*.py")
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if "threading.Lock()" in line and "# not reentrant: " not in line
    ]
    assert lines == []
