"""Runs one program of two ranks on the accelerator, each with a twin on the CPU beside it, which must equal what was saved."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file

from devices.draw import PairPlan
from devices.pair_trainer import PairTrainer, PairTwin, plain
from devices.trainer import differing
from kit.device.module import Late
from safe_ckpt import CheckpointConfig, Checkpointer, Timeouts, iter_full_tensors, load

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_LIMITS = Timeouts(barrier_s=60, lengthy_s=60, peer_stall_s=30)  # the same on both ranks, so not those of kit.limits


class PairProgram:
    """One program, on one of its ranks. ``run`` returns what was wrong here; an error is the caller's.

    Args:
        plan: drawn.
        folder: empty; of both ranks.
        late: the accelerator.
        rank: this one.
        mesh: of both ranks' devices.
    """

    def __init__(self, plan: PairPlan, folder: Path, late: Late, rank: int, mesh: DeviceMesh) -> None:
        self._plan, self._folder, self._late, self._rank, self._mesh = plan, folder, late, rank, mesh
        self._wrong: list[str] = []
        self._expected: dict[int, dict[str, torch.Tensor | None]] = {}
        self._twin = PairTwin(plan, plan.seed, rank)
        self._trainer = PairTrainer(plan, plan.seed, rank, mesh)

    def run(self) -> list[str]:
        """Train and save, go on with other objects, then load each checkpoint."""
        plan, late = self._plan, self._late
        for device in range(late.device_count()):
            torch.accelerator.synchronize(device)
        late.behave(
            seed=plan.seed * 2 + self._rank,
            chance_percent=plan.chance_percent,
            pageable_is_late=plan.pageable_is_late,
            refuses_registration=plan.refuses_registration,
        )
        with self._standing():
            cut = plan.resumes
            self._train(1, plan.steps[:cut])
            if cut and self._expected:
                self._begin_anew()
            self._train(cut + 1, plan.steps[cut:])
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
        here = torch.accelerator.current_device_index()
        for device in range(self._late.device_count()):
            stream = torch.Stream(device=torch.device("late", device))
            stream.wait_stream(torch.accelerator.current_stream(device))
            torch.accelerator.set_stream(stream)
        torch.accelerator.set_device_index(here)

    def _config(self) -> CheckpointConfig:
        plan = self._plan
        return CheckpointConfig(
            snapshot=plan.snapshot, max_in_flight=plan.max_in_flight, timeouts=_LIMITS, on_failure="raise"
        )

    def _train(self, first: int, steps: tuple[str, ...]) -> None:
        both = self._trainer, self._twin
        with Checkpointer(self._folder, self._config()) as ckpt:
            for number, after in enumerate(steps, first):
                for one in both:
                    one.step()
                    if after:
                        one.make_fresh(number)
                if after:
                    self._save(ckpt, number, after)
            if steps and not self._wrong:
                self._compare("training itself")

    def _compare(self, what: str) -> None:
        if wrong := differing(self._trainer.seen(), self._twin.seen()):
            self._wrong.append(f"{what}: {wrong}")

    def _save(self, ckpt: Checkpointer, number: int, after: str) -> None:
        both = self._trainer, self._twin
        self._expected[number * 10] = self._twin.seen() | self._generators()
        self._saved = copy.deepcopy(self._twin)
        handle = ckpt.save(number * 10, self._trainer.state)
        if after in ("gather", "export"):  # of a step that nobody has waited for
            for one in both:
                one.step()
        if after == "switch":
            self._switch()
        elif after == "other device":
            torch.accelerator.set_device_index((torch.accelerator.current_device_index() + 1) % 3)
        elif after == "wait":
            handle.wait_snapshot()
        elif after == "again":
            self._expected[number * 10 + 1] = self._twin.seen() | self._generators()
            ckpt.save(number * 10 + 1, self._trainer.state)
        elif after == "gather":
            self._gather(number)
        elif after == "export":
            self._export(ckpt, number)
        for one in both:
            if after == "touch":
                one.touch()
            one.free()

    def _generators(self) -> dict[str, torch.Tensor | None]:
        return {f"generator {number}": state for number, state in enumerate(self._late.get_rng_state_all())}

    def _gather(self, number: int) -> None:
        """Whole tensors of what the last step has queued, and of a sum that is not made yet, over the devices' group."""
        parts, sums = dict(self._trainer.model.state_dict()), [self._trainer.partial(number + at) for at in range(2)]
        expected = {**self._twin.whole(), **{f"sum{at}": whole for at, (_, whole) in enumerate(sums)}}
        parts |= {f"sum{at}": summand for at, (summand, _) in enumerate(sums)}
        del sums
        for name, found in iter_full_tensors(parts, staging_bytes=self._plan.staging_bytes):
            if (found is None) != (self._rank > 0):
                self._wrong.append(f"gathered on rank {self._rank}: {name}: {found}")
            elif found is not None and differing({name: found}, {name: expected[plain(name)]}):
                self._wrong.append(f"gathered after step {number}: {name}")

    def _export(self, ckpt: Checkpointer, number: int) -> None:
        folder, expected = self._folder / f"weights-{number}", self._twin.whole()
        ckpt.export(self._trainer.model, folder).result()
        if self._rank == 0:
            found = {plain(name): value for name, value in load_file(folder / "model.safetensors").items()}
            if wrong := differing(dict(found), dict(expected)):
                self._wrong.append(f"exported after step {number}: {wrong}")

    def _begin_anew(self) -> None:
        """Other objects, with other numbers, go on from the newest checkpoint; the twin is as it was then."""
        self._trainer = PairTrainer(self._plan, self._plan.seed + 1, self._rank, self._mesh)
        self._trainer.make_fresh(0)
        with Checkpointer(self._folder, self._config()) as ckpt:
            ckpt.resume(self._trainer.state)
        self._twin = self._saved
        self._trainer.follow(self._twin)
        self._compare("resumed")
        self._trainer.free()
        self._twin.free()

    def _load(self) -> None:
        there = {int(name.rpartition("-")[2]) for name in os.listdir(self._folder) if name.startswith("step-")}
        if there != self._expected.keys():
            self._wrong.append(f"saved {sorted(self._expected)}, there are {sorted(there)}")
        for step in sorted(there & self._expected.keys()):
            # Of other weights, and in memory that is full of other things.
            found = PairTrainer(self._plan, self._plan.seed + 1, self._rank, self._mesh)
            found.step()
            found.make_fresh(0)
            load(self._folder, found.state, step=step)
            if wrong := differing(found.seen() | self._generators(), self._expected[step]):
                self._wrong.append(f"step {step}: {wrong}")
