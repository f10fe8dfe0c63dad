"""Two ranks that train a sharded model below FOLDER without end, with further FOLDERS of modules: for ``kills.killed``."""

# ruff: noqa: E402, I001 - the ranks fork before a framework is imported
import sys
from pathlib import Path

sys.path[:0] = sys.argv[2:]
import two_ranks

rank = two_ranks.fork()

from corpus.filled import fill, same
from sharded_runs import TP, made
from transformers import TrainerCallback

from safe_ckpt.errors import NoValidCheckpointError


class Tells(TrainerCallback):
    def on_train_begin(self, args, state, control, model=None, optimizer=None, **_):
        if state.global_step:
            same(state.global_step, model, optimizer)
        two_ranks.tell(rank, f"BEGUN {state.global_step}")
        self.begun = state.global_step

    def on_step_end(self, args, state, control, model=None, optimizer=None, **_):
        fill(state.global_step, model, optimizer)
        if state.global_step > self.begun + 2:  # each save waits for the one before
            two_ranks.tell(rank, f"DONE {state.global_step - 2}")


folder = Path(sys.argv[1])
run = made(
    rank,
    folder / "run",
    folder / "base",
    TP,
    callbacks=[Tells()],
    max_steps=100000,
    save_total_limit=2,
    lr_scheduler_type="constant_with_warmup",
    disable_tqdm=True,
    learning_rate=1e-3,
)
for group in run.create_optimizer().param_groups:
    group["lr"] = 1e-3
try:
    run.train(resume_from_checkpoint=True)
except NoValidCheckpointError as error:
    if error.rejected:
        raise
    run.train()
