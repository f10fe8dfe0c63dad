"""Signals, exceptions and kills in the midst of a Trainer's save."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from lightning_runs import QUICK, Stop, fit, module_class, names, package, stop_at, trainer

from kit import warm
from safe_ckpt import CheckpointConfig
from safe_ckpt.core.formats.manifest import read_manifest
from safe_ckpt.core.formats.verify import verify_files
from safe_ckpt.core.saving.handle import OpenSave
from safe_ckpt.lightning import SafeCheckpointCallback, resumable
from support import program_path, writers_of


@contextlib.contextmanager
def saving_on_sigusr1(made, path):
    """As under SLURM: SIGUSR1 makes the Trainer in ``made`` save to ``path``."""
    before = signal.signal(signal.SIGUSR1, lambda *_: made["trainer"].save_checkpoint(path))
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_save_from_a_signal_handler_within_a_save_does_not_deadlock(tmp_path):
    """SLURM's hpc save arrives in the middle of another save: it is written at once, neither deadlocks."""
    pl = package("lightning.pytorch")

    class Interrupt(pl.Callback):
        done = False

        def on_save_checkpoint(self, trainer, pl_module, checkpoint):
            if not self.done:
                self.done = True
                signal.raise_signal(signal.SIGUSR1)

    made = {}

    with saving_on_sigusr1(made, tmp_path / "hpc_ckpt_1.ckpt"):
        callback = SafeCheckpointCallback(dirpath=tmp_path / "exp", config=QUICK)
        made["trainer"] = trainer(pl, [Interrupt(), callback], tmp_path)
        made["trainer"].fit(module_class(pl)())
    verify_files(tmp_path / "hpc_ckpt_1.ckpt", read_manifest(tmp_path / "hpc_ckpt_1.ckpt"))
    assert names(tmp_path / "exp") == ["epoch=2-step=9.ckpt"]


def test_a_save_from_a_signal_handler_while_fit_waits_is_whole(tmp_path):
    """SLURM's hpc save arrives while fit waits for the disk: both files are whole, and fit goes on."""
    pl = package("lightning.pytorch")
    made = {}

    with saving_on_sigusr1(made, tmp_path / "hpc_ckpt_1.ckpt"):
        callback = SafeCheckpointCallback(dirpath=tmp_path / "exp", config=QUICK)
        made["trainer"] = trainer(pl, [callback], tmp_path)
        wait = OpenSave.wait_until_over

        def interrupted(handle, timeout_s=None):
            if not (tmp_path / "hpc_ckpt_1.ckpt").exists():
                signal.raise_signal(signal.SIGUSR1)
            wait(handle, timeout_s)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(OpenSave, "wait_until_over", interrupted)
            made["trainer"].fit(module_class(pl)())
    verify_files(tmp_path / "hpc_ckpt_1.ckpt", read_manifest(tmp_path / "hpc_ckpt_1.ckpt"))
    assert names(tmp_path / "exp") == ["epoch=2-step=9.ckpt"]


def test_an_exception_of_the_user_is_the_one_that_is_seen(tmp_path):
    """training_step raises: that exception comes out, what was in flight is committed, nothing is left running."""
    pl = package("lightning.pytorch")
    callback = SafeCheckpointCallback(dirpath=tmp_path, config=QUICK)
    with pytest.raises(Stop):
        trainer(pl, [callback, stop_at(pl, 7)], tmp_path).fit(module_class(pl)(width=5000))
    assert names(tmp_path) == ["epoch=1-step=6.ckpt"]
    verify_files(tmp_path / "epoch=1-step=6.ckpt", read_manifest(tmp_path / "epoch=1-step=6.ckpt"))
    assert writers_of(os.getpid()) == []
    assert list((tmp_path / ".safe_ckpt/pending").rglob("*")) == []


def test_save_on_exception_saves_the_state_and_raises_that_exception(tmp_path):
    """save_on_exception=True saves the state at the exception, and that exception is what comes out."""
    pl = package("lightning.pytorch")
    callback = SafeCheckpointCallback(dirpath=tmp_path, config=QUICK, save_on_exception=True, save_last=True)
    with pytest.raises(Stop):
        trainer(pl, [callback, stop_at(pl, 5)], tmp_path).fit(module_class(pl)())
    assert "epoch=1-step=5.ckpt" in names(tmp_path)
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 5


def test_a_batch_that_an_exception_interrupted_is_trained_again_with_the_same_random_numbers(tmp_path):
    """What it drew before the exception is drawn again, and what it logged counts once, as in a run that nothing stopped."""

    class Raises(module_class(package("lightning.pytorch"))):
        raises = False

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log("mean", batch[0].sum() + torch.rand(()), on_step=False, on_epoch=True)
            if self.raises and self.global_step == 7:  # in the last epoch, whose mean is left
                raise Stop
            return loss

    def weights(folder, *, seed, raises=False):
        pl.seed_everything(0, verbose=False)
        module = Raises(loader=resumable)
        module.raises = raises
        with pytest.raises(Stop) if raises else contextlib.nullcontext():
            made, _, _ = fit(folder, module=module, save_on_exception=True, resume="auto", seed=seed)
        means = [] if raises else [made.callback_metrics["mean"].item()]
        return {name: one.tolist() for name, one in module.named_parameters()}, means

    pl = package("lightning.pytorch")
    whole = weights(tmp_path / "whole", seed=1)
    weights(tmp_path / "stopped", seed=1, raises=True)
    assert weights(tmp_path / "stopped", seed=2) == whole


