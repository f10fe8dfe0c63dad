"""The writer process: moves, hashes and fsyncs bytes from shared memory. Imports neither torch nor any framework.

It gets jobs over a socket: a line of JSON, and with it descriptors of the plan and of the shared buffer. It ends when the
socket does, so it never outlives its parent. It ignores the signals that a terminal or a scheduler sends to the whole group:
its parent decides when it is done.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import importlib
import json
import mmap
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

from safe_ckpt.core.staging.progress import STACK_SIGNAL, ProgressPage
from safe_ckpt.core.storage.direct_io import WriteOptions, refused_direct
from safe_ckpt.core.storage.objects.options import take_variables
from safe_ckpt.core.writer.sink import WriteJob, write_job

_WATCH_S = 1.0
_GIVES_WAY = 19  # a mirror's: within training's group it gets what training leaves
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def main(socket_fd: int, control_fd: int, niceness: int, parent: int, ahead: Sequence[str]) -> None:
    """Serve jobs until the parent closes the socket, or is no more. ``ahead``: modules to import before the first one."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    faulthandler.enable()
    faulthandler.register(STACK_SIGNAL, all_threads=True)
    with contextlib.suppress(OSError):  # a sandbox may forbid it; it is a courtesy
        os.nice(niceness)
    if niceness < _GIVES_WAY:
        # A session of its own is a group of its own to the scheduler (sched_autogroup): what the writer takes is not taken from
        # training's share alone, and other programs on the machine do not starve it.
        with contextlib.suppress(OSError):
            os.setsid()
    connection = socket.socket(fileno=socket_fd)
    page = ProgressPage(control_fd)
    jobs: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    buffers: dict[int, int] = {}
    threading.Thread(target=_receive, args=(connection, jobs, buffers), daemon=True).start()
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    threading.Thread(target=_import, args=(ahead,), daemon=True).start()
    maps: dict[int, mmap.mmap] = {}
    while True:
        job = jobs.get()
        reply = _serve(job, buffers, maps, page)
        page.entered("idle")
        try:
            connection.sendall(json.dumps(reply).encode() + b"\n")
        except OSError:
            return  # the parent is gone; or it lives, sees the end of this process at once, and starts another


def _import(modules: Sequence[str]) -> None:
    for name in modules:
        with contextlib.suppress(Exception):  # said when it is needed
            importlib.import_module(name)


def _watch(parent: int) -> None:
    # A process that the parent forked, such as a data loader's worker, may hold the other end of the socket open.
    while os.getppid() == parent:
        time.sleep(_WATCH_S)
    os._exit(0)


def _receive(connection: socket.socket, jobs: queue.SimpleQueue[dict[str, Any]], buffers: dict[int, int]) -> None:
    buffer = b""
    while True:
        try:
            data, fds, _, _ = socket.recv_fds(connection, 65536, 4)
        except OSError:
            data, fds = b"", []
        if not data:
            # The parent is gone. What is half written lies in ``pending`` and is swept at the next start.
            os._exit(0)
        buffer += data
        while b"\n" in buffer:
            line, _, buffer = buffer.partition(b"\n")
            job = json.loads(line)
            plan_fd, *others = fds
            fds = []
            with open(plan_fd, "rb") as file:
                file.seek(0)
                job["plan"] = json.load(file)
            if others:
                buffers[job["buffer"]] = others[0]
            jobs.put(job)


def _serve(
    line: dict[str, Any], buffers: dict[int, int], maps: dict[int, mmap.mmap], page: ProgressPage
) -> dict[str, Any]:
    try:
        plan = line["plan"]
        options = WriteOptions.from_json(plan["options"])
        if options.storage is not None:
            take_variables(plan["variables"])
        page.begin(0)
        job = WriteJob.from_json(plan["job"])
        memory = memoryview(_mapped(line, buffers, maps)) if job.files else None
        written = write_job(job, options, page, memory)
        results = [vars(result) for result in written]
        # Nobody reads a log of this process, so its parent logs which file systems refused direct writes.
        return {"files": results, "refused_direct": list(refused_direct().items())}
    except OSError as error:
        if error.errno == errno.ENOMEM:
            raise  # like every other error that is not the file system's: end, and let the parent try a fresh process
        return {"error": {"errno": error.errno, "message": error.strerror or str(error), "path": error.filename}}


def _mapped(job: dict[str, Any], buffers: dict[int, int], maps: dict[int, mmap.mmap]) -> mmap.mmap:
    number = job["buffer"]
    if number not in maps or len(maps[number]) < job["buffer_bytes"]:
        maps[number] = mmap.mmap(buffers[number], job["buffer_bytes"])
    return maps[number]
