"""The shape of the tree: what a reader can hold in the head. The lists of exceptions only get shorter."""

import ast
from pathlib import Path

import pytest

import safe_ckpt

TESTS = Path(__file__).parents[1]
SOURCES = Path(safe_ckpt.__file__).parent
MODULES, LINES, TEST_LINES = 13, 420, 600

FOLDERS_TOO_FULL: set[str] = set()
SOURCES_TOO_LONG: set[str] = set()
TESTS_TOO_LONG = {
    "adapters/test_accelerate_saves.py",
    "adapters/test_deepspeed_engine.py",
    "adapters/test_lightning_saves.py",
    "unit/test_checkpointer.py",
}
IMPORT_TESTS = {
    "adapters/test_deepspeed_frameworks.py",
    "adapters/test_deepspeed_trainer.py",
    "adapters/test_lightning_fsdp2.py",
    "adapters/test_transformers_fsdp2.py",
    "adapters/test_transformers_trl.py",
    "faults/test_hosts_entries.py",
    "faults/test_outages.py",
    "unit/test_checkpointer.py",
    "unit/test_root.py",
}


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
    if rule == "folders":
        folders = [folder for folder in SOURCES.rglob("*") if folder.is_dir()]
        return named([f for f in folders if len(set(f.glob("*.py")) - {f / "__init__.py"}) > MODULES], SOURCES)
    if rule == "sources":
        return too_long(SOURCES, LINES)
    if rule == "tests":
        return too_long(TESTS, TEST_LINES)
    files = [f for f in TESTS.rglob("*.py") if any(n.rpartition(".")[2].startswith("test_") for n in imported_by(f))]
    return named(files, TESTS)


@pytest.mark.parametrize(
    ("rule", "excepted"),
    [
        ("folders", FOLDERS_TOO_FULL),
        ("sources", SOURCES_TOO_LONG),
        ("tests", TESTS_TOO_LONG),
        ("imports", IMPORT_TESTS),
    ],
)
def test_the_tree_keeps_its_shape(rule, excepted):
    """At most 13 modules a folder, 420 lines a module, 600 lines a test; no test imports another. What is excepted exists."""
    found = offenders(rule)
    assert sorted(found - excepted) == []
    assert sorted(excepted - found) == [], "no exception any more: take it off the list"
