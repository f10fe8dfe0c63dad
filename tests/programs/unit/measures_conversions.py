"""Converts SOURCE to TARGET-<form>, each form; prints by how many KiB the memory of its own has grown."""

import sys
import threading
import time
from pathlib import Path

import safe_ckpt.checkpointer  # noqa: F401 - with all that it imports
from safe_ckpt.tools.cli.app import app

peak, done = [0], threading.Event()


def look():
    while not done.is_set():
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("RssAnon"):
                peak[0] = max(peak[0], int(line.split()[1]))
        done.wait(0.005)


thread = threading.Thread(target=look)
thread.start()
time.sleep(0.05)
before = peak[0]
try:
    for form in ("safetensors", "torch", "dcp"):
        app(["convert", sys.argv[1], f"{sys.argv[2]}-{form}", "--to", form, "--no-verify"], standalone_mode=False)
finally:
    done.set()
    thread.join()
print("ANON", peak[0] - before)
