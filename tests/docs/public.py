"""What is public, as the documentation has it: read from the source by griffe, which imports nothing."""

from __future__ import annotations

import functools
import re
import textwrap

import griffe
from blocks import ROOT

PAGES = ROOT / "docs/api"
_DIRECTIVE = re.compile(r"^::: ([\w.]+)$", re.MULTILINE)
_EXAMPLE = re.compile(r"^ *Example:\n((?:\n| {4}.*\n?)+)", re.MULTILINE)
# Helpers of adapters in modules below their packages, for their own use.
_INNER = ("safe_ckpt.lightning.checkpoint_io", "safe_ckpt.adapters.spool", "safe_ckpt.adapters.pickles")
# Of these every public class is meant, as they have no ``__all__``.
WHOLE = ("safe_ckpt.errors", "safe_ckpt.events")


@functools.cache
def package() -> griffe.Object:
    """The package."""
    found = griffe.load("safe_ckpt", search_paths=[ROOT / "src"], allow_inspection=False)
    assert isinstance(found, griffe.Object)
    return found


def exported() -> dict[str, griffe.Object]:
    """Every class and function of the ``__all__``s, by the name under which it is imported."""
    found: dict[str, griffe.Object] = {}
    _collect(package(), found)
    return found


def _collect(module: griffe.Object, found: dict[str, griffe.Object]) -> None:
    if module.path not in _INNER:
        for name in map(str, module.exports or ()):
            one = module.members[name]
            one = one.final_target if isinstance(one, griffe.Alias) else one
            if one.is_module and name in one.members:  # a function in a module of its name
                one = one.members[name]
            if one.is_class or one.is_function:
                found[f"{module.path}.{name}"] = one
    for member in module.members.values():
        if not member.is_alias and member.is_module:
            _collect(member, found)


def classes_of(path: str) -> dict[str, griffe.Object]:
    """The public classes that a module defines."""
    module = package()[path.removeprefix("safe_ckpt.")]
    return {
        one.path: one for one in module.members.values() if not one.is_alias and one.is_class and one.name[0].isupper()
    }


def on_pages() -> dict[str, str]:
    """The paths of what the pages of the API name, of a module its classes -> the page."""
    found: dict[str, str] = {}
    for page in sorted(PAGES.glob("*.md")):
        for name in _DIRECTIVE.findall(page.read_text(encoding="utf-8")):
            one = package()[name.removeprefix("safe_ckpt.")]
            one = one.final_target if isinstance(one, griffe.Alias) else one
            found |= dict.fromkeys(classes_of(name) if one.is_module else [one.path], page.name)
    return found


def public() -> dict[str, griffe.Object]:
    """What the ``__all__``s and the modules without one have, each once, by the name under which it is imported."""
    whole = {name: one for path in WHOLE for name, one in classes_of(path).items()}
    first: dict[str, tuple[str, griffe.Object]] = {}
    for name, one in {**exported(), **whole}.items():
        first.setdefault(one.path, (name, one))
    return dict(first.values())


def with_examples() -> dict[str, str]:
    """Everything that has a docstring with an ``Example:``, methods included, and that section."""
    found: dict[str, str] = {}
    for name, one in public().items():
        for part in (one, *(m for m in one.members.values() if not m.is_alias)):
            text = example_of(part)
            if text:
                found[name if part is one else f"{name}.{part.name}"] = text
    return found


def example_of(one: griffe.Object) -> str:
    """The ``Example:`` of a docstring, dedented; "" for none."""
    section = _EXAMPLE.search(one.docstring.value + "\n") if one.docstring else None
    return textwrap.dedent(section.group(1)) if section else ""
