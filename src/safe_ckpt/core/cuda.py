"""What is asked of CUDA for a snapshot, in one place: the logic around it is tried with another one that only remembers.

This file was read, not run: no machine with CUDA was at hand. Without CUDA nothing here is called.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from safe_ckpt.core.staging.device_copies import TensorCopy


logger = logging.getLogger(__name__)


class Cuda:
    """The devices of this process. A new thread stands on device 0, so everything here names the device that it is for."""

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` lies on a CUDA device."""
        return tensor.device.type == "cuda"

    def device(self) -> torch.device | None:
        """The device that the calling thread works on; None where CUDA is not in use."""
        in_use = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        return torch.device("cuda", torch.cuda.current_device()) if in_use else None

    def at(self, device: torch.device) -> AbstractContextManager[None]:
        """Let the calling thread stand on ``device`` meanwhile."""
        found: AbstractContextManager[None] = torch.cuda.device(device)
        return found

    def stream(self, device: torch.device) -> Any:
        """A stream of its own."""
        return torch.cuda.Stream(device=device)  # type: ignore[no-untyped-call]

    def current(self, device: torch.device) -> Any:
        """The stream on which the calling thread puts its work."""
        return torch.cuda.current_stream(device)

    def on(self, stream: Any) -> AbstractContextManager[None]:
        """Let the calling thread put its work on ``stream`` meanwhile, and stand on its device."""
        found: AbstractContextManager[None] = torch.cuda.stream(stream)
        return found

    def here(self) -> AbstractContextManager[Any]:
        """Where the calling thread puts its work, to be entered by another one, which would else stand on device 0."""
        device = self.device()
        return self.on(self.current(device)) if device is not None else contextlib.nullcontext()

    def settle(self, tensors: Iterable[torch.Tensor]) -> None:
        """Wait until what the calling thread has queued on their devices is done: another thread is about to read them."""
        for device in {tensor.device for tensor in tensors if self.has(tensor)}:
            self.current(device).synchronize()

    def mark(self, stream: Any) -> Any:
        """An event that has come when all that is on ``stream`` now is done."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def copy(self, move: TensorCopy, memory: torch.Tensor, *, non_blocking: bool) -> None:
        """Copy a tensor to its place, on the calling thread's stream."""
        move.into(memory, non_blocking=non_blocking)

    def register(self, address: int, size: int, device: torch.device) -> Callable[[], None] | None:
        """Pin host memory for all devices. Returns what takes that back; None where it is refused, which is said."""
        with self.at(device):
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            failed = int(runtime.cudaHostRegister(address, size, 0))
            if failed:
                logger.warning("host memory cannot be pinned (CUDA error %d): snapshots are slower", failed)
                _clear_last_error(runtime, device)
                return None

        def take_back() -> None:
            with self.at(device):
                runtime.cudaHostUnregister(address)

        return take_back


def _clear_last_error(runtime: Any, device: torch.device) -> None:
    # CUDA keeps the last error until somebody asks for it, and the next kernel of training would be blamed for ours. torch
    # hands out no cudaGetLastError; it asks for it itself after launching a kernel, so that kernel is a small one of ours.
    if hasattr(runtime, "cudaGetLastError"):
        runtime.cudaGetLastError()
        return
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device).add_(1)
