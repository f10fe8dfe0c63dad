"""``python``, ``torchrun`` and ``safe-ckpt`` for the commands of a page: each asks this process, which starts it warm.

What a page starts is then a process of its own that does not import torch, or a framework, again: see ``kit/warm.py``. A signal
to such a command does not reach its process: pages that send one, or look for one, start their commands as a shell does.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from kit import warm

_MODULES = {"python": [], "torchrun": ["-m", "torch.distributed.run"], "safe-ckpt": ["-m", "safe_ckpt.tools.cli"]}
_COMMAND = """#!{python} -SE
import json, os, socket, sys

asked = [os.path.basename(sys.argv[0]), sys.argv[1:], dict(os.environ), os.getcwd()]
with socket.socket(socket.AF_UNIX) as end:
    end.connect({place!r})
    socket.send_fds(end, [b"0"], [0, 1, 2])
    end.sendall(json.dumps(asked).encode())
    end.shutdown(socket.SHUT_WR)
    status = int(end.recv(16))
if status < 0:
    os.kill(os.getpid(), -status)
sys.exit(status)
"""


@contextlib.contextmanager
def warm_commands() -> Iterator[str]:
    """A folder for the front of PATH."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as near:
        place = str(Path(folder, "socket"))
        near.bind(place)
        near.listen()
        for name in _MODULES:
            Path(folder, name).write_text(_COMMAND.format(python=sys.executable, place=place))
            Path(folder, name).chmod(0o755)
        started: list[warm.Popen] = []
        threading.Thread(target=_serve, args=[near, folder, started], daemon=True).start()
        try:
            yield folder
        finally:
            near.shutdown(socket.SHUT_RDWR)
            for process in started:
                if process.poll() is None:
                    process.kill()


def _serve(near: socket.socket, folder: str, started: list[warm.Popen]) -> None:
    with contextlib.suppress(OSError):  # the end of the page
        while True:
            end, _ = near.accept()
            threading.Thread(target=_start, args=[end, folder, started], daemon=True).start()


def _start(end: socket.socket, folder: str, started: list[warm.Popen]) -> None:
    with end:
        _, streams, _, _ = socket.recv_fds(end, 1, 3)
        try:
            name, arguments, environment, cwd = json.loads(b"".join(iter(lambda: end.recv(1 << 16), b"")))
            environment["PATH"] = environment["PATH"].removeprefix(folder + os.pathsep)
            stdin, stdout, stderr = streams
            process = warm.Popen(
                [sys.executable, *_MODULES[name], *arguments],
                cwd=cwd, env=environment, stdin=stdin, stdout=stdout, stderr=stderr,
            )  # fmt: skip
            started.append(process)
        finally:
            for stream in streams:
                os.close(stream)
        status = process.wait()
        with contextlib.suppress(OSError):
            end.sendall(str(status).encode())
