"""Facts about a single tensor that decide whether its bytes may be read."""

from __future__ import annotations

import torch

from safe_ckpt.errors import StateError

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
