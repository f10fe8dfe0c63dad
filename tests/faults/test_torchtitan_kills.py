"""SIGKILL of two ranks that train by torchtitan's own Trainer, for ``make test-torchtitan``."""

import importlib
from pathlib import Path

import pytest

pytest.importorskip("torchtitan")
import torch
import torch.distributed.checkpoint as dcp
from kills import killed

from safe_ckpt.core.formats.manifest import read_manifest
from safe_ckpt.core.formats.verify import verify_files

TESTS = Path(__file__).parents[1]
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.mark.thorough  # minutes: each start is one of the framework
@pytest.mark.timeout(1500)
def test_kills_lose_nothing_that_torchtitan_saved(tmp_path, monkeypatch):
    """20 SIGKILLs of both ranks: each start goes on from what was announced or newer, and what has a name is whole."""
    monkeypatch.syspath_prepend(TESTS / "adapters")
    importlib.import_module("titan_runs").ready()
    folder, folders = tmp_path / "run/checkpoint", [Path(__file__).parent, TESTS, TESTS / "adapters"]
    for which, announced in killed("kills_torchtitan", tmp_path / "run", *folders):
        steps = {int(path.name.removeprefix("step-")): path for path in folder.glob("step-*")}
        assert max(steps, default=0) >= announced, which
        for step, path in steps.items():
            verify_files(path, read_manifest(path))
            state = {"train_state": {"step": torch.zeros((), dtype=torch.int32)}}
            dcp.load(state, checkpoint_id=path, no_dist=True)
            assert int(state["train_state"]["step"]) == read_manifest(path).step == step, which
