"""Lightning's own requeueing under SLURM, on one rank and without a SLURM; tests/schedulers/test_slurm.py has a real one."""

import os
import signal

import pytest
from lightning_runs import PACKAGES, fingerprint, module_class, package, trainer

from safe_ckpt.lightning import SafeCheckpointCallback, resumable

SLURM = {
    "SLURM_NTASKS": "1",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_JOB_NAME": "train",
    "SLURM_JOB_ID": "7",
}
PACKAGE = pytest.mark.parametrize("name", PACKAGES)


@pytest.fixture
def queue(tmp_path, monkeypatch):
    """The environment of a job, and a ``scontrol`` that notes what it is told, and whether the directory is held then."""
    said = tmp_path / "said"
    program = tmp_path / "bin" / "scontrol"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" $(ls {tmp_path}/runs/.safe_ckpt | grep -c "^lock$") >> {said}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    for key, value in SLURM.items():
        monkeypatch.setenv(key, value)
    return said


def run(name, folder, *callbacks, resume="auto", seed=1, **more):
    pl = package(name)
    pl.seed_everything(seed, verbose=False)
    module = module_class(pl)(loader=resumable)
    checkpoints = SafeCheckpointCallback(folder, save_top_k=-1, resume=resume)
    made = trainer(pl, [checkpoints, *callbacks], folder, **more)
    made.fit(module)
    return fingerprint(module), made


def raise_at(name, step):
    class Raise(package(name).Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if trainer.global_step == step - 1:
                signal.raise_signal(signal.SIGUSR1)

    return Raise()


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* not empty.*")
@PACKAGE
@pytest.mark.parametrize("resume", ["auto", None])
def test_the_job_is_requeued_when_all_is_committed(tmp_path, queue, name, resume):
    """SIGUSR1 in mid-epoch: saved at the end of the batch, no directory is held any more, requeued once, resumed exactly."""
    reference, _ = run(name, tmp_path / "straight", resume=resume)
    assert not queue.exists()
    _, made = run(name, tmp_path / "runs", raise_at(name, 5), resume=resume)
    assert made.global_step == 5
    assert queue.read_text().split("\n") == ["requeue 7 0", ""]
    expected = "stopped.ckpt" if resume else "hpc_ckpt_1.ckpt"
    assert (tmp_path / "runs" / expected).exists()
    found, made = run(name, tmp_path / "runs", resume=resume, seed=2)
    assert made.ckpt_path.endswith(expected)
    assert found == reference


@PACKAGE
def test_an_old_file_of_lightnings_is_passed_over(tmp_path, queue, name):
    """A job that was requeued once and killed later goes on from its newest checkpoint, not from that of the requeue."""
    _, made = run(name, tmp_path / "runs", max_epochs=1)
    made.save_checkpoint(tmp_path / "runs/hpc_ckpt_1.ckpt")
    run(name, tmp_path / "runs", max_epochs=2)
    _, made = run(name, tmp_path / "runs")
    assert made.ckpt_path.endswith("epoch=1-step=6.ckpt")


@pytest.mark.filterwarnings("ignore:The dirpath has changed.*")
@PACKAGE
def test_a_newer_file_of_lightnings_is_taken(tmp_path, queue, name):
    """It was saved by stock Lightning, or without a callback of ours: the later step wins."""
    _, made = run(name, tmp_path / "other", max_epochs=2)
    made.save_checkpoint(tmp_path / "hpc_ckpt_1.ckpt")
    run(name, tmp_path / "runs", max_epochs=1)
    (tmp_path / "hpc_ckpt_1.ckpt").rename(tmp_path / "runs/hpc_ckpt_1.ckpt")
    _, made = run(name, tmp_path / "runs")
    assert made.ckpt_path.endswith("hpc_ckpt_1.ckpt")
    assert made.global_step == 9


@pytest.mark.filterwarnings("ignore:The dirpath has changed.*")
@PACKAGE
def test_a_newer_file_of_lightnings_that_is_taken_is_not_said_to_be_passed_over(tmp_path, queue, name, caplog):
    """Stock Lightning saved it into our directory. One warning of a newer file would say that ours is taken."""
    run(name, tmp_path / "runs", max_epochs=1)
    pl = package(name)
    stock = trainer(pl, [pl.callbacks.ModelCheckpoint(tmp_path / "other")], tmp_path / "other", max_epochs=2)
    stock.fit(module_class(pl)())
    stock.save_checkpoint(tmp_path / "runs/hpc_ckpt_1.ckpt")
    _, made = run(name, tmp_path / "runs")
    assert made.ckpt_path.endswith("hpc_ckpt_1.ckpt")
    assert "is of a later step than" not in caplog.text


@PACKAGE
def test_a_handler_of_the_users_is_left_alone(tmp_path, queue, name):
    """Lightning installs none over it, and neither do we: nothing is saved, nothing is requeued."""
    seen = []
    before = signal.signal(signal.SIGUSR1, lambda *_: seen.append(1))
    try:
        _, made = run(name, tmp_path / "runs", raise_at(name, 5))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert seen == [1]
    assert made.global_step == 9
    assert not queue.exists()
