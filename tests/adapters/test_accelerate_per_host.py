"""Accelerate with ``mirror.near: per-host``: its checkpoints lie on each host's own disk, with a mirror behind it."""

import json
import os
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from accelerate import DistributedDataParallelKwargs
from accelerate.utils import DistributedType, ProjectConfiguration

from accelerate_runs import Training, make, stateful
from host_runs import config, move_to_host, why_no_mounts
from kit.ranks import spawn_ranks, values
from safe_ckpt import CheckpointConfig
from safe_ckpt.accelerate import register
from safe_ckpt.accelerate.handle import check
from safe_ckpt.core.formats.manifest import read_manifest
from safe_ckpt.core.formats.verify import verify_files
from safe_ckpt.errors import ConfigError

pytestmark = pytest.mark.skipif(bool(why_no_mounts()), reason=f"mounts of one's own: {why_no_mounts()}")
HOSTS = (0, 0, 1, 1)  # of the ranks
LAST = 6


def _train(rank, folder, until, killed, on_each_node):
    """From the newest checkpoint up to a step: where it began, what the training is at its end."""
    near = move_to_host(HOSTS[rank], folder)
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(len(HOSTS)))
    ordered = DistributedDataParallelKwargs(find_unused_parameters=True)
    accelerator = make(near / "exp", dataloader_config=stateful(), kwargs_handlers=[ordered])
    accelerator.project_configuration.save_on_each_node = on_each_node
    handle = register(accelerator, config(folder))
    training = Training(accelerator, batch_size=1)
    info = handle.resume()
    begun = training.counter.count

    def saved(count):
        accelerator.save_state(step=count, async_save=False)
        if count == until and killed:
            handle.wait(mirrored=True)
            training.accelerator.wait_for_everyone()
            os.kill(os.getpid(), signal.SIGKILL)

    training.epoch(saved)
    end = training.fingerprint()
    accelerator.end_training()
    return None if info is None else info.step, begun, end


def _run(folder, *, until=LAST, killed=False, on_each_node=False):
    folder.mkdir(exist_ok=True)
    return spawn_ranks(_train, len(HOSTS), folder, until, killed, on_each_node)


def _newest(folder, host):
    return max((folder / f"host{host}/exp/checkpoints").glob("checkpoint_*"))


def _lose(folder, what):
    host = 0 if what == "disk of host 0" else 1
    if "disk" in what:
        shutil.rmtree(folder / f"host{host}")
    elif what == "a bit":
        own = min(_newest(folder, host).glob("random_states_*.pkl"))
        data = bytearray(own.read_bytes())
        data[-1] ^= 1
        own.write_bytes(data)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return [end for _, _, end in values(_run(tmp_path_factory.mktemp("uninterrupted")))]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("what", ["nothing", "disk of host 0", "disk of host 1", "a bit"])
def test_an_accelerator_goes_on_from_the_disks_of_its_hosts(tmp_path, uninterrupted, what):
    """Two hosts of two ranks, all killed: each disk has its ranks' files, and the resume ends as a run that never stopped.

    So also where one disk is new, or a bit flipped: what it lacks comes from the other host, or from the far copy.
    """
    assert all(one.exit_code == -signal.SIGKILL for one in _run(tmp_path, until=3, killed=True, on_each_node=True))
    for host, ranks in ((0, (0, 1)), (1, (2, 3))):
        newest = _newest(tmp_path, host)
        files = {one["path"]: one["rank"] for one in json.loads((newest / "manifest.json").read_text())["files"]}
        assert {"model.safetensors", *(f"random_states_{rank}.pkl" for rank in range(4))} <= set(files)
        assert {name for name in files if (newest / name).exists()} == {n for n, rank in files.items() if rank in ranks}
        assert (newest.parent.parent / ".safe_ckpt").is_dir()
        assert all(one.name.startswith("checkpoint_") for one in newest.parent.iterdir())
    _lose(tmp_path, what)
    done = values(_run(tmp_path, on_each_node=True))
    assert [one[:2] for one in done] == [(3, 3)] * 4
    assert [one[2] for one in done] == uninterrupted
    assert _newest(tmp_path, 0).name == _newest(tmp_path, 1).name == "checkpoint_5"


def _loads_by_path(rank, folder):
    near = move_to_host(HOSTS[rank], folder)
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(len(HOSTS)))
    accelerator = make(near / "exp", dataloader_config=stateful())
    with register(accelerator, config(folder)) as handle:
        training = Training(accelerator, batch_size=1)
        accelerator.load_state(near / "exp/checkpoints/checkpoint_4")
        count = training.counter.count
        accelerator.register_save_state_pre_hook(
            lambda _models, _weights, to: Path(to, f"of_rank_{rank}.txt").write_text(f"{rank}")
        )
        accelerator.save_state()
        handle.wait(mirrored=True)
    return count


@pytest.mark.timeout(240)
def test_a_path_on_the_disks_is_loaded_and_what_hooks_write_goes_along(tmp_path):
    """``load_state(path)`` of one in parts on two hosts gives it whole to each. Hooks' files stay where they were written."""
    values(_run(tmp_path))
    assert values(spawn_ranks(_loads_by_path, len(HOSTS), tmp_path)) == [5] * 4
    saved = [_newest(tmp_path, host) for host in (0, 1)]
    assert [sorted(one.name for one in folder.glob("of_*")) for folder in saved] == [
        ["of_rank_0.txt", "of_rank_1.txt"],
        ["of_rank_2.txt", "of_rank_3.txt"],
    ]
    assert all(read_manifest(folder) == read_manifest(saved[0]) for folder in saved)
    verify_files(tmp_path / "far" / saved[0].name, read_manifest(saved[0]))
    assert {f"of_rank_{rank}.txt" for rank in range(4)} <= {one.path for one in read_manifest(saved[0]).files}


def test_what_each_host_cannot_have_says_what_to_use(tmp_path):
    """``save_on_each_node`` needs a directory on each host, and that needs names of Accelerate's own: each error says so."""
    alone = make(tmp_path / "alone")
    alone.project_configuration = ProjectConfiguration(
        str(tmp_path / "alone"), automatic_checkpoint_naming=True, save_on_each_node=True
    )
    with pytest.raises(ConfigError, match=r'mirror\.near = "per-host"'):
        register(alone, CheckpointConfig())
    by_hand = make(tmp_path / "by-hand", automatic=False)
    with pytest.raises(ConfigError, match="automatic_checkpoint_naming=True"):
        register(by_hand, config(tmp_path))
    deepspeed = SimpleNamespace(
        distributed_type=DistributedType.DEEPSPEED, project_configuration=ProjectConfiguration()
    )
    with pytest.raises(ConfigError, match="not supported with DeepSpeed"):
        check(deepspeed, config(tmp_path))
