"""A transformer's training step on one device, and what a save costs it, for ``gpu/measures.py``.

- ``ceiling_gb_s``: device to host, into pinned memory, nothing else running.
- ``stall_s``: by how much the steps from a save until it is durable, the call included, took longer than undisturbed ones;
  the device is waited for at the end, not after every step.

It has **not been run on a GPU**: where it was written there is none.
"""

import argparse
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from safe_ckpt import CheckpointConfig, Checkpointer, Unchanged

GIB = 1 << 30
WIDTH, HEADS, TOKENS = 1024, 16, 512
WINDOW, WINDOWS, WARM_UP = 10, 5, 10


class Transformer:
    """A language model's training step without the language."""

    def __init__(self, mebibytes: int, batch: int, device: torch.device) -> None:
        torch.manual_seed(0)
        self.device = device
        layers = max(1, round(mebibytes * (1 << 20) / 12 / (12 * WIDTH * WIDTH)))
        layer = torch.nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True, device=device
        )
        self.model = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self._rows = torch.randn(batch, TOKENS, WIDTH, device=device)

    def step(self, gate: Callable[[], None] | None = None) -> None:
        self.optimizer.zero_grad()
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = (self.model(self._rows) - self._rows).square().mean()
        loss.backward()
        if gate is not None:
            gate()
        self.optimizer.step()

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def tensors(self) -> list[torch.Tensor]:
        states = [v for state in self.optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
        return [*(parameter.data for parameter in self.model.parameters()), *states]

    def undisturbed_s(self) -> float:
        taken = []
        for _ in range(WINDOWS):
            self.wait()
            begun = time.perf_counter()
            for _ in range(WINDOW):
                self.step()
            self.wait()
            taken.append((time.perf_counter() - begun) / WINDOW)
        return statistics.median(taken)


def ceiling_gb_s(device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    source = torch.ones(GIB, dtype=torch.uint8, device=device)
    target = torch.empty(GIB, dtype=torch.uint8, pin_memory=True)
    taken = []
    for _ in range(10):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - begun)
    return GIB / statistics.median(taken) / 1e9


def clocked(wait: Callable[[], object], since: float, into: dict[str, float], name: str) -> threading.Thread:
    """On a thread, wait for something and note when it was there."""

    def run() -> None:
        wait()
        into[name] = time.perf_counter() - since

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def save(training: Transformer, ckpt: Checkpointer, number: int, undisturbed_s: float) -> dict[str, float]:
    training.wait()
    found: dict[str, float] = {}
    begun = time.perf_counter()
    handle = ckpt.save(number, {"model": training.model, "optimizer": training.optimizer})
    found["call_s"] = time.perf_counter() - begun
    copied = clocked(lambda: handle.wait_snapshot(timeout_s=600), begun, found, "copied_s")
    durable = clocked(lambda: handle.result(timeout_s=600), begun, found, "durable_s")
    steps = 0
    while durable.is_alive() or not steps:
        training.step()
        steps += 1
    training.wait()
    found["stall_s"] = time.perf_counter() - begun - steps * undisturbed_s
    copied.join()
    handle.result(timeout_s=0)  # raises what the thread could not
    return found


def measure(snapshot: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    training = Transformer(options.mebibytes, options.batch, torch.device(options.device))
    training.step()
    state = {"model": training.model, "optimizer": training.optimizer}
    with Checkpointer(folder / snapshot, CheckpointConfig(unchanged=Unchanged(share=False), snapshot=snapshot)) as ckpt:
        ckpt.prepare(state)
        for _ in range(WARM_UP):
            training.step()
        undisturbed_s = training.undisturbed_s()
        saves = [save(training, ckpt, number, undisturbed_s) for number in range(options.saves + 1)]
        training.wait()
        expected = [tensor.clone() for tensor in training.tensors()]
        ckpt.save(options.saves + 1, state).result(timeout_s=600)
        training.step()
        ckpt.resume(state)
        found = training.tensors()
        if not all(map(torch.equal, found, expected)):
            raise SystemExit(f"{snapshot}: what was loaded is not what was saved")
    size = sum(tensor.nbytes for tensor in expected)
    copied_s = statistics.median(found["copied_s"] for found in saves[1:])
    return {
        "state_bytes": size,
        "step_s": undisturbed_s,
        "first": saves[0],
        "saves": saves[1:],
        "stall_s": statistics.median(found["stall_s"] for found in saves[1:]),
        "copy_gb_s": size / copied_s / 1e9,
    }
