"""What five hundred saves leave behind: nothing."""

import os
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from kit.inside import store_keys
from kit.limits import PATIENT
from kit.ranks import spawn_ranks, values
from safe_ckpt import CheckpointConfig, Checkpointer, PerRank, Retention
from safe_ckpt.core.coordination.process_groups import group_timeout_s
from support import writers_of

CONFIG = CheckpointConfig(timeouts=PATIENT, retention=Retention(keep_last=2), record_events=False)


def fewest(count):
    """The lease and the heartbeat open files for moments: what stays is what the quietest of many looks sees."""
    looks = []
    for _ in range(50):
        looks.append(count())
        time.sleep(0.005)
    return min(looks)


def facts():
    lines = [line.split() for line in Path("/proc/self/status").read_text().splitlines()]
    return {words[0].rstrip(":"): words[1] for words in lines if len(words) > 1}


def standing():
    return {
        "fds": fewest(lambda: len(os.listdir("/proc/self/fd"))),
        "threads": fewest(threading.active_count),
        "kernel threads": fewest(lambda: int(facts()["Threads"])),
        "writers": len(writers_of(os.getpid())),
        "rss_kib": int(facts()["RssAnon"]),
        "shared_kib": int(facts()["RssShmem"]),
        "group_timeout_s": group_timeout_s(None),
    }


def save_often(rank, folder, count):
    state = {"w": torch.zeros(10_000), "own": PerRank({"t": torch.zeros(1000)}), "step": 0}
    with Checkpointer(folder, CONFIG) as ckpt:
        for step in range(1, 31):
            ckpt.save(step, state).result(timeout_s=60)
        ckpt.wait()
        dist.barrier()
        before = standing()
        for step in range(31, 31 + count):
            ckpt.save(step, state)
        ckpt.wait()
        keys = store_keys(ckpt)
        dist.barrier()
        after = standing()
    closed = standing()
    return before, after, closed, keys


@pytest.mark.timeout(400)
def test_five_hundred_saves_leave_everything_flat(tmp_path, matrix):
    """Descriptors, threads, processes, memory, keys in the store, files: as after thirty; the group's timeout as it was."""
    count = 500
    for before, after, closed, keys in values(spawn_ranks(save_often, 2, tmp_path, count, timeout_s=380)):
        for what in ("fds", "threads", "kernel threads", "writers", "group_timeout_s"):
            assert after[what] == before[what], what
        assert after["rss_kib"] < before["rss_kib"] + 8192
        assert after["shared_kib"] <= before["shared_kib"] + 64
        assert keys < 40
        assert closed["writers"] == 0
        assert closed["fds"] < before["fds"]
    assert sorted(p.name for p in tmp_path.glob("step-*")) == ["step-00000529", "step-00000530"]
    matrix(f"{count} saves", "2 ranks", {"descriptors, threads, memory, processes flat": 1})
