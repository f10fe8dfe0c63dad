"""What looking at the numbers costs: the call, and the time until a save is durable, as ratios of one run.

Two pipelines save the same state in turns, one with ``health.action="mark"``, one with ``"off"``::

    python benchmarks/health_cost.py --mib 1024 --rounds 9
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import tempfile
import time
from pathlib import Path

import torch

from safe_ckpt import CheckpointConfig, Checkpointer, Health, Retention, Unchanged

_DTYPES = ("float32", "bfloat16", "float16")


def measure(folder: Path, dtype: str, mib: int, rounds: int) -> dict[str, float]:
    """Medians of each pipeline, and their ratios."""
    count = mib * (1 << 20) // 16 // getattr(torch, dtype).itemsize
    state = {"t": {str(number): torch.randn(count).to(getattr(torch, dtype)) for number in range(16)}}
    usual = CheckpointConfig(unchanged=Unchanged(share=False), retention=Retention(keep_last=1), snapshot="eager")
    off = dataclasses.replace(usual, health=Health(action="off"))
    calls: dict[str, list[float]] = {"on": [], "off": []}
    durables: dict[str, list[float]] = {"on": [], "off": []}
    with Checkpointer(folder / "on", usual) as on_ckpt, Checkpointer(folder / "off", off) as off_ckpt:
        pipelines = {"on": on_ckpt, "off": off_ckpt}
        for step in range(rounds + 2):
            for name in ("on", "off") if step % 2 else ("off", "on"):
                begun = time.perf_counter()
                handle = pipelines[name].save(step, state)
                called = time.perf_counter()
                handle.result()
                if step >= 2:
                    calls[name].append(called - begun)
                    durables[name].append(time.perf_counter() - begun)
    found = {f"call {name}": statistics.median(values) for name, values in calls.items()}
    found |= {f"durable {name}": statistics.median(values) for name, values in durables.items()}
    for what in ("call", "durable"):
        found[f"{what} ratio"] = found[f"{what} on"] / found[f"{what} off"]
    return found


def main() -> None:
    """Print a line for each type."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--dir", default=None)
    chosen = parser.parse_args()
    for dtype in _DTYPES:
        with tempfile.TemporaryDirectory(dir=chosen.dir) as folder:
            found = measure(Path(folder), dtype, chosen.mib, chosen.rounds)
        print(dtype, ", ".join(f"{name} {value:.3f}" for name, value in found.items()))


if __name__ == "__main__":
    main()
