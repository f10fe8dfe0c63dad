"""safe_ckpt: through ``Checkpointer``, through Accelerate, and the single file that the Lightning callback writes."""

from pathlib import Path
from typing import Any

import torch
from backends import Way

from safe_ckpt import CheckpointConfig, Checkpointer, Unchanged
from safe_ckpt.core.formats import file_plan, torch_archive
from safe_ckpt.core.saving.engine import Engine
from safe_ckpt.core.saving.handle import SaveHandle
from safe_ckpt.core.saving.request import Destination, Facts, SaveRequest, Snapshot
from safe_ckpt.core.state import items
from safe_ckpt.core.state.overlap import OverlapPlan

TIMEOUT_S = 300.0


class Directory(Way):
    """Every checkpoint is kept, as with the peers: deleting is in nobody's figures."""

    _handle: SaveHandle

    def __init__(self, snapshot: Any) -> None:
        self._config = CheckpointConfig(unchanged=Unchanged(share=False), snapshot=snapshot)

    def open(self) -> None:
        self._ckpt = Checkpointer(self.folder / "checkpoints", self._config)
        self._objects = {"model": self.model, "optimizer": self.optimizer}

    def prepare(self) -> None:
        self._ckpt.prepare(self._objects)

    def save(self, step: int) -> None:
        self._handle = self._ckpt.save(step, self._objects)

    def finish(self) -> None:
        self._handle.result(timeout_s=TIMEOUT_S)

    def load(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._ckpt.resume({"model": model, "optimizer": optimizer})

    def close(self) -> None:
        self._ckpt.close()


class Unprepared(Directory):
    """As a loop that calls neither ``prepare`` nor ``resume``: its first save allocates the memory."""

    def prepare(self) -> None:
        """Nothing."""


class SingleFile(Way):
    """What ``SafeCheckpointCallback`` asks of the engine, without a Trainer around it."""

    _handle: SaveHandle
    _path: Path

    def __init__(self, snapshot: Any) -> None:
        self._config = CheckpointConfig(unchanged=Unchanged(share=False), snapshot=snapshot)

    def open(self) -> None:
        self._engine = Engine(self._config)
        self._root = self._engine.hold(self.folder / "checkpoints")

    def prepare(self) -> None:
        self._engine.prepare(items.expected_bytes({"model": self.model, "optimizer": self.optimizer}, rank=0))

    def save(self, step: int) -> None:
        self._path = self._root.path / f"step={step}.ckpt"
        image = torch_archive.torch_plan(self._path.name, self.state(), strict=False, key="checkpoint")
        images = [file_plan.single(image, self._path.name)]
        overlapped = self._config.snapshot == "overlapped"
        self._handle = self._engine.save(
            SaveRequest(
                destination=Destination(home=self._root, path=self._path, kind="file"),
                payload=Snapshot(
                    files=images, overlap=OverlapPlan([self.model], [self.optimizer]) if overlapped else None
                ),
                facts=Facts(step=step),
            )
        )

    def finish(self) -> None:
        self._handle.result(timeout_s=TIMEOUT_S)

    def load(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        state = torch.load(self._path, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    def close(self) -> None:
        self._engine.close()


class Accelerated(Way):
    """``accelerator.save_state`` of a registered Accelerator."""

    def __init__(self, snapshot: Any) -> None:
        self._config = CheckpointConfig(unchanged=Unchanged(share=False), snapshot=snapshot)

    def open(self) -> None:
        from accelerate import Accelerator
        from accelerate.utils import ProjectConfiguration

        from safe_ckpt.accelerate import register

        project = ProjectConfiguration(str(self.folder), automatic_checkpoint_naming=True)
        self._accelerator = Accelerator(cpu=True, project_config=project)
        self._accelerator.prepare(self.model, self.optimizer)
        self._handle = register(self._accelerator, self._config)

    def prepare(self) -> None:
        self._handle.prepare()

    def save(self, step: int) -> None:
        self._accelerator.save_state(step=step)

    def finish(self) -> None:
        self._handle.wait()

    def load(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        del model, optimizer  # the Accelerator has them
        self._accelerator.load_state()

    def close(self) -> None:
        self._handle.remove()
