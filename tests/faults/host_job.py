"""A training job over several hosts that checks itself, for tests that kill it, cut it apart or let two of it run.

A few MiB a save: of rank 0, of each rank, and spread over all. At the start it resumes, compares every byte with what belongs
to that step, and says which step it is; then it trains and saves without pause. A save that fails by name is told, and training
goes on. Every line ends with the time on the machine's monotonic clock, which all hosts share::

    HELD 0 0.01         this rank has the directory, so many seconds after all ranks had come
    RESUMED 0 17        every byte of step 17 came back on this rank; 0 is a fresh start
    SAVING 0 18         this rank calls save
    COMMITTED 18        rank 0 was told that it is committed; the others say AGREED with their rank
    FAILED 0 18 PeerLostError -     this rank was told that it is not; of a DirectoryInUseError, also who holds the directory
    CLOSED 0            it was asked to stop
"""

import os
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from job import content
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from safe_ckpt import CheckpointConfig, Checkpointer, Health, PerRank, Retention, SafeCheckpointError, Timeouts
from safe_ckpt.errors import DirectoryInUseError

FLOATS = 1 << 17  # of each part: half a MiB
LEASE_S, PEER_STALL_S, BARRIER_S = 3.0, 2.0, 20.0
TIMES = Timeouts(lengthy_s=60, barrier_s=BARRIER_S, peer_stall_s=PEER_STALL_S, shutdown_s=5)

RANDOM = Health(action="warn")  # of the bytes that are saved some look like NaN


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a job is told.

    Attributes:
        folder: of its checkpoints.
        lines: the file for what it says.
        master: the address of rank 0's host.
        port: a free one there.
        size: how many ranks.
        keep_last: how many checkpoints are kept; None for all.
        leap: the first step that it saves is so much larger than the one that it resumed.
        pauses: whether it waits for each save, or begins the next one now and then before this one is done.
        stop: it stops when there is a file of this name.
    """

    folder: Path
    lines: Path
    master: str
    port: int
    size: int = 4
    keep_last: int | None = 1
    leap: int = 1
    pauses: bool = False
    stop: Path | None = None


def lead(plan, rank):
    """One rank of it, to its end."""
    os.dup2(os.open(plan.lines, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
    try:
        train(plan, rank)
    except BaseException as error:
        say("ERROR", rank, repr(error))
        os._exit(1)


def train(plan, rank):
    torch.set_num_threads(1)  # see tests/faults/conftest.py
    os.environ.update(MASTER_ADDR=plan.master, MASTER_PORT=str(plan.port))
    # Longer than any outage that is tried here: whether the ranks can train is not our matter.
    times = timedelta(seconds=120)
    dist.init_process_group("gloo", rank=rank, world_size=plan.size, timeout=times)
    state = Trained(rank, plan.size)
    dist.barrier()
    begun = time.monotonic()
    config = CheckpointConfig(
        timeouts=TIMES, retention=Retention(keep_last=plan.keep_last), lease_s=LEASE_S, health=RANDOM
    )
    with Checkpointer(plan.folder, config) as ckpt:
        say("HELD", rank, round(time.monotonic() - begun, 2))
        info = ckpt.resume(state.parts)
        step = info.step if info else 0
        if info:
            state.compare(step)
        say("RESUMED", rank, step)
        step += plan.leap - 1
        while not told_to_stop(plan):
            step += 1
            state.fill(step)
            say("SAVING", rank, step)
            save(ckpt, state, step, rank, waits=plan.pauses or step % 3 > 0)
    say("CLOSED", rank)
    dist.destroy_process_group()


def save(ckpt, state, step, rank, *, waits):
    try:
        handle = ckpt.save(step, state.parts)
        state.wipe()
        if waits:  # otherwise the next save comes before this one is done
            handle.result(timeout_s=80)
            say(*(("AGREED", rank, step) if rank else ("COMMITTED", step)))
    except SafeCheckpointError as error:
        holder = error.host if isinstance(error, DirectoryInUseError) else "-"
        say("FAILED", rank, step, type(error).__name__, holder, "|", str(error).replace("\n", " "))
        if isinstance(error, DirectoryInUseError):
            os._exit(3)


class Trained:
    """What is saved: every element of it says to which step and rank it belongs."""

    def __init__(self, rank, size):
        self._rank, self._size = rank, size
        self._spread = distribute_tensor(torch.zeros(FLOATS), init_device_mesh("cpu", (size,)), [Shard(0)])
        self.parts = {
            "w": {"t": torch.zeros(FLOATS)},
            "s": {"t": self._spread, "step": 0},
            "own": PerRank({"t": torch.zeros(FLOATS)}),
            "step": 0,
        }

    def fill(self, step):
        self.parts["step"] = self.parts["s"]["step"] = step
        for tensor, expected in self._pairs(step):
            tensor.copy_(expected)

    def wipe(self):
        for tensor, _ in self._pairs(0):
            tensor.zero_()

    def compare(self, step):
        same = self.parts["step"] == self.parts["s"]["step"] == step
        for tensor, expected in self._pairs(step):
            same &= tensor.view(torch.int32).equal(expected.view(torch.int32))
        if not same:
            raise AssertionError(f"step {step} came back with other bytes")

    def _pairs(self, step):
        yield self.parts["w"]["t"], content(step, 0, FLOATS)
        yield self._spread.to_local(), content(step, 9, FLOATS).chunk(self._size)[self._rank]
        yield self.parts["own"].value["t"], content(step, self._rank + 1, FLOATS)


def told_to_stop(plan):
    """Every rank learns of it before the same step; that is what keeps them together, too."""
    told = torch.tensor([float(plan.stop is not None and plan.stop.exists())])
    dist.all_reduce(told, op=dist.ReduceOp.MAX)
    return bool(told.item())


def say(*words):
    # One write: a killed process says a line or does not.
    os.write(1, f"{' '.join(map(str, words))} @{time.monotonic():.3f}\n".encode())
