"""How long a worker may move no byte."""

import pytest

from safe_ckpt import Timeouts
from safe_ckpt.core.writer.workers import _stall_limit_s


@pytest.mark.parametrize(
    ("phase", "running", "waiting"), [("write", 60, 300), ("fsync", 300, 300), ("upload", 300, 300)]
)
def test_what_waits_for_a_disk_or_a_store_has_the_time_of_an_fsync(phase, running, waiting):
    """An upload moves no byte until its part is answered, as an fsync; who is stopped has seconds in any phase."""
    limits = Timeouts(writer_stall_s=60, fsync_stall_s=300)
    assert [_stall_limit_s(limits, phase, state) for state in ("S", "")] == [running] * 2
    assert [_stall_limit_s(limits, phase, state) for state in ("D", "R")] == [waiting] * 2
    assert [_stall_limit_s(limits, phase, state) for state in ("T", "t")] == [3, 3]
