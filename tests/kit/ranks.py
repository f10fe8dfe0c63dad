"""Running a function on several real ranks of one gloo process group, on one host or over several."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import socket
import time
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest import mock

from kit.kinds import starting

_PORT = 29500  # of ranks on hosts of their own
# torch._dynamo: whatever makes an optimizer imports it.
_PRELOAD = ("torch.distributed.fsdp", "torch.distributed.checkpoint", "torch._dynamo", "safe_ckpt.checkpointer")
# What ranks import whose module uses this framework, seconds each: a server of its own has it already.
_FRAMEWORKS = {
    "transformers": ("accelerate", "transformers.trainer"),
    "accelerate": ("accelerate",),
    "lightning": ("lightning.pytorch",),
}
_servers: dict[tuple[str, ...], forkserver.ForkServer] = {}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The end of one rank.

    Attributes:
        rank: which one.
        value: what the function returned.
        error: what it raised, None when it returned. An exception that cannot be pickled arrives as a RuntimeError.
        exit_code: of the process; negative for a signal; None when it had to be killed at the time limit.
        seconds: from the start of the function to its end on that rank, 0 when it did not end.
    """

    rank: int
    value: Any = None
    error: BaseException | None = None
    exit_code: int | None = None
    seconds: float = 0.0


def spawn_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 60.0,
    group_timeout_s: float = 60.0,
    init: bool = True,
    expendable: Collection[int] = (),
) -> list[Outcome]:
    """Run ``function(rank, *args)`` on ``world_size`` processes of one gloo group and collect the outcomes.

    Ranks are forked from a server that has imported torch. The modules that ``RANKS_PRELOAD`` of the environment names,
    separated by commas, are imported there too, when the first rank is started: what each rank would import otherwise.

    Args:
        function: a module-level function; it finds the process group initialized.
        world_size: how many ranks.
        args: passed on; must pickle.
        timeout_s: all processes still running after this are killed. Multiplied by ``RANKS_PATIENCE`` of the environment, for
            machines that are busy.
        group_timeout_s: the process group's own timeout.
        init: whether to initialize (and destroy) the process group around ``function``.
        expendable: ranks that are killed when all others have ended, such as those that stop themselves.

    Returns:
        One outcome per rank, in order. A rank that was killed has no value and no error.
    """
    starting("ranks")
    context = multiprocessing.get_context("forkserver")
    server = _server_for(function)
    port = free_port()
    patience = float(os.environ.get("RANKS_PATIENCE", "1"))
    processes, pipes = [], []
    for rank in range(world_size):
        ours, theirs = context.Pipe(duplex=False)
        settings = (rank, world_size, port, group_timeout_s, init)
        process = context.Process(target=_run_rank, args=(theirs, dict(os.environ), settings, function, args))
        with mock.patch.object(forkserver, "connect_to_new_process", server.connect_to_new_process):
            process.start()
        theirs.close()
        processes.append(process)
        pipes.append(ours)
    deadline = time.monotonic() + timeout_s * patience
    results = _collect(pipes, deadline, expendable)
    outcomes = []
    for rank, process in enumerate(processes):
        process.join(timeout=0.0 if rank in expendable else max(0.0, deadline - time.monotonic()))
        code = process.exitcode
        if code is None:
            process.kill()
            process.join(timeout=10)
        outcomes.append(Outcome(rank=rank, exit_code=code, **results.get(rank, {})))
    return outcomes


