"""What a save costs on one CUDA device: a transformer's training step, eager and overlapped copies.

Runs on any machine with one CUDA device and prints JSON with the device's name and the date. It has **not been run on one**:
where it was written there is none. ``--device cpu`` only shows that the script itself works; its figures mean nothing.

- ``ceiling_gb_s``: device to host, into pinned memory, nothing else running.
- ``stall_s``: by how much the steps from a save until it is durable, the call included, took longer than undisturbed ones;
  the device is waited for at the end, not after every step.

    python benchmarks/cuda_copies.py --mebibytes 4096
"""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this directory: in it this file stands before a package named cuda that torch may want

import argparse
import datetime
import json
import shutil
import statistics
import tempfile
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mebibytes", type=int, default=4096, help="parameters and Adam state together")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--saves", type=int, default=5, help="after the first one")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--folder", type=Path, default=Path("runs/bench"))
    options = parser.parse_args()
    device = torch.device(options.device)
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "none: not a measurement",
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "ceiling_gb_s": ceiling_gb_s(device),
    }
    options.folder.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=options.folder.resolve()))
    try:
        for snapshot in ("eager", "overlapped"):
            try:
                result[snapshot] = measure(snapshot, options, folder)
            except Exception as error:  # the other one is worth having all the same
                result[snapshot] = {"error": f"{type(error).__name__}: {error}"}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
