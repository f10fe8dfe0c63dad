"""Copies from accelerators: beside the computing, on a stream of their own, into pinned memory.

``Devices`` is all that is asked of them; the tests try the order of things with others that only remember.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from safe_ckpt import devices
from safe_ckpt.core.formats.file_plan import values_of

logger = logging.getLogger(__name__)


class Devices:
    """The accelerators of this process. A new thread stands on device 0, so everything here names the device that it is for."""

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` lies on a device that works on streams."""
        return not tensor.is_cpu and devices.has_streams(tensor.device.type)

    def here(self) -> list[torch.device]:
        """The devices that the calling thread works on, one of each type in use."""
        return [devices.current_device(name) for name in devices.in_use() if devices.has_streams(name)]

    def at(self, device: torch.device) -> AbstractContextManager[None]:
        """Let the calling thread stand on ``device`` meanwhile."""
        standing: AbstractContextManager[None] = devices.module_of(device.type).device(device)
        return standing

    def stream(self, device: torch.device) -> Any:
        """A stream of its own."""
        return devices.module_of(device.type).Stream(device=device)

    def current(self, device: torch.device) -> Any:
        """The stream on which the calling thread puts its work."""
        return devices.module_of(device.type).current_stream(device)

    def on(self, stream: Any, device: torch.device) -> AbstractContextManager[None]:
        """Let the calling thread put its work on ``stream``, which is one of ``device``, meanwhile, and stand on that."""
        working: AbstractContextManager[None] = devices.module_of(device.type).stream(stream)
        return working

    def synchronize(self, tensors: Iterable[torch.Tensor]) -> None:
        """Wait until what the calling thread has queued on their devices is done: another thread is about to read them."""
        for device in {tensor.device for tensor in tensors if self.has(tensor)}:
            self.current(device).synchronize()

    def mark(self, stream: Any) -> Any:
        """An event that has come when all that is on ``stream`` now is done."""
        return stream.record_event()

    def copy(self, move: TensorCopy, memory: torch.Tensor, *, non_blocking: bool) -> None:
        """Copy a tensor to its place, on the calling thread's stream."""
        move.into(memory, non_blocking=non_blocking)

    def register(self, address: int, size: int, device: torch.device) -> Callable[[], None] | None:
        """Pin host memory for all devices of a type. Returns what takes that back; None where it is refused, which is logged.

        Only CUDA and ROCm register memory by its address. What another device's own allocator has pinned cannot be mapped
        into the writer process.
        """
        runtime_of = getattr(devices.module_of(device.type), "cudart", None)
        if runtime_of is None:
            _say_unpinned(device.type)
            return None
        with self.at(device):
            runtime = runtime_of()
            failed = int(runtime.cudaHostRegister(address, size, 0))
            if failed:
                logger.warning("host memory cannot be pinned (CUDA error %d): snapshots are slower", failed)
                _clear_last_error(runtime, device)
                return None

        def take_back() -> None:
            with self.at(device):
                runtime.cudaHostUnregister(address)

        return take_back


@functools.cache  # once for each type
def _say_unpinned(device_type: str) -> None:
    logger.warning(
        "host memory cannot be pinned for %s devices: tensors are copied one by one, each by a thread that waits for it",
        device_type,
    )


def _clear_last_error(runtime: Any, device: torch.device) -> None:
    # CUDA keeps the last error until it is asked for, and the next kernel of training would raise ours. torch
    # hands out no cudaGetLastError; it asks for it itself after launching a kernel, so that kernel is a small one of ours.
    if hasattr(runtime, "cudaGetLastError"):
        runtime.cudaGetLastError()
        return
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device).add_(1)


@dataclass(frozen=True, kw_only=True, eq=False)
class TensorCopy:
    """One tensor and where its bytes go.

    Attributes:
        offset: in the shared buffer.
        tensor: any shape, type, strides and device; its elements are written in the order of its shape.
        deferred: it stays as it is until the gate opens, so it may be copied later.
    """

    offset: int
    tensor: torch.Tensor
    deferred: bool = False

    @property
    def size(self) -> int:
        """Bytes."""
        return self.tensor.numel() * self.tensor.element_size()

    def into(self, memory: torch.Tensor, *, non_blocking: bool = False) -> None:
        """Copy the tensor to where it goes in ``memory``, in the order of its shape, whatever its strides."""
        source, target = self.tensor, memory[self.offset : self.offset + self.size]
        if self.offset % source.element_size():  # no tensor of its type can begin there, so it is copied as bytes
            source = values_of(source).contiguous().view(-1).view(torch.uint8)
        elif source.dtype is not torch.uint8:
            target = target.view(source.dtype)
        target.view(source.shape).copy_(source, non_blocking=non_blocking)


