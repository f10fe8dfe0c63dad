"""What a test starts beside itself: a mark for each kind, found in its code and in that of its fixtures.

``marks_of`` follows the names that a function uses, through helpers of the tests, to what starts a server, a host, ranks or a
framework. Names that come in another way, such as ``request.getfixturevalue``, are not seen: such a test gets its mark by hand.
In ``pytest --quick`` what starts any of these fails with ``StartedError``, so a test without its mark is found.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import importlib
import inspect
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

TESTS = Path(__file__).parents[1]
_FORBIDDEN = "KIT_STARTS_NOTHING"  # no name that a page's environment leaves out: what pages start is meant, too
# Of the kit and of conftest.py: the module and the name -> what that starts.
STARTERS = {
    ("kit.object_servers", "start"): "server",
    ("kit.hosts", "Hosts"): "hosts",
    ("kit.slurm", "one_node"): "hosts",
    ("kit.disks", "small_disk"): "hosts",
    ("kit.ranks", "spawn_ranks"): "ranks",
    ("kit.ranks", "spawn_over"): "ranks",
}
_PROGRAMS = {program.stem: program for program in (TESTS / "programs").rglob("*.py")}
_WORDS = {"mount": "hosts", "unshare": "hosts", "torch.distributed.run": "ranks", "torchrun": "ranks"}
"""Literals of a test's code, such as parts of a command."""
_ON_PAGES = {
    "server": ("object_servers",),
    "ranks": ("torchrun", "torch.distributed.run"),
    "framework": ("lightning", "accelerate", "transformers", "peft"),
}
_FRAMEWORKS = {"lightning", "pytorch_lightning", "accelerate", "transformers", "peft", "deepspeed", "torchtitan", "ray"}
_FOLDERS = {"multirank": "ranks", "adapters": "framework", "faults": "faults", "schedulers": "hosts"}
_SLOW_FROM_S = 600
# The tests of the README's promises: quick ones, although they start ranks and mount a disk.
PROMISES = "multirank/test_promises.py"
NOT_QUICK = ("server", "hosts", "ranks", "framework", "faults", "slow")


class StartedError(AssertionError):
    """A quick test started what it must not: let it use a fixture or a helper of the kit that ``kinds.py`` knows."""


def starting(kind: str) -> None:
    """Called by what starts something. Raises StartedError within a quick test."""
    if os.environ.get(_FORBIDDEN):
        raise StartedError(
            f"this test runs in `make test` and starts: {kind}. It needs that mark: see tests/kit/kinds.py"
        )


@contextlib.contextmanager
def starts_nothing() -> Iterator[None]:
    """Within, ``starting`` raises, in this process and in those that are started meanwhile."""
    before = os.environ.get(_FORBIDDEN)
    os.environ[_FORBIDDEN] = "1"
    try:
        yield
    finally:
        os.environ.pop(_FORBIDDEN)
        if before is not None:
            os.environ[_FORBIDDEN] = before


def is_promise(item: Any) -> bool:
    """Whether an item is a test of one of the README's promises."""
    return bool(item.path == TESTS / PROMISES)


def is_quick(item: Any) -> bool:
    """Whether an item that has its marks is run by ``pytest --quick``.

    The mark ``quick`` is for a test of a folder of frameworks or ranks that does all in this process, in about a second.
    """
    left_out = {name for name in NOT_QUICK if item.get_closest_marker(name)}
    asked = bool(item.get_closest_marker("quick")) and left_out <= {"framework", "ranks"}
    return is_promise(item) or asked or not left_out


def marks_of_item(item: Any) -> set[str]:
    """The marks of a test by its folder, its time limit, its code, and that of its fixtures."""
    found = set()
    with contextlib.suppress(ValueError):
        found |= {_FOLDERS.get(item.path.relative_to(TESTS).parts[0], "")} - {""}
    limit = item.get_closest_marker("timeout")
    if limit and limit.args[0] >= _SLOW_FROM_S:
        found.add("slow")
    definitions = item._fixtureinfo.name2fixturedefs
    fixtures = [one.func for name in item.fixturenames for one in definitions.get(name, ())]
    return found.union(*map(marks_of, [item.function, *fixtures]))


def marks_of_text(text: str) -> set[str]:
    """The marks of a test that runs this text: the blocks of a page."""
    return {mark for mark, words in _ON_PAGES.items() if any(word in text for word in words)}


@functools.cache
def marks_of(function: Any) -> frozenset[str]:
    """The marks of whatever a function uses."""
    found, seen, left = set(), set(), [function]
    while left:
        one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        place = (str(getattr(one, "__module__", "")), str(getattr(one, "__qualname__", "")))
        name = one.__name__ if isinstance(one, ModuleType) else place[0]
        if place in STARTERS:
            found.add(STARTERS[place])
        elif name.partition(".")[0] in _FRAMEWORKS:
            found.add("framework")
        elif isinstance(one, type) and not place[0].startswith("kit."):
            left += [getattr(part, "fget", getattr(part, "__func__", part)) for part in vars(one).values()]
        else:
            inner = _function_of(one)
            if inner is not None:
                found |= _words_in(inner.__code__)
                left += _used_by(inner)
    return frozenset(found)


def _function_of(one: Any) -> FunctionType | None:
    """The function of the tests behind decorators; None for what is none, and for what the kit has."""
    with contextlib.suppress(ValueError, AttributeError):
        one = getattr(getattr(one, "hypothesis", None), "inner_test", one)
        one = inspect.unwrap(one)
    if not isinstance(one, FunctionType):
        return None
    file = Path(one.__code__.co_filename)
    return one if file.is_relative_to(TESTS) and not file.is_relative_to(TESTS / "kit") else None


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _codes(inner)


def _used_by(function: FunctionType) -> Iterator[Any]:
    """What the names in a function mean: globals, what modules of the tests have, and what it imports itself."""
    for code in _codes(function.__code__):
        here = [function.__globals__[name] for name in code.co_names if name in function.__globals__]
        imported = [step.argval for step in dis.get_instructions(code) if step.opname == "IMPORT_NAME"]
        here += [importlib.import_module(name) for name in imported if name.partition(".")[0] == "kit"]
        yield from (ModuleType(name) for name in imported if name.partition(".")[0] in _FRAMEWORKS)
        seen: list[Any] = []
        while here:
            one = here.pop()
            if any(one is other for other in seen):
                continue
            seen.append(one)
            if isinstance(one, ModuleType) and Path(getattr(one, "__file__", None) or "").is_relative_to(TESTS):
                _import_parts(one, code.co_names)
                here += [vars(one)[name] for name in code.co_names if name in vars(one)]
        yield from seen


def _import_parts(module: ModuleType, names: Iterable[str]) -> None:
    """Have the kit's modules of these names, whether another test that was collected has imported them or not."""
    for name in names if module.__name__ == "kit" else ():
        if (TESTS / "kit" / f"{name}.py").exists():
            importlib.import_module(f"kit.{name}")


def _words_in(code: CodeType) -> set[str]:
    found = set()
    texts = [const for one in _codes(code) for const in _flat(one.co_consts) if isinstance(const, str)]
    for text in texts:
        found |= {_WORDS[text]} if text in _WORDS else set()
        if (program := _PROGRAMS.get(text.removesuffix(".py"))) is not None:
            found |= marks_of_text(program.read_text(encoding="utf-8"))
    return found


def _flat(consts: Iterable[Any]) -> Iterator[Any]:
    for one in consts:
        if isinstance(one, tuple):
            yield from _flat(one)
        else:
            yield one
