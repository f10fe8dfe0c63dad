"""The texts that stand with the settings: below each field, and the first paragraph of each class."""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from collections.abc import Iterator, Mapping

from safe_ckpt.settings.fields import fields_of, is_section


def summary(section: type) -> str:
    """The first paragraph of a dataclass's docstring, on one line."""
    return _on_one_line(inspect.cleandoc(section.__doc__ or "").partition("\n\n")[0])


def meanings(section: type) -> dict[str, str]:
    """The meaning of each field of a dataclass, in the order of the fields; of a section, what its class says."""
    below = _below_fields(section.__module__).get(section.__name__, {})
    return {
        name: summary(key.kind) if is_section(key.kind) else below.get(name, "")
        for name, key in fields_of(section).items()
    }


def option(section: type, name: str) -> str:
    """The same of one field, for the ``--help`` of a command."""
    return meanings(section)[name].replace("`", "")


def complete_docstring(section: type) -> None:
    """Add what the fields mean to the docstring of a dataclass, and of those within it, as ``Attributes:``.

    The ``--help`` of LightningCLI has its texts from there, and knows of no others.
    """
    doc = inspect.cleandoc(section.__doc__ or "")
    if "\nAttributes:\n" not in doc:
        lines = "".join(f"    {name}: {text}\n" for name, text in meanings(section).items())
        section.__doc__ = f"{doc}\n\nAttributes:\n{lines}"
    for key in fields_of(section).values():
        if is_section(key.kind):
            complete_docstring(key.kind)


@functools.cache
def _below_fields(module: str) -> Mapping[str, Mapping[str, str]]:
    """By class and field: the string that follows the field in the source. Python itself keeps it nowhere."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, TypeError):  # where a program was packed without its sources
        return {}
    return {node.name: dict(_strings(node)) for node in tree.body if isinstance(node, ast.ClassDef)}


def _strings(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for field, below in zip(node.body, node.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(below, ast.Expr):
            text = below.value
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                yield field.target.id, _on_one_line(text.value)


def _on_one_line(text: str) -> str:
    return " ".join(text.split()).replace("``", "`")
