"""An accelerator for the tests, ``late``: torch's PrivateUse1 backend, whose streams run late. See ``late.cpp``.

``load()`` makes it the accelerator of this process, for good: use it in a process of its own. CUDA's order of things holds:
streams are queues, a new thread stands on device 0 and its default stream, asynchronous copies go on by themselves, memory that
is freed goes to the next tensor of its size. Unlike on CUDA nothing is done before somebody waits for it, or before the
scheduler, which is seeded, lets a step go on.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from datetime import timedelta
from pathlib import Path

import torch

from kit.device import module

_HERE = Path(__file__).parent
_BUILT = Path(sys.prefix) / "late_device"
_LOAD_LIMIT_S = 600

HAS_COMPILER = shutil.which("g++") is not None


@functools.cache
def load() -> module.Late:
    """Build it if this source was not built yet, and make it torch's accelerator under the name ``late``."""
    library = ctypes.CDLL(str(_build("late.cpp")), ctypes.RTLD_GLOBAL)  # the process group's library asks it
    torch.utils.rename_privateuse1_backend("late")
    made = module.Late(library)
    torch._register_device_module("late", made)
    torch.utils.generate_methods_for_privateuse1_backend(unsupported_dtype=[torch.quint8])
    return made


@functools.cache
def register_group() -> None:
    """Make it known to torch.distributed as the backend ``late``: ``init_process_group("cpu:gloo,late:late")``."""
    import torch.distributed as dist

    load()
    library = ctypes.PyDLL(str(_build("group.cpp")))
    library.late_define.argtypes = [ctypes.py_object]
    library.late_define(sys.modules[__name__])
    make = library.late_make_group
    make.restype = ctypes.py_object
    make.argtypes = [ctypes.py_object, ctypes.c_int, ctypes.c_int, ctypes.c_double]

    def made(store: dist.Store, rank: int, size: int, timeout: timedelta) -> object:
        return make(store, rank, size, timeout.total_seconds())

    dist.Backend.register_backend("late", made, devices=["late"])


def _build(name: str) -> Path:
    """Compile: ten seconds of one core. Kept in the virtual environment, under the hash of the source and of torch."""
    sources = b"".join((_HERE / one).read_bytes() for one in ("late.h", name))
    named = hashlib.sha256(sources + torch.__version__.encode()).hexdigest()[:16]
    library = _BUILT / f"{named}.so"
    _BUILT.mkdir(exist_ok=True)
    with (_BUILT / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one of those that start at once builds it
        if not library.exists():
            _compile(_HERE / name, library)
    return library


def _compile(source: Path, library: Path) -> None:
    here = Path(torch.__file__).parent
    include = [here / "include", here / "include/torch/csrc/api/include", Path(sysconfig.get_paths()["include"])]
    fresh = library.with_suffix(f".{os.getpid()}")
    options = ["-std=c++20", "-O1", "-g0", "-fPIC", "-shared", "-w"]
    command = ["g++", *options, *(f"-isystem{path}" for path in include), str(source), "-o", str(fresh)]
    command += [f"-L{here / 'lib'}", "-ltorch_python", "-ltorch_cpu", "-lc10"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LOAD_LIMIT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
    fresh.replace(library)
