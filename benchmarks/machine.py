"""The machine that figures belong to, and how to keep its other core busy."""

import contextlib
import datetime
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
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


@contextlib.contextmanager
def burning(loaded: bool) -> Iterator[None]:
    """With ``loaded``, another process computes without pause."""
    if not loaded:
        yield
        return
    with subprocess.Popen([sys.executable, "-c", _BURN, str(os.getpid())]) as burner:
        try:
            yield
        finally:
            burner.kill()


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
