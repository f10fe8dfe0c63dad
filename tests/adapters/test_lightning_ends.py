"""What ``fit`` leaves behind, by what ended it: files, exported weights, and what a kill left undone."""

import contextlib
import os
import signal

import pytest
import torch
from lightning_runs import QUICK, Stop, fit, module_class, names, package, stop_at
from safetensors.torch import load_file

from safe_ckpt import CheckpointConfig
from safe_ckpt.lightning import resumable

STOPS = CheckpointConfig(timeouts=QUICK.timeouts, save_on_signals=("SIGTERM",))
pl = package("lightning.pytorch")


@pytest.fixture(autouse=True)
def _handler():
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    yield
    signal.signal(signal.SIGTERM, before)


class At(pl.Callback):
    """Does something in the batch that makes a step."""

    def __init__(self, step, act):
        self.step, self.act = step, act

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == self.step - 1:
            self.act(trainer)


def time_is_up(trainer):
    next(one for one in trainer.callbacks if isinstance(one, pl.callbacks.Timer))._duration = 0.0


def stop(trainer):
    trainer.should_stop = True


def sigterm(trainer):
    signal.raise_signal(signal.SIGTERM)


# The end -> the callback, settings of the Trainer, the steps that were made; of which step last.ckpt is, whether there is a
# stopped.ckpt, and whether the weights are exported. A save is due at each second step.
ENDS = {
    "max_epochs": (None, {"max_epochs": 2}, 6, 6, False, True),
    "max_steps": (None, {"max_steps": 5}, 5, 4, False, True),
    "max_time": (At(5, time_is_up), {"max_time": {"hours": 1}}, 5, 4, False, True),
    "should_stop": (At(5, stop), {}, 5, 4, False, True),
    "signal": (At(5, sigterm), {}, 5, 4, True, False),
    "signal at a save": (At(4, sigterm), {}, 4, 4, False, False),
    "signal at the end of an epoch": (At(3, sigterm), {}, 3, 2, True, False),
    "exception": (stop_at(pl, 5), {}, 5, 4, False, False),
    "exception, saved": (stop_at(pl, 5), {}, 5, 5, False, False),
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.quick
def test_what_is_written_at_the_end_follows_from_what_ended_fit(tmp_path, end):
    """Weights are exported where ``fit`` ended of itself, at no signal and no exception. ``stopped.ckpt`` is of a signal alone,
    and of no step that is there. ``last.ckpt`` is the last that was due; with ``save_on_exception`` it is of the exception.
    """
    ends, settings, steps, last, stopped, exported = ENDS[end]
    module, folder, weights = module_class(pl)(loader=resumable), tmp_path / "run", tmp_path / "weights"
    with pytest.raises(Stop) if "exception" in end else contextlib.nullcontext():
        fit(
            folder, module=module, callbacks=[ends] if ends else [], settings={"limit_val_batches": 0, **settings},
            filename="{step}", every_n_train_steps=2, save_last=True, save_on_exception=end == "exception, saved",
            export_to=weights, config=STOPS,
        )  # fmt: skip
    files = {"last.ckpt", f"step={steps - steps % 2}.ckpt", f"step={last}.ckpt", *(["stopped.ckpt"] if stopped else [])}
    assert names(folder) == sorted(files)
    assert torch.load(folder / "last.ckpt", weights_only=True)["global_step"] == last
    if stopped:
        assert torch.load(folder / "stopped.ckpt", weights_only=True)["global_step"] == steps
    assert weights.exists() == exported
    if exported:
        found, expected = load_file(weights / "model.safetensors"), module.state_dict()
        assert found.keys() == expected.keys()
        assert all(found[name].equal(expected[name]) for name in expected)


@pytest.mark.quick
def test_the_run_that_ends_exports_its_weights_and_not_the_one_that_was_stopped_before(tmp_path):
    """Stopped by a signal and resumed: the exported weights are those of the end, and ``stopped.ckpt`` stays."""
    folder, weights = tmp_path / "run", tmp_path / "weights"
    asked = {"resume": "auto", "export_to": weights, "config": STOPS, "settings": {"limit_val_batches": 0}}
    fit(folder, module=module_class(pl)(loader=resumable), callbacks=[At(4, sigterm)], **asked)
    assert not weights.exists()
    _, _, module = fit(folder, module=module_class(pl)(loader=resumable), **asked)
    assert len(module.seen) == 5
    found = load_file(weights / "model.safetensors")
    assert all(found[name].equal(one) for name, one in module.state_dict().items())
    assert names(folder) == ["epoch=2-step=9.ckpt", "stopped.ckpt"]


LEFT = {
    "last.ckpt is the older file": True,
    "last.ckpt is a link to the older file": "link",
    "there is no last.ckpt": True,
}


@pytest.mark.parametrize("left", LEFT)
@pytest.mark.quick
def test_a_resume_finishes_what_a_kill_behind_the_commit_left_undone(tmp_path, left):
    """``last.ckpt`` names the newest file, the one that it replaces is gone, and nothing else is touched."""
    folder, kept, asked = tmp_path / "run", tmp_path / "kept.ckpt", {"filename": "{step}", "save_last": LEFT[left]}

    class Keep(pl.Callback):
        """The file that the last save replaces, which a killed run does not come to."""

        def on_train_epoch_start(self, trainer, pl_module):
            if trainer.current_epoch == 2:
                trainer.checkpoint_callback.wait()
                os.link(folder / "step=6.ckpt", kept)

    fit(folder, callbacks=[Keep()], **asked)
    assert names(folder) == ["last.ckpt", "step=9.ckpt"]
    (folder / "last.ckpt").unlink()
    os.link(kept, folder / "step=6.ckpt")
    (folder / "mine.txt").write_text("mine")
    if "link" in left:
        (folder / "last.ckpt").symlink_to("step=6.ckpt")
    elif "older" in left:
        os.link(kept, folder / "last.ckpt")
    made, callback, _ = fit(folder, resume="auto", **asked)
    assert made.ckpt_path == str(folder / "step=9.ckpt")
    assert names(folder) == ["last.ckpt", "mine.txt", "step=9.ckpt"]
    assert (folder / "last.ckpt").samefile(folder / "step=9.ckpt")
    assert (folder / "last.ckpt").is_symlink() == ("link" in left)
    assert callback.last_model_path == str(folder / "last.ckpt")
