"""Copies from CUDA devices into an arena: beside the computing, on a stream of their own, into pinned memory.

Not run on any machine yet: none with CUDA was at hand. Without CUDA nothing here does anything.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from safe_ckpt.core.arena import Arena
from safe_ckpt.core.move import Move, place


class DeviceCopies:
    """The part of one snapshot that comes from devices."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._done: dict[Move, torch.cuda.Event] = {}
        self._loose: set[torch.device] = set()

    def begin(self, moves: Sequence[Move]) -> None:
        """Start the deferred copies, each device's on a side stream behind what is queued there now."""
        chosen = [move for move in moves if move.tensor.device.type == "cuda"]
        if not chosen or not self._arena.pin():
            return  # into pageable memory a copy would block: they are made one by one when their turn comes
        for device in {move.tensor.device for move in chosen}:
            side = torch.cuda.Stream(device=device)  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream(device))
            self._streams[device] = side
        for move in chosen:
            side = self._streams[move.tensor.device]
            with torch.cuda.stream(side):
                place(move, self._arena.bytes, non_blocking=True)
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record(side)
                self._done[move] = event

    def copy(self, move: Move) -> None:
        """Copy one tensor, or wait for its copy if it was started."""
        event = self._done.get(move)
        if event is not None:
            event.synchronize()
            return
        pinned = move.tensor.device.type == "cuda" and self._arena.pin()
        place(move, self._arena.bytes, non_blocking=pinned)
        if pinned:
            self._loose.add(move.tensor.device)

    def settle(self) -> None:
        """Wait until all that was started by ``copy`` is in place."""
        for device in self._loose:
            torch.cuda.current_stream(device).synchronize()
        self._loose.clear()

    def forget(self) -> None:
        """All copies are over: let go of the tensors."""
        self._done.clear()
        self._loose.clear()

    def order(self, moves: Sequence[Move]) -> bool:
        """Let what is queued from now on wait for the copies, on the devices. Returns whether that covers all of ``moves``."""
        if not moves or any(move not in self._done for move in moves):
            return False
        for device, side in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(side)
        return True
