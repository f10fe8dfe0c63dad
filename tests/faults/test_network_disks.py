"""File systems that show things late, with coarse clocks, or refuse: what network storage does."""

import json
import os
import subprocess
import sys
import tempfile
import time

import pytest

from kit.patience import wait_until
from safe_ckpt import CheckpointConfig, Checkpointer, Timeouts
from safe_ckpt.errors import DirectoryError, SafeCheckpointError
from safe_ckpt.testing import FaultyStorage
from support import needs_root, program_path, run_program


@pytest.mark.timeout(150)
def test_entries_that_show_late_on_one_rank_are_waited_for(tmp_path, matrix):
    """Rank 1 does not see what rank 0 made until a second later, in every directory: the ranks wait for it and agree."""
    storage = FaultyStorage(tmp_path / "kit")
    exp = tmp_path / "exp"
    started = [
        subprocess.Popen(
            [
                sys.executable,
                str(program_path("rank_that_sees_late")),
                str(exp),
                str(rank),
                str(tmp_path / "store"),
                str(tmp_path),
            ],
            env={**os.environ, **storage.environment, "RES_OPTIONS": "timeout:1"},
            stderr=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )
        for rank in (0, 1)
    ]
    wait_until((tmp_path / "session").exists, 60, "the session")
    time.sleep(0.1)
    storage.hide(exp, 1.0, coordinator=int((tmp_path / "session").read_text()))
    (tmp_path / "armed").touch()
    said = [process.communicate(timeout=120)[1] for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    for rank in (0, 1):
        resumed, value, seconds = json.loads((tmp_path / f"rank{rank}").read_text())
        assert (resumed, value) == (3, 3.0)
        assert seconds > 2  # it did wait for what was hidden
    matrix("entries visible a second late", "rank 1 of 2", {"agreed": 1})


def test_the_newest_checkpoint_is_found_whatever_its_timestamps(tmp_path, matrix):
    """All times equal, or in the wrong order, as on a file system with coarse or skewed clocks: the newest is the newest."""
    with Checkpointer(tmp_path) as ckpt:
        for step in (30, 10, 20):
            ckpt.save(step, {"x": step}).result()
    for times in ({30: 5, 10: 5, 20: 5}, {30: 9, 10: 5, 20: 1}):
        for step, at in times.items():
            for path in [tmp_path / f"step-{step:08d}", *(tmp_path / f"step-{step:08d}").iterdir()]:
                os.utime(path, (at, at))
        with Checkpointer(tmp_path) as ckpt:
            state = {"x": 0}
            assert ckpt.resume(state).step == 20
            assert state == {"x": 20}
    matrix("timestamps equal or reversed", "1 rank", {"the newest by commit order": 2})


def test_a_directory_deleted_during_a_run_fails_one_save_by_name(tmp_path):
    """Somebody deletes the whole directory during the run: the save fails by name, and the next one after it is back works."""
    exp = tmp_path / "exp"
    config = CheckpointConfig(timeouts=Timeouts(lengthy_s=30, shutdown_s=5))
    with Checkpointer(exp, config) as ckpt:
        ckpt.save(1, {"x": 1}).result()
        os.rename(exp, tmp_path / "away")
        with pytest.raises(SafeCheckpointError) as caught:
            ckpt.save(2, {"x": 2}).result(timeout_s=30)
        assert "exp" in str(caught.value)
        os.rename(tmp_path / "away", exp)
        assert ckpt.save(3, {"x": 3}).result(timeout_s=30).step == 3


@needs_root
def test_permission_lost_during_a_run_fails_one_save_by_name():
    """The directory becomes read-only for this user: a DirectoryError with path and errno; given back, the next save works."""
    with tempfile.TemporaryDirectory() as folder:  # one that another user may enter
        os.chmod(folder, 0o755)
        done = run_program("loses_permission", f"{folder}/exp")
    assert done.stdout.splitlines() == ["13 True", "3 ['step-00000001', 'step-00000003']"], done.stderr
    assert issubclass(DirectoryError, OSError)
