"""The public API as users write it, for mypy alone (``make lint``): every expression has the type that is stated."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader
from transformers import Trainer as HuggingFaceTrainer
from typing_extensions import assert_type

import safe_ckpt
import safe_ckpt.accelerate
import safe_ckpt.deepspeed
from safe_ckpt import (
    CheckpointConfig,
    Checkpointer,
    CheckpointInfo,
    PerRank,
    Retention,
    RngState,
    SafeCheckpointError,
    SaveHandle,
    Telemetry,
    Timeouts,
    WriterConfig,
    consolidate_offloaded,
    iter_full_tensors,
    lengthy_timeouts,
    restore_offloaded,
    set_up_directory,
)
from safe_ckpt.errors import UnsupportedVersionError
from safe_ckpt.lightning import SafeCheckpointCallback, resumable
from safe_ckpt.transformers import SafeCheckpointMixin


def plain_torch(model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    config = CheckpointConfig(
        retention=Retention(keep_last=3, keep_best=1, metric="loss", mode="max"),
        timeouts=Timeouts(barrier_s=60),
        writer=WriterConfig(),
        telemetry=Telemetry(),
        snapshot="overlapped",
    )
    state = {"model": model, "optimizer": optimizer, "rng": PerRank(RngState()), "epoch": 0}
    with Checkpointer(folder, config) as ckpt:
        assert_type(ckpt, Checkpointer)
        assert_type(ckpt.resume(state), CheckpointInfo | None)
        assert_type(ckpt.resume(state, step=3), CheckpointInfo | None)
        handle = ckpt.save(1, state, metrics={"loss": 0.5})
        assert_type(handle, SaveHandle)
        assert_type(handle.done(), bool)
        assert_type(handle.result(timeout_s=60), CheckpointInfo)
        assert_type(handle.result().metrics["loss"], float)
        handle.wait_snapshot()
        assert_type(ckpt.export(model, "weights", max_shard_size="5GB", dtype=torch.bfloat16), SaveHandle)
        assert_type(ckpt.stop_requested, bool)
        ckpt.wait()
    assert_type(CheckpointConfig.from_yaml("settings.yaml"), CheckpointConfig)
    assert_type(safe_ckpt.__version__, str)


def pieces(model: torch.nn.Module, folder: str) -> None:
    assert_type(set_up_directory(folder, mode="fresh"), Path)
    with lengthy_timeouts(None, 3600):
        assert_type(iter_full_tensors(model, timeout_s=60), Iterator[tuple[str, torch.Tensor | None]])
    assert_type(consolidate_offloaded({"rank00": Path("swap")}, folder, ignore=["*gradient*"]), CheckpointInfo)
    restore_offloaded(folder, {"rank00": "swap"})


def lightning(module: LightningModule, loader: DataLoader[int], folder: Path) -> None:
    callback = SafeCheckpointCallback(folder, monitor="loss", save_top_k=2, resume="auto", config=CheckpointConfig())
    as_theirs: ModelCheckpoint = callback
    assert_type(resumable(loader), DataLoader[int])
    Trainer(callbacks=[as_theirs]).fit(module, resumable(loader))


def accelerate(accelerator: Accelerator, model: torch.nn.Module) -> None:
    with safe_ckpt.accelerate.register(accelerator, CheckpointConfig()) as handle:
        assert_type(handle, safe_ckpt.accelerate.Handle)
        assert_type(handle.save_state(metrics={"loss": 1.0}, step=1), Path)
        assert_type(handle.save_model(model, "weights"), Path)
        handle.load_state()
        handle.wait()
    assert_type(safe_ckpt.accelerate.SafeCheckpointPlugin().register(accelerator), safe_ckpt.accelerate.Handle)


def deepspeed(engine: Any) -> None:
    with safe_ckpt.deepspeed.install(engine, async_save=False) as handle:
        assert_type(handle, safe_ckpt.deepspeed.Handle)
        assert_type(handle.save_checkpoint("runs", tag="a", client_state={"epoch": 1}), bool)
        assert_type(handle.load_checkpoint("runs"), tuple[str | None, Any])


class SafeTrainer(SafeCheckpointMixin, HuggingFaceTrainer):
    checkpoint_config = CheckpointConfig()


def failures(error: UnsupportedVersionError) -> None:
    root: SafeCheckpointError = error
    builtin: ImportError = error
    assert_type((error.package, error.found, error.lowest, error.remedy), tuple[str, str, str, str])
    del root, builtin
