"""Goes on in NEAR, with a mirror in FAR: says where from, whether each number is that step's, and what is near and far."""

import os
import sys

import torch

from safe_ckpt import CheckpointConfig, Checkpointer, Mirror, Retention, Timeouts, events

near, far = sys.argv[1], sys.argv[2]
state = {"model": {"w": torch.zeros(200_000)}, "step": 0}


def say(*words):
    """One write a line: threads print, too, and a kill between two writes would leave half a line."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def tell(event):
    if isinstance(event, events.Mirrored) and not event.error:
        say("far", int(event.path[-8:]))
    if isinstance(event, events.Fetched):
        say("fetched", int(event.path[-8:]))


config = CheckpointConfig(
    mirror=Mirror(url=far, keep_last=2),
    retention=Retention(keep_last=2),
    timeouts=Timeouts(lengthy_s=60, barrier_s=20),
)
with Checkpointer(near, config, hooks=[tell]) as ckpt:
    ckpt.resume(state)
    exact = bool((state["model"]["w"] == state["step"]).all())
    say("resumed", state["step"], exact)
    while state["step"] < 100_000:
        state["step"] += 1
        state["model"]["w"] += 1
        ckpt.save(state["step"], state).result()
        say("near", state["step"])
