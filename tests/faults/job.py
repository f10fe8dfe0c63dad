"""A training job that checks itself, for tests that kill it. Started by test_kill.py.

Two ranks, 64 MiB a save: of rank 0, of each rank, and spread over both. At the start it resumes, compares every byte with what
belongs to that step, and says which step it is; then it saves without pause and says when a save was reported committed.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from safe_ckpt import CheckpointConfig, Checkpointer, Health, PerRank, Retention, Timeouts

SHARED, SPREAD, OWN = 4 << 20, 4 << 20, 4 << 20  # floats: 16 MiB of rank 0, 16 MiB spread over the ranks, 16 MiB a rank

RANDOM = Health(action="warn")  # of the bytes that are saved some look like NaN

CONFIG = CheckpointConfig(
    health=RANDOM,
    timeouts=Timeouts(lengthy_s=60, barrier_s=30, peer_stall_s=5, shutdown_s=10),
    retention=Retention(keep_last=1),
)


def content(step, rank, count):
    """What belongs to a step: different in every element and between any two steps and ranks."""
    return (
        (torch.arange(count, dtype=torch.int64) * 2654435761 + step * 97 + rank * 31)
        .to(torch.int32)
        .view(torch.float32)
    )


def main(folder, rank, world_size, store):
    torch.set_num_threads(1)  # see tests/faults/conftest.py
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    ckpt = Checkpointer(folder, CONFIG)
    if rank == 0:
        say("LEFT", *(len(list((folder / ".safe_ckpt" / part).glob("*"))) for part in ("pending", "trash")))
    spread = distribute_tensor(torch.zeros(SPREAD), init_device_mesh("cpu", (world_size,)), [Shard(0)])
    state = {
        "w": {"t": torch.zeros(SHARED)},
        "s": {"t": spread, "step": 0},
        "own": PerRank({"t": torch.zeros(OWN)}),
        "step": 0,
    }
    info = ckpt.resume(state)
    step = info.step if info else 0
    if info:
        assert state["step"] == step
        same = state["w"]["t"].view(torch.int32).equal(content(step, 0, SHARED).view(torch.int32))
        part = content(step, 9, SPREAD).chunk(world_size)[rank]
        same &= spread.to_local().view(torch.int32).equal(part.view(torch.int32)) and state["s"]["step"] == step
        same &= state["own"].value["t"].view(torch.int32).equal(content(step, rank + 1, OWN).view(torch.int32))
        assert same, f"step {step} came back with other bytes"
    say("RESUMED", rank, step)
    while True:
        step += 1
        state["step"] = state["s"]["step"] = step
        spread.to_local().copy_(content(step, 9, SPREAD).chunk(world_size)[rank])
        state["w"]["t"].copy_(content(step, 0, SHARED))
        state["own"].value["t"].copy_(content(step, rank + 1, OWN))
        if rank == 0:
            say("SAVING", step)
        handle = ckpt.save(step, state)
        state["w"]["t"].zero_()
        spread.to_local().zero_()
        if step % 3:  # now and then the next save comes before this one is done
            handle.result(timeout_s=50)
            if rank == 0:
                say("COMMITTED", step)


def say(*words):
    # One write: a killed process says a line or does not.
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def lead(folder, store, lines, environment):
    """Both ranks in a session of their own, from a process that has imported torch already. What they say goes to a file."""
    os.setsid()
    os.environ.update(environment)
    descriptor = os.open(lines, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    rank = 1 if os.fork() == 0 else 0
    try:
        main(folder, rank, 2, store)
    except BaseException as error:
        say("ERROR", rank, repr(error))
        os._exit(1)


if __name__ == "__main__":
    folder, rank, world_size, store = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    if rank == 0:
        for other in range(1, world_size):
            subprocess.Popen([sys.executable, __file__, str(folder), str(other), str(world_size), store])
    try:
        main(folder, rank, world_size, store)
    except BaseException as error:
        say("ERROR", rank, repr(error))
        time.sleep(0.2)
        raise
