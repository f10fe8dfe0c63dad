"""Leaves half a save in FOLDER and kills itself."""

import os
import signal
import sys
from pathlib import Path

from safe_ckpt import Checkpointer

ckpt = Checkpointer(sys.argv[1])
ckpt.resume({})
half = Path(sys.argv[1], ".safe_ckpt/pending/half")
half.mkdir(parents=True)
(half / "x").write_text("x")
os.kill(os.getpid(), signal.SIGKILL)
