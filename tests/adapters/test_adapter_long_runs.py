"""A run that saves for ever, with each framework: no save leaves anything behind in the process."""

import shutil

import pytest
from lightning_runs import QUICK, module_class, package
from lightning_runs import trainer as lightning_trainer
from transformers_runs import SafeTrainer
from transformers_runs import trainer as transformers_trainer

from accelerate_runs import CONFIG, Training, fresh, make
from kit.kept import SLACK, kept
from safe_ckpt.accelerate import register
from safe_ckpt.core.saving.recent import MOST
from safe_ckpt.lightning import SafeCheckpointCallback

EARLY, SAVES = 10, 40
pl = package("lightning.pytorch")


def with_lightning(folder, counts):
    class Counted(SafeCheckpointCallback):
        def on_train_batch_end(self, trainer, *args, **kwargs):
            super().on_train_batch_end(trainer, *args, **kwargs)
            if trainer.global_step in (EARLY, SAVES):
                self.wait()
                counts.append(kept())

    callback = Counted(
        folder, config=QUICK, every_n_train_steps=1, save_top_k=2, monitor="step", mode="max", save_last=True
    )
    lightning_trainer(pl, [callback], folder, max_epochs=-1, max_steps=SAVES).fit(module_class(pl)())


def with_accelerate(folder, counts, place=None, early=EARLY, saves=SAVES):
    with fresh():
        accelerator = make(folder, limit=2 if place is None else None, automatic=place is None)
        Training(accelerator)
        with register(accelerator, CONFIG):
            for number in range(1, saves + 1):
                accelerator.save_state(place and str(place(number)), async_save=number not in (early, saves))
                if place is not None and number > 4:
                    shutil.rmtree(place(number - 4).parent if early > EARLY else place(number - 4))
                if number in (early, saves):
                    counts.append(kept())


def with_accelerate_named(folder, counts):
    with_accelerate(folder, counts, lambda number: folder / f"step_{number}")


def with_accelerate_elsewhere(folder, counts):
    with_accelerate(folder, counts, lambda number: folder / f"{number}/state", early=MOST + 6, saves=MOST + 36)


def with_transformers(folder, counts):
    class Counted(SafeTrainer):
        def _save_checkpoint(self, *args, **kwargs):
            super()._save_checkpoint(*args, **kwargs)
            if self.state.global_step in (EARLY, SAVES):
                self._safe_saver.engine.wait_until_over()
                counts.append(kept())

    transformers_trainer(folder, Counted, max_steps=SAVES, save_steps=1, save_total_limit=2).train()


@pytest.mark.parametrize(
    "run",
    [
        with_lightning,
        with_accelerate,
        pytest.param(with_accelerate_named, marks=pytest.mark.thorough),
        pytest.param(with_accelerate_elsewhere, marks=pytest.mark.thorough),
        with_transformers,
    ],
)
def test_objects_in_the_process_do_not_grow_with_the_saves_of_an_adapter(tmp_path, run):
    """Without any call of ``wait`` there are as many objects of ours after 40 saves as after 10."""
    counts = []
    run(tmp_path, counts)
    early, late = counts
    assert late < early + SLACK
