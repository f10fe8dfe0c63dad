"""Disks that are small."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

from kit.kinds import starting


@contextlib.contextmanager
def small_disk(path: Path, size: str) -> Iterator[Path]:
    """A tmpfs of the given size (such as ``"16m"``), mounted at ``path`` while this is entered. Needs root.

    Raises:
        subprocess.CalledProcessError: it may not be mounted.
    """
    starting("hosts")
    path.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)
