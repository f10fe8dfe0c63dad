"""One path, and two doors that write to it: each replaces what is its own kind, and refuses anything else."""

import dataclasses

import pytest
import torch

from kit.limits import QUICK
from safe_ckpt import CheckpointConfig, Checkpointer, Timeouts, dcp, publishing
from safe_ckpt.core.formats.manifest import read_manifest
from safe_ckpt.errors import SafeCheckpointError, StateError
from safe_ckpt.testing import inline_saves

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
CONFIG = CheckpointConfig(timeouts=QUICK, record_events=False)
STEP = "step-00000001"


@pytest.fixture(autouse=True)
def _settings():
    dcp.configure(CONFIG)
    with inline_saves():
        yield
    dcp.configure(CheckpointConfig())


def by_checkpointer(run, config=CONFIG):
    with Checkpointer(run, config) as ckpt:
        ckpt.save(1, {"w": torch.ones(3)}).result(timeout_s=30)


def by_export(run):
    with Checkpointer(run.parent / "elsewhere", CONFIG) as ckpt:
        ckpt.export({"w": torch.ones(3)}, run / STEP).result(timeout_s=30)


def by_dcp(run):
    dcp.save({"w": torch.ones(3)}, checkpoint_id=run / STEP, no_dist=True)


def by_publishing(run):
    with publishing(run, 1, config=CONFIG) as folder:
        (folder / "a.bin").write_bytes(b"abc")


DOORS = (by_checkpointer, by_export, by_dcp, by_publishing)


def files(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("second", DOORS)
@pytest.mark.parametrize("first", DOORS)
def test_a_door_replaces_no_checkpoint_of_another_one(tmp_path, first, second):
    """It is refused, and what lay there is as it was. A checkpoint of its own is replaced by the new one."""
    run = tmp_path / "run"
    first(run)
    before, one = files(run / STEP), read_manifest(run / STEP).op_id
    if first is second:
        second(run)
        assert read_manifest(run / STEP).op_id != one
        return
    with pytest.raises(SafeCheckpointError, match=STEP):
        second(run)
    assert files(run / STEP) == before


@pytest.mark.parametrize("harm", [None, b"{"], ids=["gone", "damaged"])
def test_a_job_saves_over_what_is_left_of_its_own(tmp_path, harm):
    """A checkpoint without a manifest that can be read is passed over, and replaced when training gets there again."""
    run = tmp_path / "run"
    by_checkpointer(run)
    (run / STEP / "manifest.json").unlink() if harm is None else (run / STEP / "manifest.json").write_bytes(harm)
    by_checkpointer(
        run, dataclasses.replace(CONFIG, timeouts=Timeouts(barrier_s=0.5))
    )  # it is waited for, half as long
    assert read_manifest(run / STEP).step == 1


def test_each_folder_that_is_published_has_its_description(tmp_path):
    """One whose saver is not done yet is named, also beside another one that is whole."""
    torch_dcp = pytest.importorskip("torch.distributed.checkpoint")
    with pytest.raises(StateError) as caught, publishing(tmp_path / "run", 1, config=CONFIG) as folder:
        for name in ("done", "late"):
            torch_dcp.save({"t": torch.ones(4)}, checkpoint_id=folder / name, no_dist=True)
        (folder / "late" / ".metadata").unlink()
    assert "late" in str(caught.value)
    assert "done" not in str(caught.value)
    assert not (tmp_path / "run" / STEP).exists()
