"""Saves with ``safe_ckpt.dcp`` into DIRECTORY/NAME without end: for ``kills.killed``."""

import sys

import torch

from safe_ckpt import Retention, dcp
from safe_ckpt.errors import NoValidCheckpointError

directory, name = sys.argv[1:]
dcp.configure(retention=Retention(keep_last=1))
state = {"step": 0, "deep": {"tensor": torch.zeros(1 << 18)}}
try:
    dcp.load(state, checkpoint_id=directory)
except NoValidCheckpointError as error:
    if error.rejected:
        raise
assert state["deep"]["tensor"].unique().tolist() == [float(state["step"])]
print("BEGUN", state["step"], flush=True)
upload = None
while True:
    state["step"] += 1
    state["deep"]["tensor"].fill_(state["step"])
    before, upload = upload, dcp.async_save(state, checkpoint_id=f"{directory}/{name.format(state['step'])}")
    if before is not None:
        before.result()
        print("DONE", state["step"] - 1, flush=True)
