"""Saves with Accelerate a model of twelve tensors that lie on disk; prints the MiB it took. FOLDER, and more for modules."""

# ruff: noqa: E402
import sys
import threading
from pathlib import Path

sys.path[:0] = sys.argv[2:]
import torch
from accelerate import disk_offload

from accelerate_runs import CONFIG, make
from safe_ckpt.accelerate import register

seen, over = [], threading.Event()


def anonymous():
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines() if line[:3] == "Rss")
    return sum(int(fields[name].split()[0]) << 10 for name in ("RssAnon", "RssShmem"))


def watch():
    while not over.wait(0.002):
        seen.append(anonymous())


model = torch.nn.Sequential(*(torch.nn.Linear(4096, 2048, bias=False) for _ in range(12)))
disk_offload(model, sys.argv[1] + "/offloaded", execution_device="cpu")
with register(make(None), CONFIG) as handle:
    before = anonymous()
    watcher = threading.Thread(target=watch)
    watcher.start()
    handle.save_model(model, sys.argv[1] + "/weights", max_shard_size="100MB")
    over.set()
    watcher.join()
print("PEAK", (max(seen) - before) >> 20)
