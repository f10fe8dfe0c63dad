"""Loops of Lightning's Fabric: ``Checkpointer`` on one device, DDP and FSDP2, and ``fabric.save`` through the plugin."""

import os
import sys
import time
from pathlib import Path

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.strategies import ModelParallelStrategy
from torch.utils.data import DataLoader
from typer.testing import CliRunner

from kit import warm
from kit.patience import scaled
from safe_ckpt import Checkpointer
from safe_ckpt.core.formats.manifest import read_manifest
from safe_ckpt.errors import ConfigError, CorruptCheckpointError, DirectoryError, HostileCheckpointError, StateError
from safe_ckpt.lightning import SafeCheckpointIO
from safe_ckpt.tools.cli.app import app
from support import flip_bit, kill_group, program_path, start_script

EXAMPLE = Path(__file__).parents[2] / "examples/fabric_loop.py"
pytestmark = pytest.mark.filterwarnings("ignore:.*srun.*")


def one_device(*plugins):
    fabric = Fabric(accelerator="cpu", devices=1, plugins=list(plugins))
    fabric.launch()
    return fabric


def weights(output):
    (found,) = (line for line in output.splitlines() if line.startswith(("weights", "WEIGHTS")))
    return found


def run(file, *args, **environment):
    done = warm.run(
        [sys.executable, "-W", "ignore", str(file), *map(str, args)], capture_output=True, text=True, timeout=scaled(90),
        check=False, env={**os.environ, **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(240)
@pytest.mark.parametrize("devices", [pytest.param("1", marks=pytest.mark.thorough), "2"])
def test_a_killed_loop_ends_as_an_uninterrupted_one(tmp_path, monkeypatch, devices):
    """The example, killed after its first save was announced and begun again, has the weights of one that was not killed."""
    monkeypatch.setenv("DEVICES", devices)
    reference = weights(run(EXAMPLE, tmp_path / "reference"))
    process = start_script(EXAMPLE, str(tmp_path / "run"))
    for line in process.stdout:
        if line.startswith("step 20"):
            break
    kill_group(process)
    process.stdout.close()
    assert weights(run(EXAMPLE, tmp_path / "run")) == reference


@pytest.mark.timeout(180)
def test_fsdp2_goes_on_from_what_every_rank_saved(tmp_path):
    """A model that ``ModelParallelStrategy`` shards over two ranks goes on in a new run as if there had been no end."""
    program = program_path("trains_with_fabric_fsdp2")
    reference = weights(run(program, tmp_path / "reference", 6, "checkpointer"))
    run(program, tmp_path / "run", 3, "checkpointer")
    assert len(list((tmp_path / "run/step-00000003").rglob("*.distcp"))) >= 2
    assert weights(run(program, tmp_path / "run", 6, "checkpointer")) == reference


@pytest.mark.timeout(180)
def test_sharded_saves_of_fabric_within_publishing_are_whole_folders(tmp_path):
    """``fabric.save`` of ``ModelParallelStrategy``, within ``publishing``: a folder that is whole, and goes on bit for bit.

    Alone it writes into the folder of before; once it refused a folder that was there (Lightning, issues 18853 and 18881).
    """
    program = program_path("trains_with_fabric_fsdp2")
    reference = weights(run(program, tmp_path / "reference", 4, "publishing"))
    run(program, tmp_path / "run", 2, "publishing")
    (folder,) = (tmp_path / "run").glob("step-*2")
    assert {".metadata", "meta.pt"} < set(os.listdir(folder / "state"))
    listed = {entry.path for entry in read_manifest(folder).files}
    assert {f"state/{name}" for name in os.listdir(folder / "state")} == listed
    assert weights(run(program, tmp_path / "run", 4, "publishing")) == reference


@pytest.mark.quick
def test_the_plugin_saves_whole_files_that_stock_fabric_reads(tmp_path):
    """``fabric.save`` writes a verified file with the state's step. Stock Fabric and torch read it, and list knows it."""
    fabric, path = one_device(SafeCheckpointIO()), tmp_path / "run/a.ckpt"
    model, optimizer = fabric.setup(net := torch.nn.Linear(3, 2), torch.optim.AdamW(net.parameters()))
    fabric.save(path, {"model": model, "optimizer": optimizer, "step": 7})
    assert torch.load(path)["step"] == 7
    for one in (fabric, one_device(TorchCheckpointIO())):
        state = {"model": torch.nn.Linear(3, 2), "step": 0}
        rest = one.load(path, state)
        assert (state["step"], list(rest)) == (7, ["optimizer"])
        assert torch.equal(state["model"].weight, net.weight)
    listed = (
        CliRunner().invoke(app, ["list", str(tmp_path / "run")], env={"COLUMNS": "200"}).stdout.splitlines()[1].split()
    )
    assert (listed[:2], "valid" in listed) == (["a.ckpt", "7"], True)
    assert CliRunner().invoke(app, ["resume-path", str(tmp_path / "run")]).stdout.strip() == str(path)


def test_a_save_that_fails_leaves_the_old_file(tmp_path):
    """What cannot be saved raises, and the file of before is whole; a damaged and a hostile file are refused by name."""
    fabric, path = one_device(SafeCheckpointIO()), tmp_path / "a.ckpt"
    fabric.save(path, {"step": 1})
    with pytest.raises(StateError):
        fabric.save(path, {"step": 2, "lock": sys._getframe()})
    assert torch.load(path)["step"] == 1
    with pytest.raises(DirectoryError):
        fabric.save(path / "below.ckpt", {"step": 2})
    (tmp_path / "sharded").mkdir()  # by a strategy that writes folders: stock Fabric puts a file into it
    with pytest.raises(DirectoryError, match="sharded: there is a folder of this name"):
        fabric.save(tmp_path / "sharded", {"step": 2})
    assert list((tmp_path / "sharded").iterdir()) == []
    with pytest.raises(ConfigError):
        fabric.save("s3://bucket/a.ckpt", {"step": 2})
    flip_bit(path, path.stat().st_size // 2)
    with pytest.raises(CorruptCheckpointError):
        fabric.load(path)
    torch.save({"step": time.sleep}, path)
    with pytest.raises(HostileCheckpointError):
        fabric.load(path, weights_only=False)


def test_strategies_and_loaders_that_fabric_cannot_save_are_refused_by_name(tmp_path):
    """A strategy that takes no plugin says so, and a loader without a state is named by the save."""
    with pytest.raises(NotImplementedError, match="CheckpointIO"):
        Fabric(
            accelerator="cpu", devices=2, plugins=[SafeCheckpointIO()],
            strategy=ModelParallelStrategy(lambda model, _: model, data_parallel_size=2, tensor_parallel_size=1),
        )  # fmt: skip
    fabric = one_device()
    loader = fabric.setup_dataloaders(DataLoader(torch.ones(4, 2)))
    with Checkpointer(tmp_path) as ckpt, pytest.raises(StateError, match="loader"):
        ckpt.save(1, {"loader": loader})