@pytest.mark.parametrize("behind", ["the forward pass", "the batch"])
@pytest.mark.quick
def test_a_save_at_an_exception_says_that_buffers_will_be_changed_twice(tmp_path, caplog, behind):
    """The batch is trained again, and its forward pass has changed them: only where it has, and is done again."""
    pl = package("lightning.pytorch")

    class Normed(module_class(pl)):
        def __init__(self):
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(1)

        def training_step(self, batch, batch_idx):
            self.norm(torch.ones(2, 1))
            if self.global_step == 4 and behind == "the forward pass":
                raise Stop
            return super().training_step(batch, batch_idx)

    callback = SafeCheckpointCallback(dirpath=tmp_path, config=QUICK, save_on_exception=True)
    with pytest.raises(Stop):
        trainer(pl, [callback, stop_at(pl, 5)], tmp_path).fit(Normed())
    assert ("will change them twice" in caplog.text) == (behind == "the forward pass")


@pytest.mark.parametrize("last", ["link", True])
def test_a_resumed_run_knows_what_it_saved_last(tmp_path, last):
    """After a signal behind the last save that was due: last.ckpt is what it is in a run that nothing stopped."""
    pl = package("lightning.pytorch")

    class Signals(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if trainer.global_step == 7:
                signal.raise_signal(signal.SIGTERM)

    config = CheckpointConfig(timeouts=QUICK.timeouts, save_on_signals=("SIGTERM",))
    arguments = {"config": config, "save_last": last, "every_n_train_steps": 7, "resume": "auto"}

    def run(folder, *callbacks):
        fit(tmp_path / folder, module=module_class(pl)(loader=resumable), callbacks=callbacks, **arguments)

    run("whole")
    run("stopped", Signals())
    assert "stopped.ckpt" in names(tmp_path / "stopped")
    run("stopped")
    found = [torch.load(tmp_path / name / "last.ckpt", weights_only=True) for name in ("whole", "stopped")]
    assert [one["global_step"] for one in found] == [7, 7]


def test_a_save_that_is_due_at_the_step_of_an_exception_is_made_by_the_resumed_run(tmp_path):
    """The exception's own checkpoint does not stand for it."""
    pl = package("lightning.pytorch")

    class Raises(pl.Callback):
        def on_validation_start(self, trainer, pl_module):
            if trainer.global_step == 6:
                raise Stop

    arguments = {
        "save_on_exception": True,
        "monitor": "val_loss",
        "save_top_k": -1,
        "resume": "auto",
    }
    with pytest.raises(Stop):
        fit(tmp_path, callbacks=[Raises()], **arguments)
    _, callback, _ = fit(tmp_path, **arguments)
    assert sorted(torch.load(path, weights_only=True)["global_step"] for path in callback.best_k_models) == [3, 6, 9]


def test_an_exception_in_a_save_hook_is_the_users(tmp_path):
    """on_save_checkpoint raises: that comes out of fit, and the bookkeeping is as before."""
    pl = package("lightning.pytorch")
    module = module_class(pl)()

    def on_save_checkpoint(checkpoint):
        raise ZeroDivisionError("mine")

    module.on_save_checkpoint = on_save_checkpoint
    callback = SafeCheckpointCallback(dirpath=tmp_path, config=QUICK)
    with pytest.raises(ZeroDivisionError, match="mine"):
        trainer(pl, [callback], tmp_path).fit(module)
    assert callback.best_model_path == ""
    assert names(tmp_path) == []


def test_a_run_killed_before_a_removal_has_it_done_by_the_next(tmp_path):
    """What a killed run had not yet deleted is deleted by the next one; nothing else is."""
    command = [sys.executable, str(program_path("killed_before_it_deletes")), str(tmp_path / "exp")]
    assert warm.run([*command, "kill"], capture_output=True, check=False).returncode == -9
    assert names(tmp_path / "exp") == ["step=6.ckpt", "step=9.ckpt"]
    done = warm.run([*command, "go"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert names(tmp_path / "exp") == ["step=12.ckpt"]


@pytest.mark.parametrize("last", ["link", pytest.param(True, marks=pytest.mark.thorough)])
def test_a_run_killed_before_linking_last_has_it_done_by_the_next(tmp_path, last):
    """A killed run had committed its checkpoint but not yet renamed last.ckpt: the next run does, also one that is over."""
    command = [sys.executable, str(program_path("killed_before_it_links")), str(tmp_path / "exp"), str(last)]
    assert warm.run([*command, "kill"], capture_output=True, check=False).returncode == -9
    assert (tmp_path / "exp/last.ckpt").exists()
    assert torch.load(tmp_path / "exp/last.ckpt", weights_only=True)["global_step"] == 6
    done = warm.run([*command, "go"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "last.ckpt" in done.stdout
    assert names(tmp_path / "exp") == ["last.ckpt", "step=9.ckpt"]
    assert torch.load(tmp_path / "exp/last.ckpt", weights_only=True)["global_step"] == 9


def test_ctrl_c_in_training_ends_promptly_and_leaves_whole_files(tmp_path):
    """SIGINT to the whole group during training: the run ends within seconds and every file is whole."""
    command = [sys.executable, str(program_path("trains_until_it_is_interrupted")), str(tmp_path / "exp")]
    with warm.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as run:
        assert run.stdout.readline() == "training\n"
        os.killpg(run.pid, signal.SIGINT)
        begun = time.monotonic()
        run.wait(timeout=20)
        assert time.monotonic() - begun < 10
        assert writers_of(run.pid) == []
    files = list((tmp_path / "exp").glob("*.ckpt"))
    assert len(files) >= 3
    for file in files:
        verify_files(file, read_manifest(file))
    assert list((tmp_path / "exp/.safe_ckpt/pending").rglob("*")) == []
