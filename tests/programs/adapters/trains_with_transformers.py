"""Trains with the Trainer in FOLDER from its newest checkpoint, saves at each step and says so. More FOLDERS for modules."""

# ruff: noqa: E402
import os
import sys
import warnings

sys.path[:0] = sys.argv[2:]
warnings.filterwarnings("ignore")
from transformers import TrainerCallback
from transformers.utils import logging
from transformers_runs import fingerprint, trainer

from safe_ckpt.errors import NoValidCheckpointError

logging.set_verbosity_error()


class Say(TrainerCallback):
    def on_save(self, args, state, control, **_):
        os.write(1, f"SAVED {state.global_step}\n".encode())


def make():
    return trainer(sys.argv[1], max_steps=30, save_steps=1, save_total_limit=2, hidden=64, callbacks=[Say()])


made = make()
try:
    made.train(resume_from_checkpoint=True)
except NoValidCheckpointError:
    made = make()
    made.train()
os.write(1, f"END {fingerprint(made)}\n".encode())
