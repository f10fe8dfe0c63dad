"""What a type checker must refuse, each with the code that it is refused with: an ignore that is not needed is an error."""

from __future__ import annotations

import torch

from safe_ckpt import CheckpointConfig, Checkpointer, Retention, RngState, Timeouts, iter_full_tensors, set_up_directory
from safe_ckpt.lightning import SafeCheckpointCallback, resumable


def settings() -> None:
    Retention(3)  # type: ignore[call-arg]
    Retention(keep_last="3")  # type: ignore[arg-type]
    Retention(mode="largest")  # type: ignore[arg-type]
    Timeouts(barier_s=3)  # type: ignore[call-arg]
    CheckpointConfig(snapshot="lazy")  # type: ignore[arg-type]
    CheckpointConfig().snapshot = "eager"  # type: ignore[misc]


def calls(model: torch.nn.Module) -> None:
    ckpt = Checkpointer()  # type: ignore[call-arg]
    Checkpointer("run", None, None)  # type: ignore[call-arg]
    ckpt.save({"model": model})  # type: ignore[call-arg, arg-type]
    ckpt.save("1", {"model": model})  # type: ignore[arg-type]
    ckpt.save(1, [model])  # type: ignore[arg-type]
    ckpt.save(1, {"model": model}, {"loss": 1.0})  # type: ignore[call-arg]
    ckpt.save(1, {"model": model}).path  # type: ignore[attr-defined]
    ckpt.resume({"model": model}).step  # type: ignore[union-attr]
    ckpt.stop_requested = True  # type: ignore[misc]
    ckpt.resum({"rng": RngState()})  # type: ignore[attr-defined]


def pieces(model: torch.nn.Module) -> None:
    set_up_directory("run")  # type: ignore[call-arg]
    set_up_directory("run", mode="clean")  # type: ignore[arg-type]
    for name, tensor in iter_full_tensors(model):
        print(name, tensor.shape)  # type: ignore[union-attr]
    SafeCheckpointCallback(resume=True)  # type: ignore[arg-type]
    SafeCheckpointCallback(save_topk=3)  # type: ignore[call-arg]
    resumable(model)  # type: ignore[type-var]
