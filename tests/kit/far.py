"""Where a mirror is: a bucket, or a directory in the place of one."""

from pathlib import Path

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
