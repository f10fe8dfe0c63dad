"""What ``load`` and ``newest`` say of checkpoints that a framework saved."""

import pytest
import torch

import safe_ckpt
from safe_ckpt import Checkpointer
from safe_ckpt.adapters.one_shot import save_archive
from safe_ckpt.errors import NoValidCheckpointError, RestoreError


def test_checkpoints_of_a_framework_are_named_and_not_denied(tmp_path):
    """A program that waits for the first one must not wait for ever beside a run of Lightning."""
    save_archive({"state_dict": {"w": torch.ones(3)}}, tmp_path / "epoch=1.ckpt", sequence=1, step=5)
    assert (safe_ckpt.newest(tmp_path).name, safe_ckpt.newest(tmp_path).step) == ("epoch=1.ckpt", 5)
    with pytest.raises(NoValidCheckpointError, match=r"a framework saved epoch=1\.ckpt"):
        safe_ckpt.load(tmp_path, {"w": 0})
    with Checkpointer(tmp_path) as ckpt:
        with pytest.raises(NoValidCheckpointError, match=r"epoch=1\.ckpt: a framework saved it"):
            ckpt.resume({"w": torch.ones(3)})
        ckpt.save(1, {"w": torch.ones(3)}).result(timeout_s=20)
        assert ckpt.resume({"w": torch.zeros(3)}).step == 1  # its own
    with pytest.raises(RestoreError, match="not saved by Checkpointer, but by Lightning"):
        safe_ckpt.load(tmp_path / "epoch=1.ckpt", {"w": 0})


def test_a_file_of_another_tool_is_the_newest_and_nobody_vouches_for_it(tmp_path):
    """Its step is not known, and it has no manifest; a file that is cut off is none."""
    torch.save({"w": torch.ones(3)}, tmp_path / "best.ckpt")
    found = safe_ckpt.newest(tmp_path)
    assert (found.name, found.step, found.verified) == ("best.ckpt", -1, False)
    whole = (tmp_path / "best.ckpt").read_bytes()
    (tmp_path / "best.ckpt").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(NoValidCheckpointError, match="not a readable archive"):
        safe_ckpt.newest(tmp_path)


def test_a_run_below_a_fresh_one_is_another_run(tmp_path):
    """Its folder may have the name that Accelerate gives its own: the directory above is fresh all the same."""
    with Checkpointer(tmp_path / "checkpoints") as ckpt:
        ckpt.save(1, {}).result(timeout_s=20)
    assert safe_ckpt.newest(tmp_path) is None
    with pytest.raises(RestoreError, match="it has: nothing"):
        safe_ckpt.load(tmp_path / "checkpoints", {"w": 0})
