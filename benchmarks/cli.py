"""The command line: listing many checkpoints, and verifying against reading the same bytes, as a ratio.

python benchmarks/cli.py [--folder DIR] [--size-mib N] [--checkpoints N] [--rounds N]
"""

import argparse
import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from disk import CHUNK, evict

from safe_ckpt import Checkpointer
from safe_ckpt.core.formats.manifest import FileEntry, Manifest
from safe_ckpt.tools.inspection.check import plan_tasks, verify_tasks

FILES = ("model.safetensors", "optimizer.pt", "trainer.json")


def make_checkpoints(folder: Path, size: int) -> dict[str, Path]:
    """One state in the formats that carry checksums."""
    state = {f"w{index}": torch.randint(0, 255, (size // 16,), dtype=torch.uint8) for index in range(16)}
    with Checkpointer(folder / "ours") as ckpt:
        ours = ckpt.save(1, {"model": state}).result().path
    torch.save(state, folder / "stock.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about a single process
        dcp.save(state, checkpoint_id=folder / "dcp", no_dist=True)
    return {"safe_ckpt": ours, "torch.save": folder / "stock.pt", "dcp": folder / "dcp"}


def files_of(path: Path) -> list[Path]:
    return [path] if path.is_file() else [file for file in sorted(path.iterdir()) if file.is_file()]


def read_like_dd(path: Path, *, direct: bool) -> float:
    """Seconds that reading takes, in one thread, 8 MiB at a time, into the same memory."""
    began = time.perf_counter()
    with mmap.mmap(-1, CHUNK) as memory, memoryview(memory) as room:
        for file in files_of(path):
            fd = os.open(file, os.O_RDONLY | (os.O_DIRECT if direct else 0))
            at = 0
            while count := os.preadv(fd, [room], at):
                at += count
            os.close(fd)
    return time.perf_counter() - began


def verify(path: Path) -> float:
    began = time.perf_counter()
    verdict = verify_tasks([plan_tasks(path)])[0]
    seconds = time.perf_counter() - began
    assert verdict.state != "damaged", verdict
    return seconds


def compare(path: Path, rounds: int, *, cached: bool) -> dict[str, float]:
    """Both in turn, so that what else the machine does hits both."""
    size = sum(file.stat().st_size for file in files_of(path))
    reading, verifying = [], []
    for _ in range(rounds):
        if not cached:
            evict(files_of(path))
        reading.append(read_like_dd(path, direct=not cached))
        if cached:
            read_like_dd(path, direct=False)
        verifying.append(verify(path))
    best = {"read_gb_s": size / min(reading) / 1e9, "verify_gb_s": size / min(verifying) / 1e9}
    ratios = [one / other for one, other in zip(reading, verifying, strict=True)]
    return {**best, "ratio_of_best": min(reading) / min(verifying), "median_of_ratios": statistics.median(ratios)}


def make_many(folder: Path, count: int) -> None:
    for step in range(count):
        place = folder / f"step-{step:08d}"
        place.mkdir(parents=True)
        files = [FileEntry(path=name, size_bytes=1 << 30, xxh3_128=f"{step:032x}", rank=0) for name in FILES]
        manifest = Manifest(
            files=tuple(files),
            name=place.name,
            sequence=step,
            step=step,
            op_id=f"{step:032x}",
            world_size=8,
            metrics={"loss": 1},
        )
        (place / "manifest.json").write_bytes(manifest.to_bytes())


def list_many(folder: Path, rounds: int) -> dict[str, float]:
    found = []
    for _ in range(rounds):
        began = time.perf_counter()
        command = [sys.executable, "-m", "safe_ckpt.tools.cli", "list", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found.append(time.perf_counter() - began)
    return {"rows": len(done.stdout.splitlines()) - 1, "best_s": min(found), "median_s": statistics.median(found)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/bench-cli"))
    parser.add_argument("--size-mib", type=int, default=2048)
    parser.add_argument("--checkpoints", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    shutil.rmtree(options.folder, ignore_errors=True)
    options.folder.mkdir(parents=True)
    try:
        make_many(options.folder / "many", options.checkpoints)
        found: dict[str, object] = {"list": list_many(options.folder / "many", options.rounds)}
        for name, path in make_checkpoints(options.folder, options.size_mib << 20).items():
            for cached in (True, False):
                found[f"{name}, {'cached' if cached else 'from disk'}"] = compare(path, options.rounds, cached=cached)
        print(json.dumps(found, indent=1))
    finally:
        shutil.rmtree(options.folder)


if __name__ == "__main__":
    main()
