"""Figures and races of one device: copies to the host, the gate before an optimizer's step, what a save costs, what is left.

Each prints one line for the table of ``check.py``, or fails.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

import backends
import cuda_copies
import psutil
import torch
from cuda_copies import GIB, Transformer, ceiling_gb_s, clocked, measure
from safetensors.torch import load_file

from safe_ckpt import CheckpointConfig, Checkpointer, Retention, Unchanged
from safe_ckpt.core.staging import device

SAVES, GATED_MEBIBYTES = 4, 256


def never_pinned() -> None:
    """As where CUDA refuses to pin host memory."""
    device.Devices.register = lambda *_: None  # type: ignore[method-assign]


def copies(options: argparse.Namespace, how: str) -> str:
    """How fast the state reaches the host beside training, of what the device can do at most."""
    if how == "unpinned":
        never_pinned()
    options.saves = SAVES
    found = measure("overlapped", options, options.folder)
    ceiling = ceiling_gb_s(torch.device(options.device))
    texts = [f"{name} {value:.3g}" for name, value in found.items() if isinstance(value, float)]
    return f"{', '.join(texts)}; ceiling {ceiling or 0:.3g} GB/s"


def gate(options: argparse.Namespace, how: str) -> str:
    """A step that comes right behind the save changes nothing of what is saved: every number is that of the save."""
    if "unpinned" in how:
        never_pinned()
    rows = GATED_MEBIBYTES * (1 << 20) // 4 // 16
    model = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(rows, device=options.device)) for _ in range(16))
    for parameter in model.parameters():
        parameter.grad = -torch.ones_like(parameter)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)  # every number is that of the step
    stream: Any = contextlib.nullcontext()
    if "side stream" in how and options.device == "cuda":
        stream = torch.cuda.stream(torch.cuda.Stream())
    snapshot: Any = how.partition(",")[0]
    config = CheckpointConfig(snapshot=snapshot, retention=Retention(keep_last=2))
    rounds = 12
    with stream, Checkpointer(options.folder / "run", config) as ckpt:
        for step in range(1, rounds + 1):
            optimizer.step()
            handle = ckpt.save(step, {"model": model, "optimizer": optimizer})
            for _ in range(3):
                optimizer.step()  # behind the gate
            path = handle.result().path
            found = {float(value) for one in load_file(path / "model.safetensors").values() for value in one.aminmax()}
            if found != {4.0 * step - 3}:
                raise SystemExit(f"the save of {4 * step - 3} has {sorted(found)}")
    return f"{rounds} saves of {GATED_MEBIBYTES} MiB, each exact"


def stall(options: argparse.Namespace, way: str) -> str:
    """By how much the steps from a save until it is durable, its call included, took longer than undisturbed ones."""
    training = Transformer(options.mebibytes, options.batch, torch.device(options.device))
    training.step()
    backend = backends.make(way)
    backend.setup(training.model, training.optimizer, options.folder)
    backend.prepare()
    for _ in range(cuda_copies.WARM_UP):
        training.step()
    undisturbed_s = training.undisturbed_s()
    size = sum(tensor.nbytes for tensor in training.tensors())
    rows = [_one(training, backend, number, undisturbed_s) for number in range(SAVES + 1)]
    training.wait()
    expected = [tensor.clone() for tensor in training.tensors()]
    backend.save(SAVES + 1)
    backend.finish()
    training.step(backend.gate)
    backend.load(training.model, training.optimizer)
    if not all(map(torch.equal, training.tensors(), expected)):
        raise SystemExit("what was loaded is not what was saved")
    backend.close()
    first, *others = rows
    middle = {name: statistics.median(row[name] for row in others) / size * GIB for name in first}
    told = ", ".join(f"{name} {value:.3f}" for name, value in middle.items())
    return f"s/GiB: {told}; first save lost {first['lost'] / size * GIB:.3f}; a step is {undisturbed_s:.3f} s"


def _one(training: Transformer, backend: Any, number: int, undisturbed_s: float) -> dict[str, float]:
    training.wait()
    found: dict[str, float] = {}
    begun = time.perf_counter()
    backend.save(number)
    call_s = time.perf_counter() - begun
    durable = clocked(backend.finish, begun, found, "durable")
    steps = 0
    while durable.is_alive() or not steps:
        training.step(backend.gate)
        steps += 1
    training.wait()
    lost_s = time.perf_counter() - begun - steps * undisturbed_s
    if "durable" not in found:
        raise SystemExit("the save failed")
    return {"call": call_s, "lost": lost_s, **found}


def left(options: argparse.Namespace, _: str) -> str:
    """Saves of both kinds, closed: no memory of the device or of /dev/shm, and no process, stays."""
    training = Transformer(min(options.mebibytes, 256), options.batch, torch.device(options.device))
    training.step()
    state = {"model": training.model, "optimizer": training.optimizer}

    def held() -> tuple[int, set[str], int]:
        gc.collect()
        training.wait()
        allocated = torch.cuda.memory_allocated() if options.device == "cuda" else 0
        return allocated, set(os.listdir("/dev/shm")), len(psutil.Process().children(recursive=True))

    before = held()
    for snapshot in ("eager", "overlapped"):
        config = CheckpointConfig(unchanged=Unchanged(share=False), snapshot=snapshot, retention=Retention(keep_last=1))
        with Checkpointer(options.folder / snapshot, config) as ckpt:
            for number in range(10):
                ckpt.save(number, state)
                training.step()
    after = held()
    own = {name for name in after[1] - before[1] if "safe_ckpt" in name}
    if own or after[2] > before[2] or after[0] > before[0] + (64 << 20):
        raise SystemExit(f"before {before[0]} bytes, {before[2]} processes; after {after[0]}, {after[2]}, {own}")
    return f"{after[0] - before[0]:+d} bytes of the device, {after[2] - before[2]:+d} processes"


ACTIONS: dict[str, Callable[[argparse.Namespace, str], str]] = {
    "copies": copies,
    "gate": gate,
    "stall": stall,
    "left": left,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("action", choices=ACTIONS)
    parser.add_argument("how", nargs="?", default="")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--mebibytes", type=int, default=2048)
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    options.batch = 8
    if options.device == "cpu":  # to see that it works
        options.batch = cuda_copies.WINDOW = cuda_copies.WINDOWS = cuda_copies.WARM_UP = 1
        cuda_copies.WIDTH, cuda_copies.TOKENS = 128, 32
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    print(ACTIONS[options.action](options, options.how), flush=True)


if __name__ == "__main__":  # peers that spawn a process import this file again
    main()
