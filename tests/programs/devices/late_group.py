"""Two ranks with the process group of ``kit.device``, asked for one thing by name: ``late_group.py NAME RANK MEETING``."""

import json
import os
import signal
import sys
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial

from kit import device
from safe_ckpt import iter_full_tensors
from safe_ckpt.core.coordination import process_groups
from safe_ckpt.core.sharding import dtensor, timeouts
from safe_ckpt.errors import SafeCheckpointError

NAME, RANK, MEETING = sys.argv[1], int(sys.argv[2]), sys.argv[3]
late = device.load()
device.register_group()


def begin(timeout_s):
    limit = timedelta(seconds=timeout_s)
    dist.init_process_group(
        "cpu:gloo,late:late", init_method=f"file://{MEETING}", rank=RANK, world_size=2, timeout=limit
    )


def say(*words):
    print(json.dumps(words), flush=True)


def meet():
    """On the host: what one rank waits for, the other takes part in, and so its streams go on."""
    dist.all_reduce(torch.zeros(1))


def promises():
    """What it is for: tensors of the device alone, on a stream, in order, with no wait of the host."""
    begin(30)
    backend = dist.group.WORLD._get_backend(torch.device("late"))
    try:
        backend.allreduce([torch.ones(2)])
    except RuntimeError as error:
        say("a host tensor", "dense tensors of the device" in str(error))
    numbers = torch.zeros(4, device="late:1")
    numbers.add_(RANK + 1)
    work = dist.all_reduce(numbers, async_op=True)
    say("nothing is done before somebody waits", late.waiting() > 2, late.operations() == 0)
    meet()
    with torch.Stream(device="late:1"):
        apart = torch.empty(4, device="late:1").copy_(numbers).tolist()  # a stream that waits for nobody
    say("the collective is on a stream of its own", apart != [3.0] * 4)
    work.wait()
    say("the host does not wait", late.waiting() > 0)
    meet()
    numbers.mul_(2)
    say("what follows on the current stream comes after it", numbers.tolist() == [6.0] * 4)
    if RANK == 0:
        numbers.add_(1)
        dist.all_reduce(numbers)
        say("who waits is not waited for by the other host", numbers.tolist() == [13.0] * 4)
        dist.barrier()
    else:
        dist.all_reduce(numbers)
        say("who waits is not waited for by the other host", True)
        dist.barrier()
    dist.destroy_process_group()


def nobody_comes():
    """The process ends when others do not come in time."""
    begin(2)
    if RANK == 0:
        numbers = torch.ones(2, device="late")
        dist.all_reduce(numbers)
        numbers.tolist()
        say("alive")
    signal.pause()  # rank 1 stays until it is killed


def lost_in_a_reduction():
    """Rank 1 is killed where it would reduce: rank 0 must not wait in the device for it."""
    begin(60)
    mesh = DeviceMesh("late", [0, 1])
    ours = torch.ones(3, device="late")
    state = {"sum": DTensor.from_local(ours, mesh, [Partial()], run_check=False)}
    if RANK:
        dtensor.reduced = lambda tensor: os.kill(os.getpid(), signal.SIGKILL)
    threading.Timer(90, os._exit, (3,)).start()
    began = time.monotonic()
    try:
        list(iter_full_tensors(state, timeout_s=80))
    except SafeCheckpointError as error:
        say(type(error).__name__, list(getattr(error, "ranks", ())), time.monotonic() - began < 60)
    os._exit(0)


def longer_timeouts():
    """The timeout of the devices' group is raised, and put back, though it has no setter of gloo's and NCCL's name."""
    begin(30)
    groups = process_groups.process_groups(None)
    backend = dist.group.WORLD._get_backend(torch.device("late"))
    before = backend.options._timeout.total_seconds()
    with timeouts.raised(groups, 300):
        within = backend.options._timeout.total_seconds()
    say(hasattr(backend, "_set_default_timeout"), before, within, backend.options._timeout.total_seconds())
    dist.destroy_process_group()


globals()[NAME]()
