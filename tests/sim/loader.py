"""Executes the real modules once per simulated process, with the shims in place of what would reach the machine.

A slot has modules of its own: ``safe_ckpt`` and those of the standard library that touch files, threads or processes. A process
that starts gets a slot whose modules are as they were right after they were executed. What is loaded costs half a second, so
slots are used again, by one process after the other.
"""

from __future__ import annotations

import builtins
import copy
import importlib
import importlib.util
import sys
import types
import typing
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sim import objects
from sim.shims import children, clocks, machine, network, posix_calls, streams, threads
from sim.world import hub

SOURCES = Path(__file__).parents[2] / "src"
_EXECUTED = (
    "os",
    "posixpath",
    "genericpath",
    "glob",
    "pathlib",
    "shutil",
    "concurrent",
    "tempfile",
    "zipfile",
    "safe_ckpt",
)
_STATEFUL = (dict, list, set, deque, weakref.WeakSet, weakref.WeakKeyDictionary, weakref.WeakValueDictionary)
_KEPT = ("versions",)
"""What is remembered of the installation, which no process changes; looking it up takes milliseconds."""
_compiled: dict[tuple[str, str], types.CodeType] = {}
Patch = Callable[[str], str]


class Table(dict[str, Any]):
    """A slot's ``sys.modules``: its own, and behind them the real ones."""

    def __missing__(self, name: str) -> Any:
        return sys.modules[name]

    def get(self, name: str, default: Any = None) -> Any:
        """See ``dict``."""
        return self[name] if name in self else default  # noqa: SIM401 - that would call this

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in sys.modules


