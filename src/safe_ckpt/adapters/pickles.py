"""Files that a framework unpickles freely: looked through first, and nothing in them is run meanwhile.

A pickle calls what it names. Stock Lightning, Accelerate and DeepSpeed read some of their files so. What is refused here: a
call of a function, except those that rebuild tensors, arrays and other data; and most of Python's own library. What is
admitted: classes of packages that the program has imported, since states may hold objects of the user's. So a class that does
harm when it is made is not recognized. ``docs/clusters.md`` says so.
"""

from __future__ import annotations

import base64
import contextlib
import io
import logging
import os
import pickle
import re
import sys
import tarfile
import zipfile
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import torch
from typing_extensions import Self

from safe_ckpt.core.formats.torch_reading import load_data, refusing
from safe_ckpt.core.storage import presence
from safe_ckpt.errors import CorruptCheckpointError, HostileCheckpointError, StateError, TamperedError
from safe_ckpt.layouts.top_level import StandIns

__all__ = ["from_text", "load_data", "refuse_code", "refusing", "to_text", "warn_if_no_data", "warn_if_refused"]

logger = logging.getLogger(__name__)

_READ = re.compile(
    r"(?!training_args\.bin$).*\.(pt|pth|bin|ckpt|metadata)|(random_states|custom_checkpoint)_.*\.pkl", re.DOTALL
)
"""Files that a framework unpickles. Other pickles beside them are read by the user alone."""
_PICKLES = 5  # torch's format before 1.6: a magic number, a version, facts of the system, the object, its storages
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
_GLOBALS = re.compile(rb"c([^\x00-\x20]{1,200})\n([^\x00-\x20]{1,200})\n")  # in the protocol that torch.save writes
_MOST_NAMES = 10_000
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


def refuse_code(path: Path, rank: int = 0, size: int = 1) -> None:
    """Look through the pickles of a checkpoint before a framework unpickles them. Nothing in them is run.

    Args:
        path: a file of torch's, or a directory: then this rank looks through its share of the files that a framework reads.
        rank: this process's.
        size: the number of ranks.

    Raises:
        HostileCheckpointError: one would run code; names the file and what it calls.
        OSError: a file could not be read.
    """
    if not presence.is_directory(path):
        _refuse(path, path, "")
        return
    files = sorted(
        Path(folder) / name
        for folder, _, names in os.walk(path)
        for name in names
        if _READ.fullmatch(name) and (Path(folder) / name).is_file()
    )
    for file in files[rank::size]:
        _refuse(path, file, file.relative_to(path).as_posix())


_judged: set[tuple[bytes, bytes]] = set()


def warn_if_refused(name: str, data: bytes, key: str) -> None:
    """Log, once for each name, that a resume will refuse what is saved: by the rule of ``refuse_code``.

    Args:
        name: the file that is saved.
        data: its pickle.
        key: what the warning calls it.
    """
    names = set(_GLOBALS.findall(data))
    of_user = name.endswith(".pkl") and not _READ.fullmatch(Path(name).name)
    if names <= _judged or of_user:
        return
    if len(_judged) > _MOST_NAMES:
        _judged.clear()
    _judged.update(names)
    found = _Names()
    found.read(io.BytesIO(data))
    problems = found.problems()
    if problems:
        logger.warning(
            "%s: a resume will refuse this file: its pickle %s. Call torch.serialization.add_safe_globals([...]) with that at "
            "the start of the script, or keep it out of the state",
            key,
            "; it ".join(problems),
        )


_data_alone: set[tuple[bytes, bytes]] = set()


