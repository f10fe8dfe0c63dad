"""A file that was written so lately that a further change would not show."""

import os
import time

import pytest

from safe_ckpt.offload import consolidate


@pytest.mark.parametrize("back", [False, True], ids=["as it is", "its time was set back"])
def test_a_file_of_this_instant_is_looked_at_again(tmp_path, back):
    """A scan ends only when each file rests: also one whose modification time a copying tool has set to an old one."""
    file = tmp_path / "swap"
    file.write_bytes(b"1")
    if back:
        os.utime(file, (0, 0))
    consolidate._scan(tmp_path, (), 30.0)
    assert time.time_ns() - file.stat().st_ctime_ns >= consolidate._RACY_NS
