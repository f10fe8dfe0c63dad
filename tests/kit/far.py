"""Where a mirror is: a bucket, or a directory in the place of one, which may stand still."""

import contextlib
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from kit.patience import wait_until
from safe_ckpt import StorageConfig
from safe_ckpt.core.home.places import everything_in
from safe_ckpt.core.storage.objects.place import place_of


class FarDirectory:
    """A directory, which has an address as a bucket of the tests has one.

    Args:
        path: need not exist.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def url(self) -> str:
        """Its path."""
        return str(self._path)


def listed(far):
    """The checkpoints there, in no order."""
    return everything_in(place_of(far.url(), StorageConfig(), 5))


def damage(file):
    """One bit in the last number of a file differs."""
    data = bytearray(file.read_bytes() if isinstance(file, Path) else file.bucket.read(file.key)[0])
    data[-5] ^= 1
    if isinstance(file, Path):
        file.write_bytes(data)
    else:
        file.bucket.overwrite(file.key, bytes(data))


@contextlib.contextmanager
def bindfs(behind, path):
    """A file system that can be stopped: then every call into it waits."""
    if None in map(shutil.which, ("bindfs", "setpriv")) or os.getuid() != 0:
        pytest.skip("no bindfs here")
    behind.mkdir()
    path.mkdir()
    # It ends with this process: who looks at what a stopped one serves would wait for ever.
    command = ["setpriv", "--pdeathsig", "KILL", "bindfs", "-f", "-o", "attr_timeout=0,entry_timeout=0", behind, path]
    server = subprocess.Popen(command)
    try:
        wait_until(lambda: os.path.ismount(path) or server.poll() is not None, 30)
        if server.poll() is not None:
            pytest.skip("no bindfs mount here")
        yield server
    finally:
        server.send_signal(signal.SIGCONT)
        subprocess.run(["umount", "-l", path], check=True)
        server.wait(30)