def spawn_over(hosts, per_host, function, *args, timeout_s=60.0, expendable=()):
    """Run ``function(rank, *args)`` on so many ranks of each host, rank 0 on the first, and collect the outcomes.

    As ``spawn_ranks``. ``expendable`` ranks are killed when all others have ended.
    """
    from kit.hosts import behind
    from kit.patience import wait_until

    starting("ranks")
    hosts = list(hosts)
    size, work = per_host * len(hosts), hosts[0].work
    files = [work / f"outcome{time.monotonic_ns()}-{rank}" for rank in range(size)]
    group = {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": str(_PORT), "WORLD_SIZE": str(size)}
    processes = []
    for rank in range(size):
        environment = {**group, "RANK": str(rank)}
        host = hosts[rank // per_host]
        processes.append(host.fork(_run_rank_of_host, str(files[rank]), rank, function, args, env=environment))
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


def _server_for(function: Callable[..., Any]) -> forkserver.ForkServer:
    """Forked from a server that has imported torch, or a framework, and done nothing else: a rank starts in milliseconds."""
    used = getattr(function, "__globals__", {}).values()
    places = (getattr(one, "__module__", None) or getattr(one, "__name__", None) for one in used)
    names = {str(place).partition(".")[0] for place in places}
    framework: tuple[str, ...] = next((modules for name, modules in _FRAMEWORKS.items() if name in names), ())
    preload = (*_PRELOAD, *filter(None, os.environ.get("RANKS_PRELOAD", "").split(",")), *framework)
    if preload not in _servers:
        _servers[preload] = forkserver.ForkServer()
        _servers[preload].set_forkserver_preload(list(preload))
    return _servers[preload]


def values(outcomes: list[Outcome]) -> list[Any]:
    """What the ranks returned; raises the error that came first, or names the ranks that returned nothing."""
    for outcome in sorted(outcomes, key=lambda outcome: outcome.seconds):
        if outcome.error is not None:
            raise outcome.error
    silent = [outcome.rank for outcome in outcomes if outcome.exit_code != 0]
    if silent:
        raise RuntimeError(f"ranks {silent} did not end well: {[outcomes[rank].exit_code for rank in silent]}")
    return [outcome.value for outcome in outcomes]


def free_port() -> int:
    """A TCP port of this machine that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _collect(pipes: list[Connection], deadline: float, expendable: Collection[int] = ()) -> dict[int, dict[str, Any]]:
    results: dict[int, dict[str, Any]] = {}
    left = set(range(len(pipes)))
    while left - set(expendable) and time.monotonic() < deadline:
        ready = wait([pipes[rank] for rank in left], timeout=max(0.0, deadline - time.monotonic()))
        for rank in [rank for rank in left if pipes[rank] in ready]:
            left.remove(rank)
            with contextlib.suppress(EOFError, OSError):  # it was killed
                results[rank] = pickle.loads(pipes[rank].recv_bytes())  # unpickles: what a child of this process wrote
    return results


def _run_rank(
    pipe: Connection,
    environment: dict[str, str],
    settings: tuple[int, int, int, float, bool],
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    import torch.distributed as dist

    os.environ.update(environment)  # the server's is that of its own start
    rank, world_size, port, group_timeout_s, init = settings
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.setdefault("RES_OPTIONS", "timeout:1")  # torch looks up 127.0.0.1 backwards on every connection
    if init:
        dist.init_process_group("gloo", rank=rank, world_size=world_size, timeout=timedelta(seconds=group_timeout_s))
    begun = time.monotonic()
    result: dict[str, Any] = {}
    try:
        result["value"] = function(rank, *args)
    except BaseException as error:
        result["error"] = error
    result["seconds"] = time.monotonic() - begun
    pipe.send_bytes(_pickled(result))
    pipe.close()
    if init and dist.is_initialized() and "error" not in result:
        dist.destroy_process_group()


def _run_rank_of_host(file, rank, function, args):
    import torch.distributed as dist

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


def _pickled(result: dict[str, Any]) -> bytes:
    try:
        data = pickle.dumps(result)
        pickle.loads(data)  # unpickles: what the line before made
    except Exception:
        error = result.get("error")
        text = "".join(traceback.format_exception(error)) if error is not None else repr(result.get("value"))
        return pickle.dumps({"seconds": result["seconds"], "error": RuntimeError(text)})
    return data