def warn_if_no_data(data: bytes, key: str, advice: str) -> None:
    """Log, once for each name, that ``torch.load(weights_only=True)`` will refuse what is saved.

    Args:
        data: the pickle of a file.
        key: what the warning calls it.
        advice: how the file can be read all the same.
    """
    names = set(_GLOBALS.findall(data))
    if names <= _data_alone:
        return
    _data_alone.update(names)
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:  # as torch asks for: it looks at no tensor
        file.writestr("archive/version", "3\n")
        file.writestr("archive/data.pkl", data)
    archive.seek(0)
    with contextlib.suppress(pickle.UnpicklingError):  # such as an integer of thousands of digits
        if found := sorted(torch.serialization.get_unsafe_globals_in_checkpoint(archive)):
            logger.warning("%s: a resume will refuse this file, as it has %s: %s", key, ", ".join(found), advice)


def to_text(value: object, key: str) -> str:
    """Data for the way to another rank, which does not run what it gets.

    Args:
        value: plain containers, numbers, text, tensors, arrays.
        key: what an error calls it.

    Raises:
        StateError: something in it is no data.
    """
    buffer = io.BytesIO()
    torch.save(value, buffer)
    data = buffer.getvalue()
    try:
        load_data(io.BytesIO(data))
    except pickle.UnpicklingError as error:
        found = torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(data))
        message = (
            f"it goes to rank 0 as data alone, and has {', '.join(found)}: let state_dict return numbers, text, tensors and "
            "containers of them, or name the class to torch.serialization.add_safe_globals"
        )
        raise StateError(key=key, message=message) from error
    return base64.b64encode(data).decode()


def from_text(text: str, key: str) -> Any:
    """What another rank gave to ``to_text``.

    Raises:
        TamperedError: it comes from somewhere else.
    """
    try:
        return load_data(io.BytesIO(base64.b64decode(text)))
    except MemoryError:
        raise
    except Exception as error:  # whatever is made of bytes that are no state
        raise TamperedError(key=key) from error


def _refuse(path: Path, file: Path, name: str) -> None:
    names = _Names()
    with file.open("rb") as stream, contextlib.suppress(RuntimeError):  # an archive that torch cannot open either
        for one in _pickles_in(file, stream):
            if not names.read(one):
                break
    problems = names.problems()
    advice = "torch.serialization.add_safe_globals admits what is yours"
    problem = f"its pickle {problems[0]}; {advice}" if problems else None
    if file.name == ".metadata" and problem is None:
        from safe_ckpt.core.sharding.dcp_read import read_metadata

        try:
            read_metadata(file.parent)
        except HostileCheckpointError as error:
            problem = error.message
        except CorruptCheckpointError:
            pass  # whoever reads it says so
    if problem is None and _is_of_2016(file):
        problem = "is in torch's format of 2016, which cannot be looked through"
    if problem is not None:
        message = f"{problem}. Nothing of it was run. Do not load it before you know where it comes from"
        raise HostileCheckpointError(path=str(path), file=name, message=message)


def _is_of_2016(file: Path) -> bool:
    with contextlib.suppress(tarfile.TarError, EOFError, ValueError), tarfile.open(file, "r:") as archive:
        return "pickle" in archive.getnames()
    return False


def _pickles_in(file: Path, stream: IO[bytes]) -> Iterator[IO[bytes]]:
    if stream.read(4) == b"PK\3\4":
        # By torch's own reader: another one may see another record in an archive that says things twice.
        yield io.BytesIO(torch._C.PyTorchFileReader(str(file)).get_record("data.pkl"))
        return
    stream.seek(0)
    for _ in range(_PICKLES):
        yield stream


class _Named(type):
    """Stands for a class or function that a pickle names. Calling it calls nothing, and is noted."""

    names: _Names
    module: str
    name: str

    def _refuse(cls) -> Any:
        raise _Odd(f"changes {cls.module}.{cls.name}")

    __setstate__ = append = extend = add = property(_refuse)

    def __call__(cls, *args: Any, **_: Any) -> Any:
        text = f"{cls.module}.{cls.name}"
        if text == "builtins.getattr" and len(args) == 2 and isinstance(args[0], _Named):
            # A class within a class; a value of an enum.
            return cls.names.find(args[0].module, f"{args[0].name}.{args[1]}")
        cls.names.called.add((cls.module, cls.name))
        if cls.name == "_rebuild_from_type_v2" and args and isinstance(args[0], _Named):
            cls.names.called.add((args[0].module, args[0].name))
        made: Any = cls.__new__
        return made(cls, *args)


