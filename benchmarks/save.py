"""What a save costs: how long the loop stands still, and when the bytes are durable. Ratios within one run, not seconds.

Ways to save the same state, in shuffled order, several rounds: torch.save with fsync, Checkpointer, and a plain write of
as many bytes with O_DIRECT as the disk's own measure. What is loaded back is compared.

    python benchmarks/save.py --mebibytes 512 --rounds 5
"""

import argparse
import mmap
import os
import random
import shutil
import statistics
import time
from pathlib import Path

import torch

from safe_ckpt import CheckpointConfig, Checkpointer, Retention

WORK = Path("runs/bench")


def state_of(mebibytes: int) -> dict[str, torch.Tensor]:
    count = mebibytes * (1 << 20) // 4 // 16
    return {f"layer{i}": torch.randn(count) for i in range(16)}


def torch_save(state, folder):
    begun = time.perf_counter()
    with (folder / "x.pt").open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    taken = time.perf_counter() - begun
    return taken, taken, lambda: torch.load(folder / "x.pt", weights_only=True)


def raw_write(state, folder):
    size = sum(t.nbytes for t in state.values())
    with mmap.mmap(-1, size) as memory:
        memory[:] = b"\1" * size
        view = memoryview(memory)
        begun = time.perf_counter()
        fd = os.open(folder / "raw", os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
        for at in range(0, size, 8 << 20):
            os.pwrite(fd, view[at : at + (8 << 20)], at)
        os.fsync(fd)
        os.close(fd)
        taken = time.perf_counter() - begun
        view.release()
    return taken, taken, None


def main(mebibytes: int, rounds: int) -> None:
    shutil.rmtree(WORK, ignore_errors=True)
    state = state_of(mebibytes)
    copy = torch.empty(sum(t.numel() for t in state.values()))
    results: dict[str, list[tuple[float, float]]] = {}
    config = CheckpointConfig(retention=Retention(keep_last=1))
    with Checkpointer(WORK / "ours", config) as ckpt:

        def ours(state, folder):
            begun = time.perf_counter()
            handle = ckpt.save(int(begun * 1000), {"model": state})
            called = time.perf_counter() - begun
            handle.result(timeout_s=300)
            durable = time.perf_counter() - begun
            target = {"model": {key: torch.zeros_like(value) for key, value in state.items()}}
            return called, durable, lambda: (ckpt.resume(target), target["model"])[1]

        def memcpy(state, folder):
            begun = time.perf_counter()
            torch.cat(list(state.values()), out=copy)
            taken = time.perf_counter() - begun
            return taken, taken, None

        ways = {"torch.save + fsync": torch_save, "Checkpointer": ours, "O_DIRECT write": raw_write, "memcpy": memcpy}
        for number in range(rounds + 1):
            for name, way in random.sample(list(ways.items()), len(ways)):
                folder = WORK / name.split()[0]
                folder.mkdir(parents=True, exist_ok=True)
                called, durable, load = way(state, folder)
                if number:  # the first round warms up
                    results.setdefault(name, []).append((called, durable))
                if load is not None and number == rounds:
                    loaded = load()
                    if not all(loaded[key].equal(state[key]) for key in state):
                        raise SystemExit(f"{name}: what was loaded is not what was saved")
    medians = {
        name: [statistics.median(column) for column in zip(*rows, strict=True)] for name, rows in results.items()
    }
    base, copied = medians["O_DIRECT write"][1], medians["memcpy"][0]
    print(f"{mebibytes} MiB, {rounds} rounds, medians; {os.cpu_count()} cores")
    print(f"{'':<20} | {'call':>8} | x memcpy | {'durable':>8} | x O_DIRECT")
    for name, (called, durable) in medians.items():
        print(f"{name:<20} | {called:6.3f} s | {called / copied:8.2f} | {durable:6.3f} s | {durable / base:10.2f}")
    shutil.rmtree(WORK)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mebibytes", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    main(**vars(parser.parse_args()))
