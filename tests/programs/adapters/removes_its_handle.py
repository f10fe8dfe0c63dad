"""Saves in FOLDER with a handle that it removes: says, as JSON, what it had before, with the handle, and behind it."""

import json
import os
import sys
import threading

from accelerate_rank import say

from accelerate_runs import CONFIG, Training, make, shared_memory
from safe_ckpt.accelerate import register

accelerator = make(sys.argv[1])
methods = {name: getattr(accelerator, name) for name in ("save_state", "load_state", "prepare", "end_training")}


def had():
    """What of ours this process has."""
    with open(f"/proc/self/task/{os.getpid()}/children") as children:
        processes = len(children.read().split())
    replaced = [name for name, method in methods.items() if getattr(accelerator, name) != method]
    threads = sorted(thread.name for thread in threading.enumerate())
    return {"threads": threads, "processes": processes, "replaced": replaced, "shared": len(shared_memory())}


before = had()
with register(accelerator, CONFIG) as handle:
    training = Training(accelerator)
    accelerator.save_state()
    handle.wait()
    within = had()
behind = had()
weights = [parameter.clone() for parameter in training.model.parameters()]
training.epoch()
moved = any(not old.equal(new) for old, new in zip(weights, training.model.parameters(), strict=True))
accelerator.end_training()
say(json.dumps({"before": before, "within": within, "behind": behind, "trains": moved}))
