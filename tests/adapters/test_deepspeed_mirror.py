"""A mirror under DeepSpeed: the disk is lost, and the engine of a fresh machine loads the newest tag all the same."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from deepspeed_runs import engine, spawn, train, weights

from kit.thorough import THOROUGH
from safe_ckpt import CheckpointConfig, Mirror

pytest.importorskip("deepspeed")


def _config():
    return CheckpointConfig(mirror=Mirror(url=os.environ["MIRROR"]))


def save(rank, folder):
    from safe_ckpt.deepspeed import install

    run = engine(2, width=64)
    with install(run, _config()):
        train(run, rank, 0, 3)
        assert run.save_checkpoint(folder, tag="step3") is True
        train(run, rank, 3, 4)
        assert run.save_checkpoint(folder, tag="step4") is True
    train(run, rank, 4, 6)
    torch.save(weights(run), Path(folder).parent / f"want{rank}.pt")


def load(rank, folder, tag):
    from safe_ckpt.deepspeed import install

    run = engine(2, width=64)
    with install(run, _config()):
        path, _ = run.load_checkpoint(folder, tag=tag)
        assert path is not None
        train(run, rank, int((tag or "step4")[4:]), 6)
    assert torch.equal(weights(run), torch.load(Path(folder).parent / f"want{rank}.pt"))


def test_the_newest_tag_comes_from_the_mirror(tmp_path, bucket, monkeypatch):
    """Two ranks with ZeRO 2, without a tag, and with ``--all`` with one that is asked for: bit for bit as without the loss."""
    monkeypatch.setenv("MIRROR", bucket.url())
    out = tmp_path / "out"
    spawn(save, str(out))
    for tag in (None, "step3") if THOROUGH else (None,):
        shutil.rmtree(out)
        spawn(load, str(out), tag)
