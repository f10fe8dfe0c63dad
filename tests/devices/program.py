"""Runs one program on the accelerator, with its twin on the CPU beside it. What was saved must equal the twin."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file

from devices.draw import Plan
from devices.trainer import Trainer, differing
from kit.device.module import Late
from kit.limits import QUICK
from safe_ckpt import CheckpointConfig, Checkpointer, SafeCheckpointError, WriterConfig, load

HOST = torch.device("cpu")
_LEAST_HOST_BYTES = 1 << 20
_FAILING = {"allocation": ("allocations", 101), "operation": ("operations", 307), "copy": ("copies", 61)}


class Program:
    """One program. ``run`` returns what was wrong.

    Args:
        plan: drawn.
        folder: empty.
        late: the accelerator.
    """

    def __init__(self, plan: Plan, folder: Path, late: Late) -> None:
        self._plan, self._folder, self._late = plan, folder, late
        self._wrong: list[str] = []
        self._expected: dict[int, dict[str, torch.Tensor | None]] = {}
        first, second = (torch.device("late", number) for number in plan.devices)
        self._devices = first, second
        self._twin = Trainer(plan, (HOST, HOST), plan.seed)
        self._trainer = Trainer(plan, self._devices, plan.seed)
        self._streams: list[torch.Stream] = []

    def run(self) -> list[str]:
        """Train and save, then load each checkpoint, and go on from the last."""
        torch.accelerator.synchronize(self._devices[0])
        torch.accelerator.synchronize(self._devices[1])
        plan, late = self._plan, self._late
        late.behave(
            seed=plan.seed,
            chance_percent=plan.chance_percent,
            pageable_is_late=plan.pageable_is_late,
            refuses_registration=plan.refuses_registration,
        )
        with self._standing():
            try:
                self._train()
            except (SafeCheckpointError, torch.AcceleratorError, torch.OutOfMemoryError) as error:
                if plan.fails not in ("allocation", "operation"):
                    self._wrong.append(f"{type(error).__name__}: {error}")
            finally:
                late.fail()
                late.forget_error()
            self._load()
        return self._wrong

    @contextlib.contextmanager
    def _standing(self) -> Iterator[None]:
        before = [torch.accelerator.current_stream(device) for device in range(self._late.device_count())]
        if self._plan.on_streams:
            self._switch()
        torch.accelerator.set_device_index(self._plan.stands_on)
        try:
            yield
        finally:
            for stream in before:
                torch.accelerator.set_stream(stream)
            torch.accelerator.set_device_index(0)
            for device in range(self._late.device_count()):
                torch.accelerator.synchronize(device)
            self._late.behave()

    def _switch(self) -> None:
        """Go on with other streams, behind what is queued, as a careful trainer does."""
        standing = torch.accelerator.current_device_index()
        fresh = []
        for device in set(self._devices):
            stream = torch.Stream(device=device)
            stream.wait_stream(torch.accelerator.current_stream(device))
            torch.accelerator.set_stream(stream)
            fresh.append(stream)
        self._streams = fresh
        torch.accelerator.set_device_index(standing)

    def _config(self) -> CheckpointConfig:
        plan = self._plan
        writer = WriterConfig(inline_bytes=0) if plan.through_writer else WriterConfig()
        most = _LEAST_HOST_BYTES if plan.streams_to_writer else None
        return CheckpointConfig(
            snapshot=plan.snapshot,
            max_in_flight=plan.max_in_flight,
            max_host_bytes=most,
            writer=writer,
            timeouts=QUICK,
            on_failure="warn" if plan.fails else "raise",
        )

    def _train(self) -> None:
        both = self._trainer, self._twin
        if self._plan.fails:
            kind, most = _FAILING[self._plan.fails]
            self._late.fail(**{kind: self._plan.seed % most})
        with Checkpointer(self._folder, self._config()) as ckpt:
            if self._plan.prepares:
                ckpt.prepare(self._trainer.state)
            for number, after in enumerate(self._plan.steps, 1):
                for one in both:
                    one.step()
                    if after:
                        one.make_fresh()
                if after:
                    self._save(ckpt, number, after)
            if self._plan.exports and not self._plan.fails:
                self._export(ckpt)
            for one in both:
                one.step()
            ckpt.wait()
        if wrong := differing(self._trainer.seen(), self._twin.seen()):
            self._wrong.append(f"training itself: {wrong}")

    def _save(self, ckpt: Checkpointer, number: int, after: str) -> None:
        both = self._trainer, self._twin
        self._expected[number * 10] = self._twin.seen() | self._generators()
        handle = ckpt.save(number * 10, self._trainer.state)
        if after == "switch":
            self._switch()
        elif after == "other device":
            torch.accelerator.set_device_index((torch.accelerator.current_device_index() + 1) % 3)
        elif after == "wait":
            handle.wait_snapshot()
        elif after == "again":
            self._expected[number * 10 + 1] = self._twin.seen() | self._generators()
            ckpt.save(number * 10 + 1, self._trainer.state)
        for one in both:
            if after == "touch":
                one.touch()
            elif after == "replace":
                one.replace()
            one.free()

    def _generators(self) -> dict[str, torch.Tensor | None]:
        return {f"generator {number}": state for number, state in enumerate(self._late.get_rng_state_all())}

    def _export(self, ckpt: Checkpointer) -> None:
        folder, weights = self._folder / "weights", self._twin.model.state_dict()
        expected: dict[str, torch.Tensor | None] = {name: value.detach().clone() for name, value in weights.items()}
        handle = ckpt.export(self._trainer.model, folder)
        for one in (self._trainer, self._twin):
            one.replace()
        handle.result()
        if wrong := differing(dict(load_file(folder / "model.safetensors")), expected):
            self._wrong.append(f"exported: {wrong}")

    def _load(self) -> None:
        there = {int(name.rpartition("-")[2]) for name in os.listdir(self._folder) if name.startswith("step-")}
        if not self._plan.fails and there != self._expected.keys():
            self._wrong.append(f"saved {sorted(self._expected)}, there are {sorted(there)}")
        for step in sorted(there & self._expected.keys()):
            # Of other weights, and in memory that is full of other things.
            found = Trainer(self._plan, self._devices, self._plan.seed + 1)
            found.step()
            found.make_fresh()
            load(self._folder, found.state, step=step)
            if wrong := differing(found.seen() | self._generators(), self._expected[step]):
                self._wrong.append(f"step {step}: {wrong}")
