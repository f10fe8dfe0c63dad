"""Snapshots alone, many in a second: tensors on late devices, copied to one shared buffer again and again while they change.

As ``Stager`` does it: what may change at once on the trainer's thread, the rest on another one, behind a gate. What the mark
says to be in place must be, a snapshot that is over must be whole, and nothing may come into the buffer after that.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from kit.device.module import Late
from safe_ckpt.core.staging.buffer import SharedBuffer
from safe_ckpt.core.staging.device import TensorCopy
from safe_ckpt.core.staging.progress import FIRST_BYTE, read_mark
from safe_ckpt.core.staging.snapshot import CopyPlan, StagingCopy
from safe_ckpt.core.staging.worker_thread import Background

_TYPES = (torch.float32, torch.float32, torch.bfloat16, torch.uint8)
_WAIT_S = 20.0


@dataclass
class _Pair:
    """A tensor on a device, and what it must be."""

    ours: torch.Tensor
    twin: torch.Tensor
    deferred: bool
    size: int = field(init=False)

    def __post_init__(self) -> None:
        self.size = self.twin.numel() * self.twin.element_size()

    def change(self, number: float) -> None:
        for one in (self.ours, self.twin):
            one.mul_(2).add_(number)


class _Watched(SharedBuffer):
    """Looks at what is in it at each mark, as a writer that is quick would."""

    def __init__(self) -> None:
        super().__init__()
        self.expected = torch.empty(0, dtype=torch.uint8)
        self.wrong: list[str] = []

    def mark(self, end: int) -> None:
        super().mark(end)
        self.compare(min(end, len(self.expected)), f"marked to {end}")

    def compare(self, end: int, when: str) -> None:
        """Note what is not as expected up to ``end``."""
        differing = int((self.bytes[FIRST_BYTE:end] != self.expected[FIRST_BYTE:end]).sum())
        if differing:
            self.wrong.append(f"{when}: {differing} of {end - FIRST_BYTE} bytes")


class Snapshots:
    """One program. ``run`` returns what was wrong.

    Args:
        seed: of all that is drawn.
        late: the accelerator.
    """

    def __init__(self, seed: int, late: Late) -> None:
        self._chance, self._late, self._seed = random.Random(seed), late, seed
        self._wrong: list[str] = []
        chance = self._chance
        used = chance.sample(range(late.device_count()), chance.choice((1, 1, 2)))
        self._devices = [torch.device("late", number) for number in used]
        eager = chance.choice((0.0, 0.3, 0.3, 1.0))
        self._pairs = [self._made(deferred=chance.random() >= eager) for _ in range(chance.randint(1, 6))]
        self._pairs.sort(key=lambda pair: pair.deferred)  # what is copied later lies behind
        self._thread = Background("staged-copy", lambda work: work())

    def _made(self, *, deferred: bool) -> _Pair:
        chance = self._chance
        kind, shape = chance.choice(_TYPES), chance.choice(((3,), (130,), (8, 16), (1,)))
        twin = torch.full(shape, chance.randrange(4), dtype=kind)
        ours = twin.to(chance.choice(self._devices))
        if len(shape) == 2 and chance.random() < 0.5:
            twin, ours = twin.t(), ours.t()
        return _Pair(ours, twin, deferred)

    def run(self) -> list[str]:
        """Change, copy and look, a few times."""
        chance, late = self._chance, self._late
        self._drain()
        late.behave(
            seed=self._seed,
            chance_percent=chance.choice((0, 0, 0, 20, 70)),
            pageable_is_late=chance.random() < 0.5,
            refuses_registration=chance.random() < 0.3,
        )
        buffer = _Watched()
        try:
            with self._standing():
                for number in range(chance.randint(1, 4)):
                    self._snapshot(buffer, number)
        finally:
            self._thread.end()
            self._thread.join(_WAIT_S)
            late.behave()
            late.fail()
            buffer.close()
        return self._wrong + buffer.wrong

    @contextlib.contextmanager
    def _standing(self) -> Iterator[None]:
        before = [torch.accelerator.current_stream(number) for number in range(self._late.device_count())]
        if self._chance.random() < 0.6:
            self._switch()
        torch.accelerator.set_device_index(self._chance.randrange(3))
        try:
            yield
        finally:
            for stream in before:
                torch.accelerator.set_stream(stream)
            torch.accelerator.set_device_index(0)
            self._drain()

    def _drain(self) -> None:
        for number in range(self._late.device_count()):
            torch.accelerator.synchronize(number)

    def _switch(self) -> None:
        standing = torch.accelerator.current_device_index()
        for device in self._devices:
            stream = torch.Stream(device=device)
            stream.wait_stream(torch.accelerator.current_stream(device))
            torch.accelerator.set_stream(stream)
        torch.accelerator.set_device_index(standing)

    def _snapshot(self, buffer: _Watched, number: int) -> None:
        chance, pairs = self._chance, self._pairs
        for pair in pairs:
            pair.change(number + 1)
        if chance.random() < 0.2:
            self._switch()
        plans, end = self._plans()
        buffer.reserve(end)
        held = next((at for at, pair in zip(self._places(), pairs, strict=True) if pair.deferred), end)
        buffer.expected = self._bytes()
        if chance.random() < 0.15:
            self._late.fail(copies=chance.randrange(6))
        copy = StagingCopy("staged", buffer, plans, end)
        left = copy.run()
        del plans
        if copy.error is None and read_mark(buffer.memory) < held:
            self._wrong.append(f"{number}: marked {read_mark(buffer.memory)} of {held}")
        self._go_on(number, copy, left=left)
        if not copy.wait(_WAIT_S):
            self._wrong.append(f"{number}: the copy is not over")
            return
        if copy.error is None:
            buffer.compare(end, f"{number}: over")
        self._late.fail()
        buffer.bytes[:end].fill_(0x55)  # the next one has it
        if chance.random() < 0.5:
            self._drain()
            if (buffer.bytes[:end] != 0x55).any():
                self._wrong.append(f"{number}: something came after it was over")

    def _go_on(self, number: int, copy: StagingCopy, *, left: bool) -> None:
        """Training: what was copied at once changes at once, the rest behind the gate, and memory is given away."""
        chance, pairs = self._chance, self._pairs
        for at, pair in enumerate(pairs):
            if not pair.deferred and chance.random() < 0.7:
                pair.change(number + 10)
            if not pair.deferred and chance.random() < 0.3:
                del pair.ours
                pairs[at] = self._made(deferred=False)
                torch.full((130,), 9.0, device=chance.choice(self._devices))
        abandoned = left and chance.random() < 0.1
        before = chance.random() < 0.5
        if left and not abandoned and before:
            self._thread.put(copy.run_deferred)
        if chance.random() < 0.2:
            self._switch()
        if abandoned:
            copy.abandon()
        elif left and not before:
            self._thread.put(copy.run_deferred)
        if left:
            copy.pass_gate(_WAIT_S)
            for pair in pairs:
                if pair.deferred:
                    pair.change(number + 20)

    def _places(self) -> list[int]:
        places, at = [], FIRST_BYTE
        for pair in self._pairs:
            places.append(at)
            at += pair.size
        return places

    def _plans(self) -> tuple[tuple[CopyPlan, CopyPlan], int]:
        moves = [
            TensorCopy(offset=at, tensor=pair.ours, deferred=pair.deferred)
            for at, pair in zip(self._places(), self._pairs, strict=True)
        ]
        now = CopyPlan.of([move for move in moves if not move.deferred])
        later = CopyPlan.of([move for move in moves if move.deferred])
        return (now, later), FIRST_BYTE + sum(pair.size for pair in self._pairs)

    def _bytes(self) -> torch.Tensor:
        parts = [pair.twin.contiguous().view(-1).view(torch.uint8) for pair in self._pairs]
        return torch.cat([torch.zeros(FIRST_BYTE, dtype=torch.uint8), *parts])