class _Odd(Exception):
    """A pickle does what no object asks for when it is pickled."""


class _Made(dict):  # type: ignore[type-arg]
    """Stands for what a class would make. It accepts what is done to an object in the order in which it is pickled.

    In another order, what an object was given would be called: an attribute in the place of its ``append``.
    """

    stage: int

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        made = super().__new__(cls)
        given = [one for one in (*args, kwargs) if isinstance(one, dict)]
        made.stage = 3 if any(not _ASKED.isdisjoint(one) for one in given) else 0
        return made

    def __hash__(self) -> int:  # type: ignore[override]
        return id(self)

    def __call__(self, *_: object, **__: object) -> Any:
        raise _Odd(f"calls what it makes of {self._text}")

    def append(self, *_: object) -> None:
        """Nothing."""
        self._go_on_to(0)

    extend = add = append

    def __setitem__(self, key: object, _: object) -> None:
        self._go_on_to(1)
        if isinstance(key, str) and key in _ASKED:
            self.stage = 3

    def __setstate__(self, _: object) -> None:
        self._go_on_to(2)
        self.stage = 3

    def _go_on_to(self, stage: int) -> None:
        if self.stage > stage:
            raise _Odd(f"changes what it has made of {self._text}")
        self.stage = stage

    @property
    def _text(self) -> str:
        kind: Any = type(self)
        return f"{kind.module}.{kind.name}"


class _Names:
    """What a pickle names and what it would call.

    Attributes:
        called: of the names, those that it calls.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], Any] = {("collections", "OrderedDict"): OrderedDict}
        self.called: set[tuple[str, str]] = set()
        self._odd: list[str] = []

    def read(self, stream: IO[bytes]) -> bool:
        """Look through one pickle. Whether there is an end of it, and so perhaps another one."""
        nothing = self.find("collections", "OrderedDict")
        try:
            StandIns(stream, self.find, nothing).load()
        except _Odd as error:
            self._odd.append(str(error))
        except EOFError:
            pass  # whoever reads it meets the same end
        except Exception as error:
            # What is no pickle, or a damaged one: whoever reads it says so. But here it may end where it does not for others.
            if self._found.keys() != {("collections", "OrderedDict")} and "truncated" not in str(error):
                self._odd.append(f"cannot be looked through ({type(error).__name__}: {error})"[:300])
        else:
            return True
        return False

    def find(self, module: str, name: str) -> Any:
        # As the unpickler does: torch's pickles call what is in Python's library as Python 2 did.
        key = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        if key not in self._found:
            facts = {"names": self, "module": key[0], "name": key[1]}
            self._found[key] = _Named("Named", (_Made,), facts)
        return self._found[key]

    def problems(self) -> list[str]:
        """What is wrong with what it does, and with the names."""
        safe = torch.serialization.get_safe_globals()
        own = {str(one[1]) if isinstance(one, tuple) else f"{one.__module__}.{one.__qualname__}" for one in safe}
        found = list(self._odd)
        for module, name in self._found:
            text = f"{module}.{name}"
            if text not in own and not _is_data(module, name, called=(module, name) in self.called):
                verb = "calls" if (module, name) in self.called else "names"
                found.append(f"{verb} {text[:200]}, which is no data")
        return found


def _is_data(module: str, name: str, *, called: bool) -> bool:
    if f"{module}.{name}" in _KNOWN or f"{module}.{name}".startswith("torch._utils._rebuild_"):
        return True
    known = module in sys.modules
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None) if known else None
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
