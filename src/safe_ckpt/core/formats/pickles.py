"""Code in pickles, and the one rule about it: of a save, a resume and the commands. Nothing in a pickle is run meanwhile.

A pickle calls what it names. Stock Lightning, Accelerate and DeepSpeed read some of their files so. The rule refuses calls of
functions, except those that rebuild tensors, arrays and other data. It refuses most of Python's own library, too. It admits
classes of packages that the program has imported, since states may hold objects of the user's. So it does not recognize a class
that does harm when it is made: ``docs/clusters.md`` says so. A command runs without the user's program. There, names of
packages that it does not know count as the user's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import importlib
import pickle
import re
import sys
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections import OrderedDict
from collections.abc import Iterable
from typing import IO, Any

from typing_extensions import Self

from safe_ckpt.core.formats.dtypes import ITEM_BYTES, STORAGES

_READ = re.compile(
    r"(?!training_args\.bin$).*\.(pt|pth|bin|ckpt|metadata)|(random_states|custom_checkpoint)_.*\.pkl", re.DOTALL
)
_LIBRARY = frozenset({
    "abc", "argparse", "array", "collections", "copy", "copyreg", "dataclasses", "datetime", "decimal",
    "enum", "fractions", "functools", "ipaddress", "itertools", "math", "numbers", "operator", "pathlib", "random", "re",
    "string", "time", "typing", "uuid", "zoneinfo",
})  # fmt: skip
_KNOWN = frozenset({
    "_codecs.encode", "array._array_reconstructor", "copyreg.__newobj__", "copyreg.__newobj_ex__", "copyreg._reconstructor",
    "_io.BytesIO", "_io.StringIO", "http.HTTPStatus", "logging.getLogger",
    "numpy.ma.core._mareconstruct",
    "numpy._core.multiarray._reconstruct", "numpy._core.multiarray.scalar", "numpy._core.numeric._frombuffer",
    "numpy.core.multiarray._reconstruct", "numpy.core.multiarray.scalar", "numpy.core.numeric._frombuffer",
    "numpy.random._pickle.__bit_generator_ctor", "numpy.random._pickle.__generator_ctor",
    "numpy.random._pickle.__randomstate_ctor",
    "pandas._libs.internals._unpickle_block", "pandas._libs.tslibs.timedeltas._timedelta_unpickle",
    "pandas._libs.tslibs.timestamps._unpickle_timestamp", "pandas.core.indexes.base._new_Index",
    "pandas.core.indexes.datetimes._new_DatetimeIndex", "pandas.core.indexes.period._new_PeriodIndex",
    "pyarrow.lib._reconstruct_record_batch", "pyarrow.lib._reconstruct_table", "pyarrow.lib._restore_array",
    "pyarrow.lib.chunked_array", "pyarrow.lib.field", "pyarrow.lib.list_", "pyarrow.lib.py_buffer", "pyarrow.lib.schema",
    "pyarrow.lib.struct", "pyarrow.lib.type_for_alias",
    "re._compile", "signal.Signals", "statistics.NormalDist",
    "torch._tensor._rebuild_from_type_v2", "torch.serialization._get_layout",
    "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING",  # an enum: DCP may not be imported yet
    "urllib.parse.ParseResult", "urllib.parse.SplitResult", "zoneinfo.ZoneInfo._unpickle",
})  # fmt: skip
_BUILTINS = frozenset({
    "bool", "bytearray", "bytes", "complex", "dict", "float", "frozenset", "getattr", "int", "list", "object", "range", "set",
    "slice", "str", "tuple",
})  # fmt: skip
_NAMED = frozenset({"abs", "all", "any", "len", "max", "min", "pow", "round", "sorted", "sum"})
# They call what they are given.
_CALLING = frozenset({"accumulate", "dropwhile", "filterfalse", "groupby", "starmap", "takewhile"})
_ASKED = frozenset({"__setstate__", "add", "append", "extend"})  # of an object, when it is unpickled
_TYPES = frozenset({"GenericAlias", "MappingProxyType", "NoneType", "SimpleNamespace", "UnionType"})
_OF_TORCH = (
    "torch._dynamo",
    "torch._inductor",
    "torch.fx",
    "torch.hub",
    "torch.jit",
    "torch.package",
    "torch.utils.cpp_extension",
)
_LOOKED_UP = {
    "torch": ("torch", "torch.distributed.tensor", "torch.distributed.checkpoint", "torch.distributed.fsdp"),
    "numpy": ("numpy",),
}
"""The modules that a command imports of a package where a pickle names more of it than tensors and arrays take."""
_OF_TENSORS = frozenset({"torch.Size", "torch.device", "torch.storage.TypedStorage", "torch.storage.UntypedStorage"})
_HOMES_OF_RECORDS = (
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.checkpoint.filesystem",
    "torch.distributed._shard.sharded_tensor.metadata",  # older releases had a part of the first one there
)
"""Where DCP has what its ``.metadata`` is made of: dataclasses, and an enumeration."""
_OTHER_RECORDS = {
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", *ITEM_BYTES},
    "collections": {"OrderedDict", "defaultdict"},
    "pathlib": {"Path", "PosixPath", "PurePath", "PurePosixPath"},
}
"""Names of other modules that it has, too."""
_ORDERED = ("collections", "OrderedDict")
_DTYPE = re.compile(r"(b?complex|b?float|q?u?int|bits|bool)[0-9][0-9a-z_]*")


def is_read(name: str) -> bool:
    """Whether a framework unpickles a file of this name, without folders. Other pickles beside them the user alone reads."""
    return _READ.fullmatch(name) is not None


class Odd(Exception):
    """A pickle does what no object asks for when it is pickled. Its text follows "its pickle"."""


class Names:
    """The names in a pickle, with a stand-in for each, and those of them that it would call.

    Args:
        anywhere: this process is not the one that will read it, such as a command's: what is of a package that is not
            imported here may be the user's.

    Attributes:
        found: the names, in their order.
        called: of the names, those that it calls.
    """

    def __init__(self, *, anywhere: bool = False) -> None:
        self._anywhere = anywhere
        self.found: dict[tuple[str, str], None] = {}
        self.called: set[tuple[str, str]] = set()
        self._stand_ins: dict[tuple[str, str], Any] = {}

    def find(self, module: str, name: str) -> Any:
        """Return the stand-in for a class or function, and note that it is named.

        It has its name of today: torch's pickles call Python's library as Python 2 did.
        """
        key = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        self.found[key] = None
        return self.stand_in(*key)

    def stand_in(self, module: str, name: str) -> Any:
        """Return the stand-in for a class or function."""
        if (module, name) not in self._stand_ins:
            self._stand_ins[module, name] = self.make({"__slots__": (), "names": self, "module": module, "name": name})
        return self._stand_ins[module, name]

    def make(self, facts: dict[str, Any]) -> Any:
        """Make it, with these attributes."""
        return OrderedDict if (facts["module"], facts["name"]) == _ORDERED else Named("Named", (Made,), facts)

    def other_than_records(self) -> list[str]:
        """Return the names that have no place in DCP's ``.metadata``. A resume also looks at what bears the name."""
        found = []
        for module, name in self.found:
            made = (module, name) in self.called and name != "_MEM_FORMAT_ENCODING"
            in_place = name in _OTHER_RECORDS.get("pathlib" if module == "pathlib._local" else module, ())
            # A type of a newer torch is not known here.
            in_place |= module == "torch" and not made and _DTYPE.fullmatch(name) is not None
            if not in_place and (made or module not in _HOMES_OF_RECORDS or "." in name):
                found.append(_no_record(module, name))
        return found

    def problems(self) -> list[str]:
        """Say what is wrong with the names, in words that follow "its pickle"."""
        own, found = _own_names(), []
        for module, name in self.found:
            text, called = f"{module}.{name}", (module, name) in self.called
            if text not in own and not _is_data(module, name, called=called, anywhere=self._anywhere):
                found.append(f"{'calls' if called else 'names'} {text[:200]}, which is no data")
        return found


