"""What the corpus holds of a Transformers Trainer: a checkpoint that was saved within an epoch."""

from __future__ import annotations

import pytest
from transformers import TrainerCallback
from transformers_runs import SafeTrainer, Stop, data, trainer

from corpus.filled import fill, same

STEP = 2


class Noting(SafeTrainer):
    """Notes the rows that it trains on."""

    def training_step(self, model, inputs, *more):
        rows = [row["input_ids"].tolist() for row in data()]
        self.seen.append([rows.index(one) for one in inputs["input_ids"].tolist()])
        return super().training_step(model, inputs, *more)


class Numbers(TrainerCallback):
    looked = False

    def on_step_end(self, args, state, control, model=None, optimizer=None, **_):
        if state.global_step == STEP:
            fill(STEP, model, optimizer)

    def on_train_begin(self, args, state, control, model=None, optimizer=None, **_):
        if state.global_step:
            assert state.global_step == STEP
            same(STEP, model, optimizer)
            self.looked = True


def made(folder, *callbacks):
    found = trainer(folder, Noting, callbacks=callbacks, save_steps=STEP, lr_scheduler_type="constant")
    found.seen = []
    return found


def save(folder):
    with pytest.raises(KeyboardInterrupt):
        made(folder, Numbers(), Stop(STEP + 1)).train()


def resume(folder):
    """The rows that are left of the epoch."""
    numbers = Numbers()
    found = made(folder, numbers)
    found.train(resume_from_checkpoint=True)
    assert numbers.looked
    return found.seen
