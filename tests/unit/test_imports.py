import ast
import importlib
import pkgutil
from pathlib import Path

import pytest

from support import run_program, run_script

ROOT = Path(__file__).parents[2]

FRAMEWORKS = ("lightning", "pytorch_lightning", "accelerate", "deepspeed", "transformers", "torchtitan", "ray")


def test_the_package_imports_no_framework():
    """A program that uses plain torch never pays for, or breaks on, a framework it does not use."""
    done = run_program("imports_all_of_the_core", *FRAMEWORKS, fresh=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_the_writer_process_imports_no_torch():
    """The child that writes stays small: it imports neither torch nor numpy."""
    done = run_program("imports_the_writer_process", "torch", "numpy", "yaml", "safetensors", fresh=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_importing_lets_the_collector_rest_and_leaves_it_as_it_was():
    """Neither a collection falls into the first use of a name, nor is a program's own choice changed."""
    done = run_program("imports_beside_a_collector", fresh=True)
    assert not [line for line in done.stderr.splitlines() if "lengthy_timeouts has none" not in line]  # with torch 2.8


def test_unknown_names_are_attribute_errors():
    """A typo in an import fails as it does everywhere."""
    done = run_script("import safe_ckpt; safe_ckpt.Chekpointer", fresh=True)
    assert "AttributeError" in done.stderr


class Imports(ast.NodeVisitor):
    """Module and name of every ``from safe_ckpt... import name`` that runs, in functions as well."""

    def __init__(self):
        self.names = []

    def visit_ImportFrom(self, node):
        if (node.module or "").split(".")[0] == "safe_ckpt":
            self.names += [(node.module, alias.name) for alias in node.names]

    def visit_If(self, node):
        if getattr(node.test, "id", "") != "TYPE_CHECKING":
            self.generic_visit(node)


def imported_of_ours():
    imports = Imports()
    for folder in ("src", "tests", "benchmarks", "examples"):
        for file in (ROOT / folder).rglob("*.py"):
            imports.visit(ast.parse(file.read_text(encoding="utf-8")))
    return set(imports.names)


def exists(module, name):
    home = importlib.import_module(module)
    return hasattr(home, name) or name in {info.name for info in pkgutil.iter_modules(getattr(home, "__path__", ()))}


@pytest.mark.slow
def test_every_import_of_ours_finds_its_name():
    """An import in a function, or of a lazy name, that leads nowhere is found here and not by a user; mypy does not see it."""
    elsewhere = (
        "safe_ckpt.deepspeed",
        "safe_ckpt.torchtitan",
        "safe_ckpt.ray",
    )  # what they derive from may not be installed
    asked = {pair for pair in imported_of_ours() if not pair[0].startswith(elsewhere)}
    assert len(asked) > 400
    assert [pair for pair in sorted(asked) if not exists(*pair)] == []
