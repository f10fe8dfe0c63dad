"""A read that ends before the file does."""

import os

import pytest

from safe_ckpt.core.storage import reader
from safe_ckpt.core.storage.presence import ShortReadError


@pytest.mark.parametrize("cached", [False, True])
def test_a_read_that_ends_before_the_file_does_is_no_damage(tmp_path, monkeypatch, cached):
    """An old cache of a network file system answers so: an error of reading. A file that is shorter has another digest."""
    file, stock = tmp_path / "file", os.preadv
    file.write_bytes(bytes(range(256)) * 64)

    def short(fd, rooms, offset, *flags):
        count = stock(fd, rooms, offset, *flags)
        return max(0, min(count, 4096 - offset))

    whole = reader.digest_of(file, 256 * 64, cached=cached)
    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", short)
        with pytest.raises(ShortReadError, match="file"):
            reader.digest_of(file, 256 * 64, cached=cached)
    os.truncate(file, 4096)
    assert reader.digest_of(file, 256 * 64, cached=cached) != whole
