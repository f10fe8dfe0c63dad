"""What a save costs its caller when nothing but values has changed since the one before: call and gate, in milliseconds.

python benchmarks/known_plans.py [--parameters 22 5000] [--sharded 1500] [--ranks 2 4] [--entries 100000]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import spawn_ranks, values
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from safe_ckpt import CheckpointConfig, Checkpointer, Retention, Unchanged

SAVES = 7
CONFIG = {"retention": Retention(keep_last=1)}


def calls(folder: Path, state: dict[str, Any], snapshot: str, forward_s: float, step: Any = None) -> list[float]:
    """Seconds of call and gate of each save; the first one plans. ``forward_s`` passes before the step comes to the gate."""
    found = []
    with Checkpointer(folder, CheckpointConfig(unchanged=Unchanged(share=False), snapshot=snapshot, **CONFIG)) as ckpt:
        ckpt.prepare(state)
        time.sleep(forward_s)
        for number in range(SAVES):
            if dist.is_initialized():
                dist.barrier()
            begun = time.perf_counter()
            handle = ckpt.save(number, state)
            called = time.perf_counter() - begun
            if step is not None:
                time.sleep(forward_s)  # forward and backward of a step
                begun = time.perf_counter()
                handle.wait_snapshot()  # what the gate waits for
                called += time.perf_counter() - begun
                step()
            found.append(called)
            handle.result(300)
    return found


def adam(module: torch.nn.Module) -> torch.optim.Optimizer:
    """An optimizer that has state."""
    optimizer = torch.optim.AdamW(module.parameters(), foreach=False)
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return optimizer


def replicated(folder: Path, parameters: int, snapshot: str) -> list[float]:
    """A module of so many parameters and AdamW: four times as many tensors."""
    width = 1400 if parameters < 100 else 32
    model = torch.nn.ModuleList(torch.nn.Linear(width, width, bias=False) for _ in range(parameters))
    optimizer = adam(model)
    return calls(folder, {"model": model, "optimizer": optimizer}, snapshot, 1.0, optimizer.step)


def sharded(rank: int, folder: Path, layers: int, snapshot: str) -> list[float]:
    """FSDP2 layers with AdamW: eight tensors each."""
    del rank
    torch.set_num_threads(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(layers)))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return calls(folder, {"model": model, "optimizer": adam(model)}, snapshot, 1.0)


def entries(rank: int, folder: Path, count: int) -> list[float]:
    """One dict of so many DTensors."""
    del rank
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parts = (DTensor.from_local(torch.zeros(8), mesh, [Shard(0)], run_check=False) for _ in range(count))
    return calls(folder, {"w": {f"layers.{number}.weight": part for number, part in enumerate(parts)}}, "eager", 0.0)


def note(what: str, seconds: list[float]) -> None:
    """One line of JSON."""
    ms = [round(1e3 * one, 2) for one in seconds]
    print(json.dumps({"what": what, "first_ms": ms[0], "later_ms": ms[1:], "median_ms": statistics.median(ms[1:])}))


def main() -> None:
    """Print one line for each way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=int, nargs="*", default=[22, 5000])
    parser.add_argument("--sharded", type=int, nargs="*", default=[1500], help="layers")
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--entries", type=int, nargs="*", default=[100_000])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=".") as place:
        folder = Path(place).absolute()
        for snapshot in ("overlapped", "eager"):
            for count in options.parameters:
                note(f"{snapshot}, {4 * count} tensors", replicated(folder / f"{snapshot}{count}", count, snapshot))
            for layers in options.sharded:
                for ranks in options.ranks:
                    arguments = (folder / f"{snapshot}{layers}.{ranks}", layers, snapshot)
                    by_rank = values(spawn_ranks(sharded, ranks, *arguments, timeout_s=600, group_timeout_s=500))
                    what = f"{snapshot}, {8 * layers} sharded tensors, {ranks} ranks, slowest"
                    note(what, [max(times) for times in zip(*by_rank, strict=True)])
        for count in options.entries:
            by_rank = values(spawn_ranks(entries, 2, folder / f"e{count}", count, timeout_s=900, group_timeout_s=800))
            note(f"eager, {count} DTensors, 2 ranks", [max(times) for times in zip(*by_rank, strict=True)])


if __name__ == "__main__":
    main()
