"""Nothing about starts is remembered: however a job ends, the next start takes the newest healthy checkpoint."""

import os
import stat
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from safe_ckpt import Checkpointer, set_up_directory
from safe_ckpt.errors import RestoreError
from support import run_program


def files(folder):
    return sorted(os.path.relpath(os.path.join(at, name), folder) for at, _, names in os.walk(folder) for name in names)


@pytest.mark.parametrize("how", ["raise", "kill"])
def test_starts_that_fail_cost_no_checkpoint(tmp_path, how):
    """Five starts in a row that fail for a reason of their own: all take the newest one, and nothing is written."""
    run = tmp_path / "run"

    def start():
        return run_program("starts_that_fail", str(run), how, timeout_s=100).stdout.strip()

    assert start() == "0"
    before = files(run)
    assert [start() for _ in range(5)] == ["3"] * 5
    assert [name for name in files(run) if name not in before and "lock" not in name] == []


def test_what_ends_a_resume_says_how_an_older_one_is_named(tmp_path):
    """The error has the checkpoint, and one line says how to go on from another; the same at every start."""
    with Checkpointer(tmp_path) as ckpt:
        for step, width in ((1, 3), (2, 4)):
            ckpt.save(step, {"net": torch.nn.Linear(width, 1)}).result()
    for _ in range(4):
        with Checkpointer(tmp_path) as ckpt:
            state = {"net": torch.nn.Linear(3, 1)}
            with pytest.raises((RestoreError, RuntimeError)) as caught:
                ckpt.resume(state)
            said = "\n".join(getattr(caught.value, "__notes__", ()))
            if sys.version_info >= (3, 11):
                assert str(tmp_path / "step-00000002") in said
                assert "name it: resume(state, step=...)" in said
                assert "\n" not in said
            assert ckpt.resume(state, step=1).step == 1


def test_a_job_that_watches_no_signals_runs_on_any_thread(tmp_path):
    """Only ``save_on_signals`` needs the main thread."""

    def run():
        with Checkpointer(tmp_path) as ckpt:
            ckpt.save(1, {"x": 1}).result(timeout_s=30)
            return ckpt.stop_requested

    with ThreadPoolExecutor(1) as pool:
        assert not pool.submit(run).result(60)
    assert (tmp_path / "step-00000001").is_dir()


@pytest.mark.parametrize("mode", [0o2775, 0o1777, 0o750], ids=["setgid", "sticky", "closed to others"])
def test_a_directory_that_is_emptied_keeps_its_mode(tmp_path, mode):
    """With setgid and the sticky bit: in a shared project new files go on having the group of the project."""
    (tmp_path / "run/old").mkdir(parents=True)
    (tmp_path / "run").chmod(mode)
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == mode
    set_up_directory(tmp_path / "run", mode="overwrite")
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == mode
    assert not (tmp_path / "run/old").exists()
