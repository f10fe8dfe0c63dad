"""Reading a torch archive that lies in memory, as ``torch.load(weights_only=True)`` does with a file."""

from __future__ import annotations

import contextlib
import io
import logging
import mmap
import pickle
import warnings
from collections.abc import Iterator, Sequence
from typing import IO, Any

import torch

from safe_ckpt.core.storage.objects.place import Place
from safe_ckpt.errors import HostileCheckpointError, SafeCheckpointError

logger = logging.getLogger(__name__)


def parse_archive(memory: mmap.mmap, length: int) -> Any:
    """A torch archive, as ``torch.load(weights_only=True, map_location="cpu")`` reads it."""
    try:
        return _parse_in_place(memory, length)
    except MemoryError:
        raise
    except Exception as error:  # torch has other insides, or refuses the content: torch's public function says which
        logger.debug("an archive is read with a copy: %s: %s", type(error).__name__, error)
    return load_plain(io.BytesIO(memory[:length]))


def load_plain(stream: IO[bytes]) -> Any:
    """``torch.load(weights_only=True, map_location="cpu")``. Checks the indices of sparse tensors, and does not warn of it."""
    with warnings.catch_warnings(), _checked():
        warnings.filterwarnings("ignore", "Validating sparse tensor invariants")
        return torch.load(stream, map_location="cpu", weights_only=True)


def load_data(stream: IO[bytes], classes: Sequence[type] = ()) -> Any:
    """Load as ``load_plain`` does. Admits also numpy's data, and objects of ``classes``: making one runs its own code alone."""
    with torch.serialization.safe_globals([*classes, *_arrays()]):
        return load_plain(stream)


def _arrays() -> list[Any]:
    try:
        import numpy as np
    except ImportError:
        return []
    kinds = {type(np.dtype(code)) for code in np.typecodes["All"] if code != "O"}
    rebuild: dict[str, Any] = {"_reconstruct": np.zeros(0).__reduce__()[0], "scalar": np.float64(0).__reduce__()[0]}
    homes = ("numpy.core.multiarray", "numpy._core.multiarray")
    return [np.ndarray, np.dtype, *kinds, *((how, f"{home}.{name}") for name, how in rebuild.items() for home in homes)]


@contextlib.contextmanager
def refusing(folder: Place, file: str) -> Iterator[None]:
    """Around the reading of bytes that are those that were written: what cannot be read then was written by no tool.

    Raises:
        HostileCheckpointError: it could not be read without running code, or not at all.
    """
    try:
        yield
    except (SafeCheckpointError, OSError, MemoryError):
        raise
    except Exception as error:
        text = " ".join(str(error).split())[:1000]
        if isinstance(error, RuntimeError) and "alloc" in text.lower():  # torch's word for a lack of memory
            raise
        runs = isinstance(error, pickle.UnpicklingError)
        why = "cannot be read without running code" if runs else "has the bytes that were written, and is no such file"
        message = f"{why}: {type(error).__name__}: {text}"
        raise HostileCheckpointError(path=str(folder), file=file, message=message) from error


@contextlib.contextmanager
def outside_inference_mode() -> Iterator[None]:
    """Within it no tensor is made in inference mode. Gradients stay off where they were.

    Training could not change such a tensor later, and a DTensor cannot even be detached in that mode.
    """
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(mode=False), torch.no_grad():  # the first turns gradients on
        yield


def _checked() -> Any:
    """Indices of sparse tensors that lead outside of them are refused."""
    return torch.sparse.check_sparse_tensor_invariants()  # type: ignore[no-untyped-call]


def _parse_in_place(memory: mmap.mmap, length: int) -> Any:
    # What torch.load does with mmap=True; it has no public way to be given memory instead of a path.
    serialization: Any = torch.serialization
    reader = torch._C.PyTorchFileReader(_View(memory, length))  # type: ignore[call-overload]
    unpickler, whole = serialization._weights_only_unpickler, torch.frombuffer(memory, dtype=torch.uint8)
    storage = whole.untyped_storage()
    with _checked():
        return serialization._load(reader, "cpu", unpickler, overall_storage=storage, encoding="utf-8")


class _View(io.RawIOBase):
    """Memory as a file."""

    def __init__(self, memory: mmap.mmap, length: int) -> None:
        super().__init__()
        self._memory = memory
        self._length = length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        with memoryview(buffer).cast("B") as room:
            count = max(0, min(len(room), self._length - self._at))
            room[:count] = self._memory[self._at : self._at + count]
        self._at += count
        return count
