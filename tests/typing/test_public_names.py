"""Every public name can be found, says what it is for, and has all of its types. Read from the sources: nothing is imported."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import safe_ckpt

SOURCES = Path(safe_ckpt.__file__).parent
MODULES = ("", "lightning", "accelerate", "deepspeed", "transformers", "torchtitan", "ray")


def parsed(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def homes(module):
    """Each imported name of a package -> the file that defines it, imports for type checkers included."""
    return {
        alias.asname or alias.name: SOURCES.joinpath(*node.module.split(".")[1:]).with_suffix(".py")
        for node in ast.walk(parsed(SOURCES / module / "__init__.py"))
        if isinstance(node, ast.ImportFrom) and node.module.startswith("safe_ckpt.")
        for alias in node.names
    }


def public_names(module):
    (names,) = (
        ast.literal_eval(node.value)
        for node in parsed(SOURCES / module / "__init__.py").body
        if isinstance(node, ast.Assign) and node.targets[0].id == "__all__"
    )
    return [name for name in names if name != "__version__"]


PUBLIC = [(module, name) for module in MODULES for name in public_names(module)]


@pytest.mark.parametrize(("module", "name"), PUBLIC, ids=lambda value: value or "safe_ckpt")
def test_a_public_name_is_documented_and_typed(module, name):
    """Its docstring and those of its public methods; the types of all arguments, results and fields."""
    found = [node for node in parsed(homes(module)[name]).body if getattr(node, "name", None) == name]
    assert found, f"{name} is not defined where it is said to be"
    assert lacking(found[0], name) == []


def test_a_public_name_without_docstring_or_types_is_noticed():
    """The test above can fail."""
    code = """
class A:
    field = 1
    def method(self, a, *b: int, c: int = 1) -> None:
        "Said."
    @property
    def value(self) -> int: ...
"""
    assert lacking(ast.parse(code).body[0], "A") == ["A: docstring", "A.method: a", "A.value: docstring"]


def lacking(node, name):
    """What is missing, in words."""
    missing = [] if ast.get_docstring(node) else [f"{name}: docstring"]
    if isinstance(node, ast.ClassDef):
        for part in node.body:
            if isinstance(part, ast.FunctionDef) and not part.name.startswith("_"):
                missing += lacking(part, f"{name}.{part.name}")
            elif isinstance(part, ast.FunctionDef):
                missing += untyped(part, f"{name}.{part.name}")
        return missing
    return missing + untyped(node, name)


def untyped(node, name):
    """The arguments without a type, and the result."""
    taken = node.args
    every = [*taken.posonlyargs, *taken.args, *taken.kwonlyargs, taken.vararg, taken.kwarg]
    bare = [one.arg for one in every if one is not None and one.annotation is None and one.arg not in ("self", "cls")]
    return [f"{name}: {arg}" for arg in bare] + ([] if node.returns is not None else [f"{name}: its result"])
