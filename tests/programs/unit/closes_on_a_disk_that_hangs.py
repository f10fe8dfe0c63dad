"""Saves to FOLDER and closes while the rename hangs: prints the error and whether it came in time."""

import sys
import time

from safe_ckpt import CheckpointConfig, Checkpointer, Timeouts
from safe_ckpt.core.home import file_home
from safe_ckpt.core.saving import queue

queue._LAST_WORDS_S = 0.3
file_home.durable.publish_directory = lambda *_: time.sleep(60)
ckpt = Checkpointer(sys.argv[1], CheckpointConfig(timeouts=Timeouts(shutdown_s=0.3)))
ckpt.save(1, {"x": 1})
begun = time.monotonic()
try:
    ckpt.close()
except Exception as error:
    print(type(error).__name__, error.name, time.monotonic() - begun < 5)
