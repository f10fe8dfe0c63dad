"""A signal beside what else may be due at its batch: a validation, a save of another callback, steps that are still to do."""

import signal
from pathlib import Path

import pytest
import torch
from lightning_runs import fingerprint, module_class, names, package, trainer
from torch.utils.data import DataLoader, TensorDataset

from kit.limits import QUICK
from safe_ckpt import CheckpointConfig
from safe_ckpt.lightning import SafeCheckpointCallback, resumable

pytestmark = [
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* not empty.*"),
    pytest.mark.filterwarnings("ignore:.*callbacks used to create the checkpoint need to be provided.*"),
]
STOPS = CheckpointConfig(save_on_signals=("SIGTERM",), timeouts=QUICK)


@pytest.fixture(autouse=True)
def _handler():
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    yield
    signal.signal(signal.SIGTERM, before)


def signal_at(pl, step):
    class Signal(pl.Callback):
        """SIGTERM in the batch that makes this step."""

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if trainer.global_step == step - 1:
                signal.raise_signal(signal.SIGTERM)

    return Signal()


def fit(folder, *callbacks, seed=1, **settings):
    pl = package("lightning.pytorch")
    pl.seed_everything(seed, verbose=False)
    module, made = module_class(pl)(loader=resumable), trainer(pl, list(callbacks), folder, **settings)
    made.fit(module)
    return made, module


VALIDATIONS = {"at an epoch's end": (3, {}), "within an epoch": (5, {"val_check_interval": 2})}


@pytest.mark.parametrize("case", VALIDATIONS)
@pytest.mark.parametrize(("top_k", "at_end"), [(-1, False), (1, False), (-1, True), (1, None)])
@pytest.mark.quick
def test_a_validation_that_a_signal_came_before_is_made_and_saved_by_the_resume(tmp_path, case, top_k, at_end):
    """The checkpoint of that validation is there, by the name and the score that it has in a run without a stop."""
    pl, (step, settings) = package("lightning.pytorch"), VALIDATIONS[case]

    def run(folder, *more, seed=1):
        saves = SafeCheckpointCallback(
            folder, "{step}-{val_loss:.6f}", monitor="val_loss", save_top_k=top_k, save_on_train_epoch_end=at_end,
            mode="max", resume="auto", config=STOPS,
        )  # fmt: skip
        made, module = fit(folder, saves, *more, seed=seed, **settings)
        return names(folder), Path(saves.best_model_path).name, str(saves.best_model_score), fingerprint(module), made

    *expected, made = run(tmp_path / "straight")
    files, *_, stopped = run(tmp_path / "broken", signal_at(pl, step))
    assert stopped.global_step == step < made.global_step
    assert "stopped.ckpt" in files
    files, *found, made = run(tmp_path / "broken", seed=77)
    assert made.ckpt_path.endswith("stopped.ckpt")
    assert [[name for name in files if name != "stopped.ckpt"], *found] == expected


OTHERS = {
    "rarely": {"every_n_train_steps": 50},
    "weights alone": {"every_n_train_steps": 1, "save_weights_only": True},
    "that step": {"every_n_train_steps": 1},
}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.quick
def test_a_signal_saves_where_the_resume_looks(tmp_path, other, first):
    """Whatever a callback for another directory has saved of that step: the run goes on from it, and nothing is done again."""
    pl = package("lightning.pytorch")

    def run(*more):
        own = SafeCheckpointCallback(tmp_path / "a", filename="{step}", resume="auto", config=STOPS)
        others = SafeCheckpointCallback(tmp_path / "b", filename="{step}", config=STOPS, **OTHERS[other])
        return fit(tmp_path, *([others, own] if first else [own, others]), *more)

    made, _ = run(signal_at(pl, 5))
    assert made.global_step == 5
    assert "stopped.ckpt" in names(tmp_path / "a")
    made, module = run()
    assert made.ckpt_path == str(tmp_path / "a" / "stopped.ckpt")
    assert len(module.seen) == made.global_step - 5


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.quick
def test_a_signal_saves_the_whole_state_beside_what_another_callback_saves_there(tmp_path, other, first):
    """In one directory for both, too: only a whole checkpoint of that step makes ``stopped.ckpt`` needless."""
    pl = package("lightning.pytorch")

    def run(*more):
        own = SafeCheckpointCallback(tmp_path / "a", filename="{step}", resume="auto", config=STOPS)
        more_often = {"every_n_train_steps": 1, **OTHERS[other]}
        others = SafeCheckpointCallback(tmp_path / "a", filename="other-{step}", mode="max", config=STOPS, **more_often)
        return fit(tmp_path, *([others, own] if first else [own, others]), *more)

    made, _ = run(signal_at(pl, 5))
    assert made.global_step == 5
    assert ("stopped.ckpt" in names(tmp_path / "a")) == (other != "that step")
    made, module = run()
    assert len(module.seen) == made.global_step - 5


@pytest.mark.parametrize("limits", [{"min_steps": 5}, {"min_epochs": 2}, {"min_epochs": 2, "min_steps": 5}])
@pytest.mark.quick
def test_a_signal_ends_fit_before_what_it_is_to_train_at_least(tmp_path, limits):
    """What was trained behind ``stopped.ckpt`` would be lost. min_epochs and min_steps hold for the next fit, too."""
    pl = package("lightning.pytorch")
    saves = SafeCheckpointCallback(tmp_path, config=STOPS)
    made, _ = fit(tmp_path, signal_at(pl, 2), saves, **limits)
    assert made.global_step == 2
    # Without min_epochs Lightning's is 1.
    assert (made.min_epochs, made.min_steps) == (limits.get("min_epochs", 1), limits.get("min_steps"))


@pytest.mark.parametrize("case", VALIDATIONS)
@pytest.mark.quick
def test_a_signal_within_a_validation_saves_before_that_is_over(tmp_path, case):
    """On one process: a validation may take longer than the grace. The resume makes it whole, as a run without a stop does."""
    pl, (_, settings) = package("lightning.pytorch"), VALIDATIONS[case]

    class Module(module_class(pl)):
        def val_dataloader(self):
            return DataLoader(TensorDataset(torch.ones(12, 4)), batch_size=4)

    class Signal(pl.Callback):
        """SIGTERM in the second validation's first batch; notes what is there in the last one."""

        begun, there = 0, None

        def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
            self.begun += 1
            if self.begun == 4:
                signal.raise_signal(signal.SIGTERM)
            if self.begun == 6:
                self.there = {name: (tmp_path / "broken" / name).read_bytes() for name in names(tmp_path / "broken")}

    def run(folder, *more, seed=1):
        saves = SafeCheckpointCallback(
            folder, "{step}-{val_loss:.6f}", monitor="val_loss", save_top_k=-1, resume="auto", config=STOPS
        )
        pl.seed_everything(seed, verbose=False)
        module, made = Module(loader=resumable), trainer(pl, [saves, *more], folder, **settings)
        made.fit(module)
        return names(folder), Path(saves.best_model_path).name, str(saves.best_model_score), fingerprint(module), made

    *expected, made = run(tmp_path / "straight")
    comes = Signal()
    files, *_, stopped = run(tmp_path / "broken", comes)
    assert stopped.global_step < made.global_step
    assert (comes.begun, list(comes.there)) == (6, files)
    assert comes.there["stopped.ckpt"] == (tmp_path / "broken" / "stopped.ckpt").read_bytes()
    files, *found, made = run(tmp_path / "broken", seed=77)
    assert made.ckpt_path.endswith("stopped.ckpt")
    assert [[name for name in files if name != "stopped.ckpt"], *found] == expected
