"""Several ranks on one disk, and one rank over sizes.

1, 2 and 4 gloo ranks save the same total, each rank its own part: the throughput should stay at the disk's limit, which is
measured in the same round by a plain write past the page cache. For one rank, what a save costs the training loop should
grow with the bytes along a line.

    python benchmarks/scaling.py --mebibytes 128 --sizes 64 128
"""

import argparse
import json
import multiprocessing
import random
import shutil
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import runner
import torch
import torch.distributed as dist
from reference import direct_write_seconds

from safe_ckpt import Checkpointer, PerRank

RANKS = (1, 2, 4)
SIZES = (64, 128, 256, 512, 1024)
TIMEOUT_S = 300.0
WAYS = ("safe_ckpt overlapped", "safe_ckpt eager")


def one_rank(rank: int, ranks: int, total_bytes: int, saves: int, folder: Path, answer: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=ranks)
    part = torch.randn(total_bytes // ranks // 4)
    taken = []
    with Checkpointer(folder / "checkpoints") as ckpt:
        for number in range(saves + 1):
            dist.barrier()
            begun = time.perf_counter()
            ckpt.save(number, {"part": PerRank({"part": part})}).result(timeout_s=TIMEOUT_S)  # the verdict on all ranks
            taken.append(time.perf_counter() - begun)
    dist.destroy_process_group()
    answer.send(taken[1:])


def together(ranks: int, total_bytes: int, saves: int, folder: Path) -> list[float]:
    """Seconds per save, of the slowest rank."""
    context = multiprocessing.get_context("spawn")
    ends, processes = [], []
    for rank in range(ranks):
        ours, theirs = context.Pipe(duplex=False)
        arguments = (rank, ranks, total_bytes, saves, folder, theirs)
        processes.append(context.Process(target=one_rank, args=arguments, daemon=True))
        processes[-1].start()
        theirs.close()
        ends.append(ours)
    columns = [_received(end) for end in ends]
    for process in processes:
        process.join()
    return [max(row) for row in zip(*columns, strict=True)]


def _received(end: Connection) -> list[float]:
    if not end.poll(TIMEOUT_S):
        raise TimeoutError(f"a rank was not done within {TIMEOUT_S:.0f} s")
    seconds: list[float] = end.recv()  # EOFError when it died; the others end with this process
    return seconds


def over_ranks(mebibytes: int, rounds: int, saves: int, folder: Path) -> dict[str, Any]:
    total_bytes = mebibytes << 20
    raw: list[float] = []
    taken: dict[int, list[float]] = {ranks: [] for ranks in RANKS}
    for _ in range(rounds):
        raw += direct_write_seconds(folder, total_bytes, times=saves)
        for ranks in random.sample(RANKS, len(RANKS)):
            with tempfile.TemporaryDirectory(dir=folder) as own:
                taken[ranks] += together(ranks, total_bytes, saves, Path(own))
    base = statistics.median(raw)
    return {
        "total_bytes": total_bytes,
        "direct_write_s": raw,
        "durable_s": taken,
        "throughput_x_direct": {ranks: base / statistics.median(seconds) for ranks, seconds in taken.items()},
    }


def over_sizes(sizes: list[int], saves: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for way in WAYS:
        points, errors = [], []
        for size in sizes:
            arguments = ("--way", way, "--mebibytes", size, "--saves", saves, "--folder", folder)
            run = runner.run("loop.py", *arguments, timeout_s=TIMEOUT_S)
            if "error" in run:
                errors.append(run["error"])
                break
            points.append([run["state_bytes"] / (1 << 30), statistics.median(s["lost_s"] for s in run["saves"])])
        found[way] = {"points": points, "errors": errors}
        if len(points) > 1:
            found[way] |= _line(points)
    return found


def _line(points: list[list[float]]) -> dict[str, float]:
    slope, intercept = statistics.linear_regression(*zip(*points, strict=True))
    return {"seconds_per_gib": slope, "intercept_s": intercept}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mebibytes", type=int, default=768, help="total over the ranks")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES, help="of the state, for one rank")
    parser.add_argument("--folder", type=Path, default=Path("runs/bench"))
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=options.folder.resolve()))
    try:
        ranks = over_ranks(options.mebibytes, options.rounds, options.saves, folder)
        print(json.dumps({"ranks": ranks, "sizes": over_sizes(options.sizes, options.saves, folder)}))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
