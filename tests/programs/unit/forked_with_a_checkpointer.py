"""A process is forked while FOLDER is saved to, and just ends: prints its status, and the steps of this and the next save."""

import os
import sys

from safe_ckpt import Checkpointer

with Checkpointer(sys.argv[1]) as ckpt:
    handle = ckpt.save(1, {"x": 1})
    if os.fork() == 0:
        del ckpt
        sys.exit(0)
    print(os.wait()[1], handle.result(timeout_s=60).step, ckpt.save(2, {"x": 1}).result(timeout_s=60).step)
