"""Refusals to read for a save: of a tensor whose memory was taken away, and of a state that another thread changes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from safe_ckpt.errors import StateError

_PACKAGE = __name__.partition(".")[0]
_OWN_WAY = torch.Tensor.__torch_dispatch__


def room_bytes(tensor: torch.Tensor) -> tuple[int, int]:
    """How many bytes of memory there are for a tensor, and up to which one its elements lie.

    (0, 0) where that is not known: of a tensor without memory of its own, such as one that is sparse or has no values.
    """
    try:
        # A subclass that answers for itself has its values in other tensors.
        if tensor.layout is not torch.strided or tensor.is_meta or type(tensor).__torch_dispatch__ is not _OWN_WAY:
            return 0, 0
        room = tensor.untyped_storage().nbytes()
        if not tensor.numel():
            return room, 0
        last = sum((size - 1) * step for size, step in zip(tensor.size(), tensor.stride(), strict=True))
        return room, (int(tensor.storage_offset()) + last + 1) * tensor.element_size()
    except (RuntimeError, TypeError, ValueError):  # such as of a nested one, or of one that has no shape yet
        return 0, 0


def is_short(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory ends before its last element, so that reading it reads what is not its own."""
    room, needed = room_bytes(tensor)
    return needed > room


def refuse_short(key: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor whose memory was taken away. To be asked before a byte of it is read.

    Args:
        key: what an error calls it.
        tensor: any; of a DTensor this rank's part.

    Raises:
        StateError: its storage is shorter than its shape says.
    """
    room, needed = room_bytes(tensor)
    if needed > room:
        message = (
            f"a tensor of shape {tuple(tensor.shape)} needs {needed} bytes, and its storage has {room}: it was resized. "
            "Give it its values back (FSDP: reshard()), or leave it out"
        )
        raise StateError(key=key, message=message)
    if not needed and tensor.is_nested and tensor.layout is torch.strided:
        try:
            tensor.unbind()
        except RuntimeError as error:
            message = f"a nested tensor whose memory was taken away, give it its values back, or leave it out: {error}"
            raise StateError(key=key, message=message) from error


def refuse_meta(key: str, tensor: torch.Tensor) -> None:
    """Refuse to restore into a tensor that was never given memory.

    Args:
        key: what an error calls it.
        tensor: any; of a DTensor this rank's part.

    Raises:
        StateError: it is on the meta device; says how it gets memory.
    """
    if tensor.is_meta:
        message = (
            "a tensor on the meta device: it has no memory to restore into. Give it some first, module.to_empty(device='cpu') "
            "or another device, and make the optimizer after that; to one that is no module's, "
            "torch.empty_like(tensor, device='cpu')"
        )
        raise StateError(key=key, message=message)


@contextlib.contextmanager
def unchanging(key: str) -> Iterator[None]:
    """Within this block what is called ``key`` is read.

    Raises:
        StateError: it was changed meanwhile; says what to do.
    """
    try:
        yield
    except (LookupError, RuntimeError) as error:
        changed = changed_meanwhile(error, key)
        if changed is None:
            raise
        raise changed from error


def changed_meanwhile(error: BaseException, key: str) -> StateError | None:
    """Return the error to raise if ``error`` says that ``key`` lost or got entries while it was read; None for another one."""
    if isinstance(error, RuntimeError):
        is_that = type(error) is RuntimeError and "during iteration" in str(error)
    else:  # an entry was there a moment ago; where other code raises this it may mean anything
        is_that = isinstance(error, LookupError) and _raised_by(error).partition(".")[0] == _PACKAGE
    if not is_that:
        return None
    message = (
        f"it was changed while it was being saved ({type(error).__name__}: {error}). Another thread adds or removes "
        "entries: change it on the thread that saves only, hold a lock of yours around both, or save a copy of it"
    )
    return StateError(key=key, message=message)


def _raised_by(error: BaseException) -> str:
    trace, name = error.__traceback__, ""
    while trace is not None:
        name = str(trace.tb_frame.f_globals.get("__name__", ""))
        trace = trace.tb_next
    return name
