"""Scripts in processes of their own that do not import torch again: forked from a server that has imported it already.

``Popen`` and ``run`` are those of ``subprocess``, for commands that begin with ``sys.executable``. Such a process has its own
pid, session, environment, folder, arguments, standard streams and ``__main__``, and can be killed. What differs from a fresh
interpreter: the modules of the server are imported already, string hashes are the same in all of them, and
``/proc/<pid>/cmdline`` is the server's. Where a test is about one of these it uses ``subprocess``; commands that are nothing
for the server (``-O``, a program on stdin, LD_PRELOAD, strace) are started by ``subprocess`` anyway.

Run as a script this module is a server. One is started on first use for each set of modules, and ends with this process.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import gc
import importlib
import json
import os
import re
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import types
import warnings
from pathlib import Path
from typing import Any

# torch._dynamo: whatever makes an optimizer imports it, which takes 1.5 s.
_BASE = (
    *("torch.distributed.fsdp", "torch.distributed.checkpoint", "torch.distributed.run"),
    *("torch._dynamo", "safe_ckpt.checkpointer"),
)
# The first whose word is in the script or the command.
_MODULES = (
    # Programs of these kinds.
    ("accelerate_", (*_BASE, "safe_ckpt.accelerate", "safe_ckpt.data", "torchdata.stateful_dataloader")),
    ("trainers", (*_BASE, "safe_ckpt.transformers", "transformers.models.llama", "peft")),
    ("titan_runs.py", (*_BASE, "titan_ready")),
    ("lightning_on_deepspeed", (*_BASE, "deepspeed", "lightning.pytorch")),
    ("deepspeed", (*_BASE, "deepspeed")),
    ("pytorch_lightning", (*_BASE, "pytorch_lightning")),
    ("lightning", (*_BASE, "lightning.pytorch")),
    ("transformers", (*_BASE, "accelerate", "transformers.trainer")),
    ("accelerate", (*_BASE, "accelerate", "accelerate.commands.launch")),
    ("programs_of", (*_BASE, "torch.distributed.tensor.parallel")),
    ("", _BASE),
)
# Read while modules are imported, or by the interpreter itself: who sets them otherwise gets another server.
_READ_ON_IMPORT = re.compile("PYTHON(?!UNBUFFERED)|LD_|OMP_|MKL_|CUDA_|HF_|DS_|CXX")
_PLACE = "SAFE_CKPT_TEST_PLACE"
_MARK = "PYTEST_CURRENT_TEST"
_SIZE, _STATUS = struct.Struct("!Q"), struct.Struct("!i")
_servers: dict[Any, Server | None] = {}
_own: list[Server] = []  # in a process that a server made: who makes those that it starts
_lock = threading.Lock()


class Server:
    """The near end of a server."""

    def __init__(self, end: socket.socket, env: dict[str, str]) -> None:
        self.key = import_environment(env)
        self._end = end
        self._lock = threading.Lock()

    def start(self, request: dict[str, Any], streams: list[int]) -> tuple[int, int]:
        """The pid of a new process, and the descriptor from which its status can be read when it has ended."""
        reader, writer = os.pipe()
        try:
            with self._lock:
                data = json.dumps(request).encode()
                socket.send_fds(self._end, [_SIZE.pack(len(data))], [*streams, writer])
                self._end.sendall(data)
                (pid,) = _SIZE.unpack(_receive(self._end, _SIZE.size))
        except BaseException:
            os.close(reader)
            raise
        finally:
            os.close(writer)
        return pid, reader


class Popen(subprocess.Popen):
    """As ``subprocess.Popen``; ``warm`` says whether the process comes from a server.

    With ``finalize`` the process ends as an interpreter does. Else, which saves half a second, it only waits for threads, calls
    what is registered with ``atexit`` and flushes: no module is taken down.
    """

    warm = False
    _reader: int | None = None

    def __init__(self, *args: Any, finalize: bool = False, **more: Any) -> None:
        self._finalize = finalize
        super().__init__(*args, **more)

    def _execute_child(
        self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, *more: Any
    ) -> None:
        cwd, env, _, _, shell, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, _, gid, gids, uid, umask = more[
            :16
        ]
        new_session, plain = more[16], not any([executable, preexec_fn, pass_fds, shell, gid, gids, uid, umask != -1])
        environment = dict(os.environ if env is None else env)
        request = _request(args) if plain and "LD_PRELOAD" not in environment else None
        folder = os.path.abspath(os.fsdecode(cwd or "."))
        server = request and _server_for(request, environment, folder)
        if not server:
            super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, *more)  # type: ignore[misc]
            return
        request |= {
            "env": environment,
            "cwd": folder,
            "finalize": self._finalize,
            "session": new_session or server not in _own,
        }
        streams = [own if own != -1 else number for number, own in enumerate((p2cread, c2pwrite, errwrite))]
        self.pid, self._reader = server.start(request, streams)
        self.warm = self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if not self.warm:
            return super()._try_wait(wait_flags)  # type: ignore[misc,no-any-return]
        if self._reader is None:
            return self.pid, 0
        if not select.select([self._reader], [], [], 0 if wait_flags & os.WNOHANG else None)[0]:
            return 0, 0
        data = os.read(self._reader, _STATUS.size)
        os.close(self._reader)
        self._reader = None
        return self.pid, _STATUS.unpack(data)[0] if data else signal.SIGKILL

    def _internal_poll(self, *args: Any, **more: Any) -> int | None:
        if not self.warm:
            return super()._internal_poll(*args, **more)  # type: ignore[misc,no-any-return]
        if self.returncode is None and self._waitpid_lock.acquire(False):
            try:
                pid, status = self._try_wait(os.WNOHANG)
                if pid:
                    self._handle_exitstatus(status)
            finally:
                self._waitpid_lock.release()
        return self.returncode


def run(
    command: Any,
    *,
    input: Any = None,  # noqa: A002 - subprocess.run calls it so
    capture_output: bool = False,
    timeout: float | None = None,
    check: bool = False,
    **more: Any,
) -> subprocess.CompletedProcess[Any]:
    """As ``subprocess.run``."""
    if capture_output:
        more |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    if input is not None:
        more["stdin"] = subprocess.PIPE
    with Popen(command, **more) as process:
        try:
            out, err = process.communicate(input, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(command, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


def import_environment(env: dict[str, str]) -> tuple[tuple[str, str], ...]:
    """That part of an environment that counts while modules are imported."""
    return tuple(sorted(item for item in env.items() if _READ_ON_IMPORT.match(item[0])))


def _request(args: Any) -> dict[str, Any] | None:
    """What the server is asked for; None for what only a fresh interpreter does."""
    command = [os.fsdecode(arg) for arg in args] if isinstance(args, (list, tuple)) else []
    if not command or command[0] != sys.executable:
        return None
    unbuffered, warn, rest = False, [], command[1:]
    while rest[:1] in (["-u"], ["-W"]):
        if rest.pop(0) == "-u":
            unbuffered = True
        else:
            warn.append(rest.pop(0))
    if not rest or (rest[0].startswith("-") and rest[0] not in ("-c", "-m")):
        return None
    how = rest.pop(0) if rest[0] in ("-c", "-m") else "file"
    return {"command": command, "how": how, "what": rest[0], "args": rest[1:], "unbuffered": unbuffered, "warn": warn}


def _server_for(request: dict[str, Any], env: dict[str, str], folder: str) -> Server | None:
    key = import_environment(env)
    if __name__ == "__main__":
        return next((server for server in _own if server.key == key), None)
    texts = [request["what"], *request["args"]]
    files = [Path(folder, text) for text in texts if text.endswith(".py")]
    texts += [file.read_text() for file in files if file.is_file()]
    modules = next(modules for word, modules in _MODULES if any(word in text for text in texts))
    with _lock:
        if (modules, key) not in _servers:
            _servers[modules, key] = _start_server(modules, env)
        return _servers[modules, key]


def _start_server(modules: tuple[str, ...], env: dict[str, str]) -> Server | None:
    near, far = socket.socketpair()
    environment = {name: value for name, value in env.items() if name != _MARK} | {_PLACE: "x" * 4096}
    environment["JE_ARROW_MALLOC_CONF"] = "background_thread:false"  # pyarrow, which transformers imports, has one
    process = subprocess.Popen(
        [sys.executable, __file__, str(far.fileno()), *modules],
        env=environment, pass_fds=[far.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    far.close()
    atexit.register(process.wait)
    atexit.register(near.close)
    if _receive(near, 1) == b"1":
        return Server(near, environment)
    near.close()  # its modules started threads: nothing can be forked from it
    return None


def _receive(end: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = end.recv(size - len(data))
        if not more:
            raise EOFError("the server of warm processes is gone")
        data += more
    return data


# What follows runs in a server, and in the processes that it makes.


def serve(end: socket.socket) -> dict[str, Any] | None:
    """Make processes until the other end closes. Returns None then, and in each new process its request."""
    wake_reader, wake_writer = os.pipe()
    os.set_blocking(wake_writer, False)
    os.set_blocking(wake_reader, False)
    signal.set_wakeup_fd(wake_writer)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    children: dict[int, int] = {}
    while True:
        ready, _, _ = select.select([end, wake_reader], [], [])
        if wake_reader in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(wake_reader, 512)
            _report(children)
        if end in ready:
            head, streams, _, _ = socket.recv_fds(end, _SIZE.size, 4)
            if not head:
                return None
            data = _receive(end, _SIZE.unpack(head + _receive(end, _SIZE.size - len(head)))[0])
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for descriptor in (wake_reader, wake_writer, streams[3], *children.values()):
                    os.close(descriptor)
                end.close()
                return {**json.loads(data), "streams": streams[:3]}
            children[pid] = streams[3]
            for descriptor in streams[:3]:
                os.close(descriptor)
            end.sendall(_SIZE.pack(pid))


def _report(children: dict[int, int]) -> None:
    """Pass on the status of those that have ended."""
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            descriptor = children.pop(pid)
            with contextlib.suppress(BrokenPipeError):
                os.write(descriptor, _STATUS.pack(status))
            os.close(descriptor)


def become(request: dict[str, Any]) -> Any:
    """Make this new process what was asked for. Returns a function that is its program."""
    if request["session"]:
        os.setsid()
    _tell_whose(request["env"])
    for number, descriptor in enumerate(request["streams"]):
        os.dup2(descriptor, number)
    for descriptor in request["streams"]:
        if descriptor > 2:
            os.close(descriptor)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    unbuffered = request["unbuffered"] or bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdout.reconfigure(line_buffering=os.isatty(1), write_through=unbuffered)
    for rule in request["warn"]:
        sys.warnoptions.append(rule)
        warnings._processoptions([rule])
    _forget_the_server()
    sys.orig_argv[:] = request["command"]
    how, what, args = request["how"], request["what"], request["args"]
    main = types.ModuleType("__main__")
    main.__builtins__ = builtins
    sys.modules["__main__"] = main
    folders = {"-c": "", "-m": os.getcwd(), "file": os.path.dirname(os.path.realpath(what))}
    sys.path.insert(0, folders[how])
    if how == "-m":
        sys.argv[:] = ["-m", *args]
        sys.modules.pop(what, None)
        return lambda: runpy._run_module_as_main(what)
    sys.argv[:] = ["-c" if how == "-c" else what, *args]
    if how == "-c":
        return lambda: exec(compile(what, "<string>", "exec"), main.__dict__)
    main.__file__ = what
    return lambda: exec(compile(Path(what).read_bytes(), what, "exec"), main.__dict__)


def _tell_whose(env: dict[str, str]) -> None:
    """Whose test this is, in /proc/<pid>/environ: it shows what the interpreter was started with, wherever that lies."""
    content = Path("/proc/self/environ").read_bytes()
    at = content.find(_PLACE.encode() + b"=")
    if at >= 0 and _MARK in env:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        size = content.index(b"\0", at) - at
        said = f"{_MARK}={env[_MARK]}".encode()[:size].ljust(size, b"\0")
        ctypes.memmove(int(fields[47]) + at, said, size)


def _forget_the_server() -> None:
    """What an interpreter, and what is imported, would have drawn or read for itself."""
    tempfile.tempdir = None
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()
    for package in ("lightning.fabric", "lightning_fabric"):
        rank_zero = sys.modules.get(f"{package}.utilities.rank_zero")
        if rank_zero is not None:
            rank_zero.rank_zero_only.rank = rank_zero._get_rank() or 0


def patch_launchers() -> None:
    """Let the launchers of the frameworks start their ranks warm as well."""

    class Subprocess:
        def __getattr__(self, name: str) -> Any:
            return Popen if name == "Popen" else getattr(subprocess, name)

    for name in ("lightning.fabric", "lightning.pytorch", "lightning_fabric", "pytorch_lightning"):
        module = sys.modules.get(f"{name}.strategies.launchers.subprocess_script")
        if module is not None:
            module.subprocess = Subprocess()
    elastic = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
    importlib.import_module(elastic).Popen = Popen


def launches(request: dict[str, Any]) -> bool:
    """Whether this program may be one that starts ranks."""
    launcher = request["what"] in ("torch.distributed.run", "accelerate.commands.launch")
    return launcher or any("lightning" in name for name in sys.argv[2:])


def serve_own_children(env: dict[str, str], streams: list[int]) -> dict[str, Any] | None:
    """Fork a server of this process's own, in its session, for what launchers start in it.

    Returns None, or in a process that it made that process's request.
    """
    near, far = socket.socketpair()
    child = os.fork()
    if child == 0:
        near.close()
        if os.fork():
            os._exit(0)  # it is nobody's child: no launcher waits for it
        for descriptor in streams:
            os.close(descriptor)
        request = serve(far)
        if request is None:
            os._exit(0)
        return request
    os.waitpid(child, 0)
    far.close()
    _own.append(Server(near, env))
    return None


def main() -> None:
    end = socket.socket(fileno=int(sys.argv[1]))
    end.set_inheritable(False)
    del sys.path[0]
    sys.modules["kit.warm_server"] = sys.modules["__main__"]
    for name in sys.argv[2:]:
        importlib.import_module(name)
    patch_launchers()
    os.dup2(1, 2)
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if len(os.listdir("/proc/self/task")) > 1:
        end.sendall(b"0")
        os._exit(0)
    end.sendall(b"1")
    environment = dict(os.environ)
    request = serve(end)
    if request is None:
        os._exit(0)
    if launches(request):
        if request["session"]:
            os.setsid()
            request["session"] = False
        request = serve_own_children(environment, request["streams"]) or request
    program = become(request)
    if request["finalize"]:
        program()
    else:
        end_early(program)


def end_early(program: Any) -> None:
    """Run a program, do what an interpreter does at its end, and leave out what takes half a second: to take down modules."""
    code = 0
    try:
        program()
    except SystemExit as error:
        if error.code is not None and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
        code = error.code & 0xFF if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None and trace.tb_frame.f_globals is globals():
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main()
