"""A Trainer with ``mirror.near: per-host``: its checkpoints lie on each host's own disk, with a mirror behind it."""

import json
import os
import shutil
import signal
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from transformers import TrainerCallback
from transformers_runs import SafeTrainer, fingerprint, names, trainer

from host_runs import config, move_to_host, why_no_mounts
from kit.ranks import spawn_ranks, values
from safe_ckpt.core.formats.manifest import read_manifest

pytestmark = pytest.mark.skipif(bool(why_no_mounts()), reason=f"mounts of one's own: {why_no_mounts()}")
HOSTS = (0, 0, 1)  # of the ranks
LAST, KILLED_AT = 8, 5


class _Kill(TrainerCallback):
    """SIGKILL on every rank, in the step behind a save that is far."""

    def __init__(self, saver_of):
        self.saver_of = saver_of

    def on_step_end(self, args, state, control, **_):
        if state.global_step == KILLED_AT:
            self.saver_of().engine.wait(mirrored=True)
            dist.barrier()
            os.kill(os.getpid(), signal.SIGKILL)


def _train(rank, folder, resumed, killed, on_each_node, last):
    """Train on this host: where it began, what it is at the end, whether the arguments are as they were."""
    near = move_to_host(HOSTS[rank], folder)
    os.environ.update(
        LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE=str(len(HOSTS)), LOCAL_WORLD_SIZE=str(len(HOSTS))
    )
    made = trainer(
        near / "exp",
        SafeTrainer,
        max_steps=last,
        save_total_limit=2,
        save_on_each_node=on_each_node,
        ddp_find_unused_parameters=True,
    )
    made.checkpoint_config = config(folder, keep_last=None)
    begun = SimpleNamespace(step=None)

    class Begin(TrainerCallback):
        def on_train_begin(self, args, state, control, **_):
            begun.step = state.global_step

    made.add_callback(Begin())
    if killed:
        made.add_callback(_Kill(lambda: made._safe_saver))
    made.train(resume_from_checkpoint=str(near / "exp" / resumed) if resumed.startswith("checkpoint") else resumed)
    return begun.step, fingerprint(made), made.args.save_on_each_node


def _run(folder, *, resumed="auto", killed=False, on_each_node=False, last=LAST):
    folder.mkdir(exist_ok=True)
    return spawn_ranks(_train, len(HOSTS), folder, resumed, killed, on_each_node, last)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return [one[1] for one in values(_run(tmp_path_factory.mktemp("uninterrupted")))]


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("lost", "resumed"), [("nothing", "auto"), ("disk 0", "auto"), ("disk 1", "auto"), ("a step", "checkpoint-2")]
)
def test_a_trainer_goes_on_from_the_disks_of_its_hosts(tmp_path, uninterrupted, lost, resumed):
    """Two hosts, all ranks killed: a resume ends as a run that never stopped, also where a disk is new, or from a path.

    Each disk has the files that its ranks wrote; with ``save_on_each_node``, too.
    """
    assert all(one.exit_code == -signal.SIGKILL for one in _run(tmp_path, killed=True, on_each_node=True))
    for host, ranks in ((0, (0, 1)), (1, (2,))):
        newest = tmp_path / f"host{host}/exp/checkpoint-4"
        files = {one["path"]: one["rank"] for one in json.loads((newest / "manifest.json").read_text())["files"]}
        assert {"model.safetensors", "trainer_state.json", "rng_state_2.pth"} <= set(files)
        assert {name for name in files if (newest / name).exists()} == {n for n, rank in files.items() if rank in ranks}
    if lost.startswith("disk"):
        shutil.rmtree(tmp_path / f"host{lost[-1]}")
    done = values(_run(tmp_path, resumed=resumed, on_each_node=True))
    assert [one[0] for one in done] == [2 if lost == "a step" else 4] * 3
    assert [one[1] for one in done] == uninterrupted
    # The limit counts one that was fetched from the next start on.
    kept = ["checkpoint-4"] * (lost == "disk 0") + ["checkpoint-6", "checkpoint-8"]
    assert [one[2] for one in done] == [True] * 3
    assert [names(tmp_path / f"host{host}/exp") for host in (0, 1)] == [kept] * 2


@pytest.mark.timeout(240)
def test_what_the_user_keeps_in_a_checkpoint_goes_along_on_each_host(tmp_path):
    """A training that goes back saves a step anew: each host's part replaces the old one, and keeps the user's files there."""
    values(_run(tmp_path, last=4))
    first = read_manifest(tmp_path / "host0/exp/checkpoint-4")
    for host in (0, 1):
        (tmp_path / f"host{host}/exp/checkpoint-4/notes.txt").write_text(f"of host {host}")
    values(_run(tmp_path, resumed="checkpoint-2", last=4))
    for host in (0, 1):
        newest = tmp_path / f"host{host}/exp/checkpoint-4"
        assert (newest / "notes.txt").read_text() == f"of host {host}"
        assert read_manifest(newest).sequence > first.sequence
