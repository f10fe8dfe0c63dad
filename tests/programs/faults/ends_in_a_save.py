"""Saves to FOLDER and ends before that is done, as HOW says."""

import signal
import sys
import threading

import torch

from safe_ckpt import CheckpointConfig, Checkpointer, Timeouts

folder, how = sys.argv[1:]
ckpt = Checkpointer(folder, CheckpointConfig(timeouts=Timeouts(shutdown_s=20)))
handle = ckpt.save(1, {"w": {"t": torch.ones(20_000_000)}})
if how == "closes":
    ckpt.close()
elif how == "exits":
    sys.exit(3)
elif how == "raises":
    raise KeyError("mine")
elif how == "forgets":
    del ckpt, handle
elif how == "waits in a thread":
    threading.Thread(target=ckpt.wait).start()
elif how == "at Ctrl-C":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job starts with it ignored
    print("saving", flush=True)
    while True:
        pass