class Pinnable(Protocol):
    """Host memory that can be registered with a device."""

    @property
    def bytes(self) -> torch.Tensor:
        """View all of it, one number a byte."""

    def pin(self, device: torch.device, devices: Devices) -> bool:
        """Register it. Returns whether it is."""


class DeviceCopies:
    """The part of one snapshot that comes from devices.

    Args:
        buffer: filled.
        devices: those of this process, or others in tests.
    """

    def __init__(self, buffer: Pinnable, devices: Devices | None = None) -> None:
        self._buffer = buffer
        self._devices = devices or Devices()
        self._streams: dict[torch.device, Any] = {}
        self._begun: dict[torch.device, Any] = {}  # where the trainer was when the snapshot was asked for
        self._done: dict[TensorCopy, Any] = {}
        self._loose: dict[torch.device, Any] = {}

    def takes(self, move: TensorCopy) -> bool:
        """Whether a tensor is copied here: it is not in host memory."""
        return self._devices.has(move.tensor) or not move.tensor.is_cpu

    def begin(self, moves: Sequence[TensorCopy]) -> None:
        """Start the deferred copies, each device's on a side stream behind what the trainer, who calls this, has queued."""
        chosen = [move for move in moves if self._devices.has(move.tensor)]
        for device in {move.tensor.device for move in chosen}:
            # Another thread's stream knows nothing of the trainer's, which may not be the device's default one.
            self._begun[device] = self._devices.mark(self._devices.current(device))
        pinned = {device for device in self._begun if self._buffer.pin(device, self._devices)}
        for move in chosen:
            device = move.tensor.device
            if device not in pinned:
                continue  # into pageable memory a copy would block: they are made one by one when their turn comes
            side = self._side_of(device)
            with self._devices.on(side, device):
                self._devices.copy(move, self._buffer.bytes, non_blocking=True)
            self._done[move] = self._devices.mark(side)

    def copy(self, move: TensorCopy) -> None:
        """Copy one tensor, or wait for its copy if it was started. On any thread."""
        event = self._done.get(move)
        if event is not None:
            event.synchronize()
        elif not self._devices.has(move.tensor):
            move.into(self._buffer.bytes)  # some other device, which torch waits for
        else:
            self._copy_now(move)

    def synchronize(self) -> None:
        """Wait until all that was started by ``copy`` is in place."""
        for stream in self._loose.values():
            stream.synchronize()
        self._loose.clear()

    def forget(self) -> None:
        """No more is copied: wait for whatever is under way, also of copies that were given up, and let go of the tensors.

        A copy that was abandoned goes on by itself. Into a shared buffer that is used again it would bring bytes of this
        snapshot, before they are hashed, so that no digest would show it.
        """
        try:
            for stream in [*self._streams.values(), *self._loose.values()]:
                stream.synchronize()
        finally:
            self._done.clear()
            self._loose.clear()
            self._streams.clear()
            self._begun.clear()

    def order(self, moves: Sequence[TensorCopy]) -> bool:
        """Let what is queued from now on wait for the copies, on the devices. Returns whether that covers all of ``moves``."""
        if not moves or any(move not in self._done for move in moves):
            return False
        for device, side in list(self._streams.items()):
            self._devices.current(device).wait_stream(side)
        return True

    def _side_of(self, device: torch.device) -> Any:
        if device not in self._streams:
            side = self._streams[device] = self._devices.stream(device)
            side.wait_event(self._begun[device])
        return self._streams[device]

    def _copy_now(self, move: TensorCopy) -> None:
        device = move.tensor.device
        with self._devices.at(device):
            stream = self._devices.current(device)
            if device in self._begun:
                stream.wait_event(self._begun[device])
            pinned = self._buffer.pin(device, self._devices)
            if pinned:
                self._loose[device] = stream  # before the copy: one that fails halfway may have been queued
            self._devices.copy(move, self._buffer.bytes, non_blocking=pinned)
