"""Ranks that are processes: forked from a parent that has imported everything and opened nothing, so that hundreds fit."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import os
import signal
import socket
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
from control_rounds import LIMIT_S, count_requests, failed_save, open_session, save

from safe_ckpt.core.coordination import process_groups

Target = Callable[..., dict[str, Any]]
_MOST_OF_MEMORY = 0.7  # of what is free; others use this machine, too
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_FIRST_GUESS_BYTES = 12 << 20
_kept: list[Any] = []  # the stores of a child: they end with it


class Refused(Exception):
    """So many processes were not started."""


def forked(count: int, target: Target, *arguments: Any, limit_s: float = LIMIT_S) -> list[dict[str, Any]]:
    """Run ``target(number, count, listening, *arguments)`` in so many processes; what each returned.

    ``listening`` is a socket for the store of number 0, in which they meet. All live until the last one has answered.

    Raises:
        RuntimeError: one of them failed, or they took too long.
    """
    gc.collect()
    gc.freeze()  # the collector would write to what parent and children share
    context = multiprocessing.get_context("fork")
    ends, processes = [], []
    with socket.create_server(("127.0.0.1", 0), backlog=4096) as listening, _ended(processes):
        for number in range(count):
            ours, theirs = context.Pipe()
            arguments_of_child = (theirs, target, number, count, listening, *arguments)
            processes.append(context.Process(target=_run, args=arguments_of_child, daemon=True))
            processes[-1].start()
            theirs.close()
            ends.append(ours)
        found = _answers(ends, limit_s)
        for end in ends:
            end.send("end")
        for process in processes:
            process.join(timeout=30)
    return [found[number] for number in range(count)]


@contextlib.contextmanager
def _ended(processes: list[Any]) -> Iterator[None]:
    try:
        yield
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()
            process.close()
        gc.unfreeze()


def _answers(ends: list[connection.Connection], limit_s: float) -> dict[int, dict[str, Any]]:
    deadline, found = time.monotonic() + limit_s, {}
    waiting = {end: number for number, end in enumerate(ends)}
    while waiting:
        ready = connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RuntimeError(f"{len(waiting)} of {len(ends)} processes were not done within {limit_s:.0f} s")
        for end in ready:
            number = waiting.pop(end)
            try:
                found[number] = end.recv()
            except EOFError:
                raise RuntimeError(f"process {number} died") from None
            if "failed" in found[number]:
                raise RuntimeError(f"process {number}: {found[number]['failed']}")
    return found


def _run(end: connection.Connection, target: Target, *arguments: Any) -> None:
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    torch.set_num_threads(1)
    try:
        found = target(*arguments)
        end.send({**found, "private_bytes": private_bytes()})
    except BaseException:  # the parent ends all, and says so
        end.send({"failed": traceback.format_exc()})
    end.poll(LIMIT_S)
    os._exit(0)  # the others may have left: nothing is to be said to them


def private_bytes() -> int:
    """The memory that this process shares with no other."""
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="utf-8").splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_"))


def available_bytes() -> int:
    """What the machine has for more processes."""
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))


def refuse_too_many(count: int, each_bytes: float = _FIRST_GUESS_BYTES) -> None:
    """Raise if so many processes would not fit.

    Raises:
        Refused: says how many would.
    """
    most = int(_MOST_OF_MEMORY * available_bytes() / each_bytes)
    if count > most:
        raise Refused(f"{each_bytes / (1 << 20):.0f} MiB each: {most} processes fit")


def met(number: int, listening: socket.socket) -> Any:
    """The store in which the processes of ``forked`` first meet; not counted. Number 0 hosts it."""
    port = listening.getsockname()[1]
    if number == 0:
        _kept.append(process_groups.host_store(listening))
    else:
        listening.close()
        _kept.append(process_groups.connect_store("127.0.0.1", port, LIMIT_S))
    return _kept[-1]


def await_all(store: Any, name: str, count: int) -> None:
    """Go on when so many processes are here."""
    if store.add(f"{name}/here", 1) == count:
        store.set(f"{name}/go", "")
    store.get(f"{name}/go")


def _rank(rank: int, size: int, listening: socket.socket, rounds: int) -> dict[str, Any]:
    meeting = met(rank, listening)
    tally = count_requests()
    await_all(meeting, "bench", size)
    begun = time.monotonic()
    coordinator = open_session(rank, size, meeting)
    meeting_s = time.monotonic() - begun
    coordinator.agree("start", timeout_s=LIMIT_S)
    asked, cpu_s = tally.calls.total(), time.process_time()
    seconds = save(coordinator, rounds, shares=True)
    asked, cpu_s = tally.calls.total() - asked, time.process_time() - cpu_s
    stamps = failed_save(coordinator, "failed", size - 1)
    if rank == 0:
        coordinator.close()
    facts = {"seconds": seconds, "requests": asked / rounds, "cpu_s": cpu_s / rounds, "meeting_s": meeting_s}
    return {**facts, "stamps": stamps}


def processes(ranks: int, rounds: int, each_bytes: float = _FIRST_GUESS_BYTES) -> dict[str, Any]:
    """Saves on so many processes, each with its own session: a row of the table.

    Raises:
        Refused: they would not fit into memory.
    """
    refuse_too_many(ranks, each_bytes)
    found = forked(ranks, _rank, rounds)
    others = found[1:]
    slowest = [max(times) for times in zip(*(one["seconds"] for one in found), strict=True)]
    told, leads = found[-1]["stamps"]["told"], found[0]["stamps"]
    private = [one["private_bytes"] for one in others]
    return {
        "way": "processes",
        "ranks": ranks,
        "seconds": slowest,
        "requests": max(one["requests"] for one in others),
        "requests_0": found[0]["requests"],
        "cpu_s": statistics.median(one["cpu_s"] for one in others),
        "cpu_0_s": found[0]["cpu_s"],
        "meeting_s": max(one["meeting_s"] for one in found),
        "error_known_s": leads["known"] - told,
        "error_posted_s": leads["posted"] - told,
        "error_read_s": max(one["stamps"]["read"] for one in others) - told,
        "private_bytes": statistics.median(private),
        "private_0_bytes": found[0]["private_bytes"],
        "fit": int(_MOST_OF_MEMORY * available_bytes() / statistics.median(private)),
    }
