"""Saves the same step to FOLDER three times, each time another value: prints the one that is resumed."""

import sys

from safe_ckpt import Checkpointer

with Checkpointer(sys.argv[1]) as ckpt:
    for value in (1, 2, 3):
        ckpt.save(1, {"x": value}).result(timeout_s=30)
    state = {"x": 0}
    ckpt.resume(state)
    print(state["x"])