def _own_names() -> set[str]:
    """Return the names that ``torch.serialization.add_safe_globals`` has admitted."""
    if "torch" not in sys.modules:
        return set()
    import torch

    safe = torch.serialization.get_safe_globals()
    return {str(one[1]) if isinstance(one, tuple) else f"{one.__module__}.{one.__qualname__}" for one in safe}


def problems_in(streams: Iterable[IO[bytes]]) -> list[str]:
    """Say what would run code in pickles that follow each other, in words that follow "its pickle"; nothing for data.

    Args:
        streams: with one pickle each; the same again for a stream with several. The first that has no end is the last.
    """
    names, odd = Names(), []
    for stream in streams:
        try:
            StandIns(stream, names).load()
        except Odd as error:
            odd.append(str(error))
        except EOFError:
            pass  # whoever reads it meets the same end
        except Exception as error:
            # What is no pickle, or a damaged one: whoever reads it says so. But here it may end where it does not for others.
            if names.found.keys() - {_ORDERED} and "truncated" not in str(error):
                odd.append(f"cannot be looked through ({type(error).__name__}: {error})"[:300])
        else:
            continue
        break
    return [*odd, *names.problems()]


def _is_asked(keys: Iterable[object]) -> bool:
    """Whether one of the keys is a method that is asked of an object when it is unpickled."""
    return any(isinstance(key, str) and key in _ASKED for key in keys)