class Slot:
    """The modules of one process at a time.

    Args:
        patches: planted bugs: modules to what changes their source.
    """

    def __init__(self, patches: Mapping[str, Patch] | None = None) -> None:
        self.table = Table()
        self._patches = patches or {}
        self._pristine: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._state: list[tuple[Any, Any]] = []
        self._renewing: list[Callable[[], None]] = []
        self._seen: set[int] = set()
        self._known_hints: dict[Any, Any] = {}
        self._builtins = dict(vars(builtins))
        self._builtins["__import__"] = self._import
        self._builtins["open"] = streams.open_file
        for part in (threads, posix_calls, streams, clocks, machine, network, objects):
            self.table.update(part.modules())
        self.table.update(children.modules(self.table["socket"], self.table["subprocess"]))
        fake_sys = types.ModuleType("sys")
        vars(fake_sys).update(vars(sys))
        fake_sys.modules = self.table  # type: ignore[attr-defined]
        fake_importlib = types.ModuleType("importlib")
        vars(fake_importlib).update(vars(importlib))
        fake_importlib.import_module = self.load  # type: ignore[attr-defined]
        fake_typing = types.ModuleType("typing")
        vars(fake_typing).update(vars(typing))
        fake_typing.get_type_hints = self._hints  # type: ignore[attr-defined]
        self.table.update({"sys": fake_sys, "importlib": fake_importlib, "typing": fake_typing})
        self.load("os")

    def load(self, name: str, package: str | None = None) -> Any:
        """A module as this slot has it."""
        del package
        if dict.__contains__(self.table, name):
            return dict.__getitem__(self.table, name)
        if name.partition(".")[0] not in _EXECUTED:
            return importlib.import_module(name)
        above, _, last = name.rpartition(".")
        if above:
            self.load(above)
            if dict.__contains__(self.table, name):
                return self.table[name]
        module = self._execute(name)
        if above:
            setattr(self.table[above], last, module)
        return module

    def _execute(self, name: str) -> types.ModuleType:
        file = _file_of(name)
        module = types.ModuleType(name)
        is_package = file.name == "__init__.py"
        facts = {"__file__": str(file), "__builtins__": self._builtins}
        facts["__package__"] = name if is_package else name.rpartition(".")[0]
        vars(module).update(facts)
        if is_package:
            module.__path__ = [str(file.parent)]
        self.table[name] = module
        before, task, loading = sys.modules.get(name), hub.task, hub.loading
        sys.modules[name] = module  # dataclasses look here for what an annotation means
        hub.task, hub.loading = None, True
        try:
            exec(self._code(name, file), vars(module))
        except BaseException:
            del self.table[name]
            raise
        finally:
            hub.task, hub.loading = task, loading
            if before is not None:
                sys.modules[name] = before
            else:
                sys.modules.pop(name, None)
        self._remember(name, module)
        return module

    def _code(self, name: str, file: Path) -> types.CodeType:
        patch = self._patches.get(name)
        text = file.read_text(encoding="utf-8") if patch or (name, "") not in _compiled else ""
        if patch is not None:
            changed = patch(text)
            if changed == text:
                raise ValueError(f"the planted bug does not fit {name} any more")
            return compile(changed, str(file), "exec")
        if (name, "") not in _compiled:
            _compiled[name, ""] = compile(text, str(file), "exec")
        return _compiled[name, ""]

    def _import(
        self,
        name: str,
        globals: Mapping[str, Any] | None = None,  # noqa: A002
        locals: Any = None,  # noqa: A002
        fromlist: Any = (),
        level: int = 0,
    ) -> Any:
        if level:
            package = (globals or {})["__package__"].split(".")
            base = ".".join(package[: len(package) - level + 1])
            name = f"{base}.{name}" if name else base
        ours = dict.__contains__(self.table, name) or name.partition(".")[0] in _EXECUTED
        if not ours:
            return builtins.__import__(name, globals, locals, fromlist, 0)
        module = self.load(name)
        if not fromlist:
            return self.load(name.partition(".")[0])
        for one in fromlist:
            if one != "*" and not hasattr(module, one) and hasattr(module, "__path__"):
                try:
                    setattr(module, one, self.load(f"{name}.{one}"))  # also if it was loaded before a renewal
                except FileNotFoundError as error:
                    raise ImportError(f"cannot import {one} from {name}") from error
        return module

    def _hints(self, one: Any, globalns: Any = None, localns: Any = None, include_extras: bool = False) -> Any:
        if one not in self._known_hints:
            home = self.table.get(getattr(one, "__module__", ""))
            hints = typing.get_type_hints(one, globalns or vars(home), localns, include_extras)
            self._known_hints[one] = hints
        return dict(self._known_hints[one])

    def _remember(self, name: str, module: types.ModuleType) -> None:
        facts = dict(vars(module))
        for key, value in facts.items():
            if key.startswith("__"):
                continue
            if isinstance(value, _STATEFUL) and id(value) not in self._seen:
                self._seen.add(id(value))
                self._state.append((value, copy.copy(value)))
            elif isinstance(value, (threads.Lock, threads.Condition, threads.Event)):
                self._renewing.append(value.reset)
            elif key not in _KEPT and hasattr(value, "cache_clear") and hasattr(value, "cache_info"):
                self._renewing.append(value.cache_clear)
        self._pristine.append((vars(module), facts))

    def renew(self) -> None:
        """As after the loading: for a process that starts."""
        for now, facts in self._pristine:
            now.clear()
            now.update(facts)
        for value, saved in self._state:
            _restore(value, saved)
        for reset in self._renewing:
            reset()


def _restore(value: Any, saved: Any) -> None:
    if isinstance(value, weakref.WeakSet):
        value.clear()
        value.update(saved)
    elif value != saved:
        value.clear()
        (value.extend if isinstance(value, (list, deque)) else value.update)(saved)


def _file_of(name: str) -> Path:
    parts = name.split(".")
    if parts[0] == "safe_ckpt":
        base = SOURCES.joinpath(*parts)
        for file in (base / "__init__.py", base.with_suffix(".py")):
            if file.exists():
                return file
        raise FileNotFoundError(name)
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise FileNotFoundError(name)
    file = Path(spec.origin)
    if file.suffix != ".py":  # frozen
        file = Path(importlib.__file__).parents[1].joinpath(*parts).with_suffix(".py")
    return file


class Slots:
    """Those that are free, and those that are taken."""

    def __init__(self, patches: Mapping[str, Patch] | None = None) -> None:
        self._patches = patches
        self._free: list[Slot] = []

    def take(self) -> Slot:
        """One whose modules are as new."""
        slot = self._free.pop() if self._free else Slot(self._patches)
        slot.renew()
        return slot

    def give_back(self, slot: Slot) -> None:
        """Its process is over."""
        self._free.append(slot)
