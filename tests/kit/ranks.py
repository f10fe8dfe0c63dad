"""Running a function on several ranks of one gloo group that live on several hosts."""

import contextlib
import os
import pickle
import time
from datetime import timedelta
from pathlib import Path

from kit.hosts import behind, wait_until
from safe_ckpt.testing import Outcome
from safe_ckpt.testing.ranks import _pickled

_PORT = 29500


def spawn_over(hosts, per_host, function, *args, timeout_s=60.0, expendable=()):
    """Run ``function(rank, *args)`` on so many ranks of each host, rank 0 on the first, and collect the outcomes.

    As ``safe_ckpt.testing.spawn_ranks``. ``expendable`` ranks are killed when all others have ended.
    """
    hosts = list(hosts)
    size, work = per_host * len(hosts), hosts[0].work
    files = [work / f"outcome{time.monotonic_ns()}-{rank}" for rank in range(size)]
    group = {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": str(_PORT), "WORLD_SIZE": str(size)}
    processes = []
    for rank in range(size):
        environment = {**group, "RANK": str(rank)}
        host = hosts[rank // per_host]
        processes.append(host.fork(_run_rank, str(files[rank]), rank, function, args, env=environment))
    needed = [process for rank, process in enumerate(processes) if rank not in expendable]
    with contextlib.suppress(TimeoutError):  # the outcomes tell
        wait_until(lambda: not any(process.is_alive() for process in needed), timeout_s)
    codes = [process.exitcode for process in processes]
    for process in processes:
        if process.is_alive():
            os.kill(behind(process) or process.pid, 9)
        process.join(timeout=10)
    found = [pickle.loads(file.read_bytes()) if file.exists() else {} for file in files]
    return [Outcome(rank=rank, exit_code=codes[rank], **found[rank]) for rank in range(size)]


def _run_rank(file, rank, function, args):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    begun, result = time.monotonic(), {}
    try:
        result["value"] = function(rank, *args)
    except BaseException as error:  # the test looks at it
        result["error"] = error
    result["seconds"] = time.monotonic() - begun
    Path(f"{file}.new").write_bytes(_pickled(result))
    os.replace(f"{file}.new", file)
    if "error" not in result:
        dist.destroy_process_group()


__all__ = ["spawn_over"]
