"""The two processes of programs of two ranks: started once, for many programs. Rank 0 says what was wrong on either."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
from datetime import timedelta
from pathlib import Path

_LIMIT_S = 60  # of a collective, on the devices' group and the host's
_SHARED = Path("/dev/shm")


def begin(first: int, count: int, bug: str | None) -> None:
    """In a process that becomes rank 0: start rank 1, and run the programs with it."""
    with tempfile.TemporaryDirectory(dir=_SHARED if _SHARED.is_dir() else None) as meeting:
        command = [sys.executable, "-m", "devices.pair", str(first), str(count), f"{meeting}/ranks"]
        command += ["--bug", bug] if bug is not None else []
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as other:  # in this process's group: both are killed
            _run(0, first, count, f"{meeting}/ranks")
            other.wait(_LIMIT_S)


def _run(rank: int, first: int, count: int, meeting: str) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from devices.draw import drawn_pair
    from devices.pair_program import PairProgram
    from kit import device

    late = device.load()
    device.register_group()
    torch.set_num_threads(1)  # sums have one order
    limit = timedelta(seconds=_LIMIT_S)
    dist.init_process_group(
        "cpu:gloo,late:late", init_method=f"file://{meeting}", rank=rank, world_size=2, timeout=limit
    )
    mesh = DeviceMesh("late", [0, 1], mesh_dim_names=("ranks",))
    torch.accelerator.set_device_index(0)
    for seed in range(first, first + count):
        if rank == 0:
            print(f"begin {seed}", flush=True)
        told = [tempfile.mkdtemp(dir=_SHARED if _SHARED.is_dir() else None) if rank == 0 else None]
        dist.broadcast_object_list(told)
        folder = Path(str(told[0]))
        try:
            wrong = PairProgram(drawn_pair(seed), folder, late, rank, mesh).run()
        except BaseException:  # the ranks are out of step from here on
            print(f"rank {rank}:", traceback.format_exc(limit=-6), file=sys.stderr, flush=True)
            os._exit(1)
        both: list[list[str]] = [[], []]
        dist.all_gather_object(both, wrong)
        if rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
            print(
                f"end {seed} {' | '.join(f'rank {at}: {one}' for at, of in enumerate(both) for one in of)!r}",
                flush=True,
            )
    dist.destroy_process_group()


def main() -> None:
    """Be rank 1."""
    parser = argparse.ArgumentParser()
    parser.add_argument("first", type=int)
    parser.add_argument("count", type=int)
    parser.add_argument("meeting")
    parser.add_argument("--bug")
    options = parser.parse_args()
    if options.bug is not None:
        from devices import planted

        planted.plant(options.bug)
    _run(1, options.first, options.count, options.meeting)


if __name__ == "__main__":
    main()
