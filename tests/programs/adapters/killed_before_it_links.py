"""Trains in FOLDER with save_last LAST ("link" or "True"), killed before last.ckpt is step 9 if HOW is "kill"."""

import os
import signal
import sys
from pathlib import Path

import lightning_program  # noqa: F401 - it finds the modules of the tests
from lightning_runs import fit

from safe_ckpt.core.storage import durable

folder, last, how = sys.argv[1:]
real = durable.publish_link


def publish_link(existing, staged, link, aside):
    if "step=9" in str(existing):
        os.kill(os.getpid(), signal.SIGKILL)
    return real(existing, staged, link, aside)


if how == "kill":
    durable.publish_link = publish_link
made, callback, module = fit(Path(folder), resume="auto", filename="{step}", save_last=last if last == "link" else True)
if how == "go":
    made.validate(module, ckpt_path="last", verbose=False)
    print(os.path.realpath(made.ckpt_path), callback.last_model_path)
