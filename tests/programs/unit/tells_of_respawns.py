"""Saves to FOLDER: prints an event for every writer process that was replaced."""

import sys

from safe_ckpt import Checkpointer

events = []
with Checkpointer(sys.argv[1], hooks=[events.append]) as ckpt:
    ckpt.save(1, {"x": 1}).result()
print([event.kind for event in events if event.kind == "respawned"])
