"""The machine that figures belong to, and how to keep its cores busy."""

import contextlib
import datetime
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

PEERS = ("torch", "safetensors", "lightning", "torch_checkpointing")


def facts(folder: Path) -> dict[str, object]:
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "cores": os.cpu_count(),
        "processor": _first("/proc/cpuinfo", "model name"),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "file_system": _file_system(folder.resolve()),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PEERS},
    }


# Not for ever: where the bench itself was killed, it would spoil whatever is measured next on this machine.
_BURN = """
import os, sys
while os.getppid() == int(sys.argv[1]):
    for _ in range(1_000_000):
        pass
"""


@dataclass(frozen=True)
class Load:
    """What the machine does beside training: processes that compute without pause, and workers of a DataLoader."""

    burners: int = 0
    workers: int = 0


LOADS = {"quiet": Load(), "1 burner": Load(burners=1), "2 burners": Load(burners=2), "2 loaders": Load(workers=2)}


@contextlib.contextmanager
def burning(processes: int) -> Iterator[None]:
    """So many other processes compute without pause."""
    command = [sys.executable, "-c", _BURN, str(os.getpid())]
    with contextlib.ExitStack() as stack:
        for _ in range(processes):
            burner = stack.enter_context(subprocess.Popen(command))
            stack.callback(burner.kill)
        yield


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _first(path: str, key: str) -> str:
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        if line.startswith(key):
            return line.partition(":")[2].strip()
    return "unknown"


def _file_system(folder: Path) -> str:
    kind, length = "unknown", -1
    for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines():
        _, mounted, name, *_ = line.split()
        if folder.is_relative_to(mounted) and len(mounted) >= length:
            kind, length = name, len(mounted)
    return kind
