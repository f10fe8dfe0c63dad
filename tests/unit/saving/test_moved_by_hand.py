"""Checkpoints that somebody moves, copies, renames or deletes with the tools of the shell."""

import shutil

import torch
from small_runs import config, steps

import safe_ckpt
from safe_ckpt import Checkpointer


def state(value=0.0):
    return {"model": {"w": torch.full((4,), value)}}


def test_a_checkpoint_may_be_moved_copied_renamed_and_deleted(tmp_path):
    """It knows no path, and the order of commits counts: a run or a checkpoint goes on elsewhere, and under another name."""
    run, copy, kept = tmp_path / "run", tmp_path / "copy", tmp_path / "kept/two"
    with Checkpointer(tmp_path / "first", config()) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, state(float(step)))
    (tmp_path / "first").rename(run)
    shutil.copytree(run, copy)
    shutil.copytree(run / "step-00000002", kept)
    for folder in (run, copy):
        assert safe_ckpt.newest(folder).step == 3
    found = state()
    assert safe_ckpt.load(kept, found).step == 2
    assert found["model"]["w"].tolist() == [2.0] * 4
    (run / "step-00000003").rename(run / "best")
    with Checkpointer(run, config()) as ckpt:
        assert ckpt.resume(found).step == 3
        shutil.rmtree(run / "step-00000001")  # beside a live run
        ckpt.save(4, found).result(timeout_s=20)
    shutil.rmtree(run / "step-00000004")
    assert safe_ckpt.newest(run).step == 3
    assert steps(copy) == ["step-00000001", "step-00000002", "step-00000003"]
