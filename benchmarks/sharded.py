"""What a sharded save costs on two gloo ranks, beside ``dcp.save`` of the same FSDP2 state in the same run.

python benchmarks/sharded.py [--layers 24 --width 1400] [--rounds 3]
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import spawn_ranks, values
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from safe_ckpt import CheckpointConfig, Checkpointer, Retention, Unchanged
from safe_ckpt.core.storage.reader import drop_cache


def timed(action: Callable[[], Any]) -> float:
    """Seconds, from when all ranks are there."""
    dist.barrier()
    begun = time.monotonic()
    action()
    return time.monotonic() - begun


def cleared(rank: int, folder: Path) -> None:
    """The files lie on the disk alone."""
    dist.barrier()
    if rank == 0:
        os.sync()
        drop_cache(folder)


def stored_bytes() -> int:
    """What the kernel has read from storage for this process."""
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def resumes(
    rank: int, folder: Path, ways: dict[str, Callable[[], Any]], rounds: int, note: Callable[[str, float], None]
) -> None:
    """Resume in turn, first with all files in the page cache, then with none."""
    for where in ["cached"] * rounds + ["cold"] * rounds:
        for name, action in ways.items():
            if where == "cold":
                cleared(rank, folder)
            before = stored_bytes()
            note(f"{name}, {where}", timed(action))
            if where == "cold":
                note(f"{name}, GiB read", (stored_bytes() - before) / 2**30)


def measure(rank: int, folder: Path, layers: int, width: int, rounds: int) -> dict[str, list[float]]:
    """One rank's seconds of every round."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, width)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    state = {"model": model, "optimizer": optimizer}
    found: dict[str, list[float]] = {}

    def note(name: str, seconds: float) -> None:
        found.setdefault(name, []).append(seconds)

    with Checkpointer(
        folder / "ours", CheckpointConfig(unchanged=Unchanged(share=False), retention=Retention(keep_last=1))
    ) as ckpt:
        ckpt.prepare(state)
        for number in range(rounds + 1):
            first = " (first)" if number == 0 else ""
            begun = time.monotonic()
            note(f"safe_ckpt call{first}", timed(lambda step=number: ckpt.save(step, state)))
            ckpt.wait()
            note(f"safe_ckpt durable{first}", time.monotonic() - begun)

            def stock(path: Path = folder / f"dcp{number}") -> None:
                weights, moments = get_state_dict(model, optimizer)
                dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=path)

            note(f"dcp.save durable{first}", timed(stock))
            if number < rounds:
                dist.barrier()
                shutil.rmtree(folder / f"dcp{number}", ignore_errors=True)

        def load() -> None:
            weights, moments = get_state_dict(model, optimizer)
            whole = {"model": weights, "optimizer": moments}
            dcp.load(whole, checkpoint_id=folder / f"dcp{rounds}")
            set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)

        ways = {"safe_ckpt resume, verified": lambda: ckpt.resume(state), "dcp.load, unverified": load}
        resumes(rank, folder, ways, rounds, note)
    return found


def main() -> None:
    """Print the medians, as seconds and per GiB."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=1400)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    size = 12 * options.layers * (options.width**2 + options.width) / 2**30
    folder = Path(tempfile.mkdtemp(dir="."))
    try:
        arguments = (folder.absolute(), options.layers, options.width, options.rounds)
        by_rank = values(spawn_ranks(measure, 2, *arguments, timeout_s=900, group_timeout_s=600))
    finally:
        shutil.rmtree(folder)
    print(f"{size:.2f} GiB in {2 * options.layers} parameters and their moments, two ranks")
    for name in by_rank[0]:
        of_ranks = list(zip(*(found[name] for found in by_rank), strict=True))
        if name.endswith("GiB read"):
            print(f"{name:40} {statistics.median(map(sum, of_ranks)):8.3f} by all ranks")
            continue
        seconds = list(map(max, of_ranks))
        middle = statistics.median(seconds)
        print(f"{name:40} {middle:8.3f} s {middle / size:8.3f} s/GiB   {min(seconds):.3f} .. {max(seconds):.3f}")


if __name__ == "__main__":
    main()
