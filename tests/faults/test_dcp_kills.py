"""SIGKILL of a job that saves with ``safe_ckpt.dcp`` in the background, at random moments, again and again."""

import pytest
import torch
import torch.distributed.checkpoint as stock
from kills import killed

from safe_ckpt import CheckpointConfig, dcp
from safe_ckpt.errors import NoValidCheckpointError

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled"
)  # DCP's own, which reads what ours saved


def _newest(directory):
    state = {"step": 0, "deep": {"tensor": torch.zeros(1 << 18)}}
    try:
        dcp.load(state, checkpoint_id=directory)
    except NoValidCheckpointError as error:
        if error.rejected:
            raise
    return state["step"], state["deep"]["tensor"].unique().tolist()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["step-{}", "last"])
def test_kills_lose_nothing_that_was_saved(tmp_path, name):
    """6 SIGKILLs with keep_last=1, 20 in ``make faults``: what was announced is there, and stock reads what has a name. So it
    is where one folder is saved again and again."""
    run = tmp_path / "run"
    for which, announced in killed("kills_dcp", run, name):
        step, values = _newest(run)
        assert step >= announced, which
        assert values == [float(step)], which
        for folder in run.glob("[!.]*"):
            state = {"step": 0, "deep": {"tensor": torch.zeros(1 << 18)}}
            stock.load(state, checkpoint_id=folder, no_dist=True)
            assert state["deep"]["tensor"].unique().tolist() == [float(state["step"])], which
    dcp.configure(CheckpointConfig())
    dcp.save({"step": 0}, checkpoint_id=run / "last")
    left = list((run / ".safe_ckpt").rglob("pending/*"))
    assert not left, f"{which}: something was left over: {left}"