class StandIns(pickle.Unpickler):  # unpickles: stand-ins alone
    """Reads a pickle with stand-ins for the classes, functions and storages that it names.

    Args:
        stream: with the pickle.
        names: gives the stand-in for a class or function.
    """

    def __init__(self, stream: IO[bytes], names: Names) -> None:
        super().__init__(stream, encoding="latin-1")
        self._names = names

    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in for it."""
        return self._names.find(module, name)

    def persistent_load(self, pid: Any) -> Any:
        """Return the stand-in for a storage; before torch 1.6 also for a class of a module, with its source."""
        if isinstance(pid, tuple) and len(pid) > 1 and pid[0] == "module":
            return pid[1]
        return OrderedDict()


class Records(pickle.Unpickler):  # unpickles: DCP's records alone
    """Builds what DCP's ``.metadata`` is made of, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class or constant that has a place in it.

        Raises:
            Odd: it has none.
        """
        import torch

        module = "pathlib" if module == "pathlib._local" else module  # as Python 3.13 calls it
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in _OTHER_RECORDS.get(module, ()):
            return super().find_class(module, name)
        if module in _HOMES_OF_RECORDS:
            found = super().find_class(module, name)
            # To build a dataclass or an enumeration of that module runs nothing but the module's own code.
            is_record = isinstance(found, type) and (dataclasses.is_dataclass(found) or issubclass(found, enum.Enum))
            if is_record and found.__module__ == module:
                return found
        raise Odd(_no_record(module, name))


def _no_record(module: str, name: str) -> str:
    return f"names {module}.{name}, which has no place in a checkpoint's metadata"[:300]


class Named(type):
    """Stands for a class or function that a pickle names. Calling it calls nothing, and is noted."""

    names: Names
    module: str
    name: str

    def _refuse(cls) -> Any:
        raise Odd(f"changes {cls}")

    __setstate__ = append = extend = add = property(_refuse)

    def __str__(cls) -> str:
        return f"{cls.module}.{cls.name}"

    def __call__(cls, *args: Any) -> Any:
        """Return what the call would, as a stand-in."""
        if (
            str(cls) == "builtins.getattr"
            and len(args) == 2
            and isinstance(args[0], Named)
            and isinstance(args[1], str)
        ):
            # A class within a class; a value of an enum.
            return cls.names.find(args[0].module, f"{args[0].name}.{args[1]}")
        cls.names.called.add((cls.module, cls.name))
        if cls.name == "_rebuild_from_type_v2" and args and isinstance(args[0], Named):
            cls.names.called.add((args[0].module, args[0].name))
        made: Any = cls.__new__
        return made(cls, *args)


class Made:
    """Stands for an object that a class would make. It accepts changes in the order in which objects are pickled.

    That is its items, then its keys, then its state. In another order the pickle could call what it gave the object: an
    attribute in the place of its ``append``.
    """

    __slots__ = ("stage",)
    __getinitargs__ = ()  # so that INST and OBJ call the class without arguments, as they do with a function
    stage: int

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        """Make it of these."""
        made = super().__new__(cls)
        given = [one for one in (*args, kwargs) if isinstance(one, dict)]
        made.stage = 3 if any(map(_is_asked, given)) else 0
        return made

    def __call__(self, *_: object) -> Any:
        """Refuse it.

        Raises:
            Odd: always: a call may do anything.
        """
        raise Odd(f"calls what it makes of {type(self)}")

    def append(self, _: Any, /) -> None:
        """As a list's, and a set's."""
        self.go_on_to(0)

    extend = add = append

    def __setitem__(self, key: object, value: object) -> None:
        self.go_on_to(1)
        if _is_asked([key]):
            self.stage = 3

    def __setstate__(self, state: object) -> None:
        self.go_on_to(2)
        self.stage = 3

    def go_on_to(self, stage: int) -> None:
        """Note how far it is with its changes.

        Raises:
            Odd: it comes too late.
        """
        if self.stage > stage:
            raise Odd(f"changes what it has made of {type(self)}")
        self.stage = stage


def _is_data(module: str, name: str, *, called: bool, anywhere: bool) -> bool:
    if f"{module}.{name}" in _KNOWN or f"{module}.{name}".startswith("torch._utils._rebuild_"):
        return True
    of_torch = module == "torch" and (name in STORAGES or name in ITEM_BYTES)
    if of_torch or f"{module}.{name}" in _OF_TENSORS:
        return True
    top = module.partition(".")[0]
    # Only of what is named above: a pickle does not choose what is imported.
    for known in [module] if top in _LIBRARY else _LOOKED_UP.get(top, ()) if anywhere else ():
        with contextlib.suppress(Exception):  # it is not there, or this release has no such part
            importlib.import_module(known)
    of_others = module not in sys.modules and top not in {*sys.stdlib_module_names, *_LOOKED_UP}
    if anywhere and (of_others or top == "__main__"):
        return True  # the user's
    found: Any = sys.modules.get(module)
    for part in name.split(".") if found is not None else ():
        found = getattr(found, part, None)
    return _is_harmless(found, module, name, called=called)


def _is_harmless(found: Any, module: str, name: str, *, called: bool) -> bool:
    """Judge a name by what it is in this process: None where its module is not imported."""
    is_class = isinstance(found, type)
    # Where it was made: a module may have it from another one.
    home = str(getattr(found, "__module__", None) or module)
    package = home.partition(".")[0]
    if package == "builtins":
        exception = is_class and issubclass(found, BaseException)
        return (
            name in _BUILTINS
            or (name in _NAMED and not called)
            or exception
            or (found is not None and not callable(found))
        )
    if package == "types":
        return name in _TYPES
    if package in sys.stdlib_module_names:
        # ``typing.Any`` is no class before Python 3.11.
        harmless = home.removeprefix("_") in ("operator", "math", "typing") and not called
        plain = is_class or harmless or (found is not None and not callable(found))
        return package.removeprefix("_") in _LIBRARY and plain and name not in _CALLING
    if home.startswith(_OF_TORCH) or (package == "torch" and name.endswith("Store")):
        return False
    # What Cython makes for a class of its own sets its attributes.
    return is_class or not called or (found is not None and name.startswith("__pyx_unpickle_"))
