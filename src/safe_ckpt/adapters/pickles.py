"""Files that a framework unpickles freely are looked through first, by the one rule of ``core.formats.pickles``.

What goes from rank to rank is data alone.
"""

from __future__ import annotations

import base64
import contextlib
import io
import logging
import os
import pickle
import re
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import torch

from safe_ckpt.core.formats.pickles import is_read, problems_in
from safe_ckpt.core.formats.torch_reading import load_data, refusing
from safe_ckpt.core.storage import presence
from safe_ckpt.errors import CorruptCheckpointError, HostileCheckpointError, StateError, TamperedError

__all__ = ["from_text", "load_data", "refuse_code", "refusing", "to_text", "warn_if_no_data", "warn_if_refused"]

logger = logging.getLogger(__name__)

_PICKLES = 5  # torch's format before 1.6: a magic number, a version, facts of the system, the object, its storages
_GLOBALS = re.compile(rb"c([^\x00-\x20]{1,200})\n([^\x00-\x20]{1,200})\n")  # in the protocol that torch.save writes
_MOST_NAMES = 10_000


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
        if is_read(name) and (Path(folder) / name).is_file()
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
    of_user = name.endswith(".pkl") and not is_read(Path(name).name)
    if of_user or not _has_new(names, _judged):
        return
    problems = problems_in([io.BytesIO(data)])
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
    if not _has_new(names, _data_alone):
        return
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:  # as torch asks for: it looks at no tensor
        file.writestr("archive/version", "3\n")
        file.writestr("archive/data.pkl", data)
    archive.seek(0)
    with contextlib.suppress(pickle.UnpicklingError):  # such as an integer of thousands of digits
        if found := sorted(torch.serialization.get_unsafe_globals_in_checkpoint(archive)):
            logger.warning("%s: a resume will refuse this file, as it has %s: %s", key, ", ".join(found), advice)


def _has_new(names: set[tuple[bytes, bytes]], known: set[tuple[bytes, bytes]]) -> bool:
    """Whether one of the names is not known yet; from then on they are. So many are known at most."""
    if names <= known:
        return False
    if len(known) > _MOST_NAMES:
        known.clear()
    known.update(names)
    return True


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
    """Return what another rank gave to ``to_text``.

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
    with file.open("rb") as stream:
        problems = problems_in(_pickles_in(file, stream))
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
    if problem is None:
        with contextlib.suppress(tarfile.TarError, EOFError, ValueError), tarfile.open(file, "r:") as archive:
            if "pickle" in archive.getnames():
                problem = "is in torch's format of 2016, which cannot be looked through"
    if problem is not None:
        message = f"{problem}. Nothing of it was run. Do not load it before you know where it comes from"
        raise HostileCheckpointError(path=str(path), file=name, message=message)


def _pickles_in(file: Path, stream: IO[bytes]) -> Iterator[IO[bytes]]:
    if stream.read(4) == b"PK\3\4":
        with contextlib.suppress(RuntimeError):  # an archive that torch cannot open either
            # By torch's own reader: another one may see another record in an archive that says things twice.
            yield io.BytesIO(torch._C.PyTorchFileReader(str(file)).get_record("data.pkl"))
        return
    stream.seek(0)
    for _ in range(_PICKLES):
        yield stream
