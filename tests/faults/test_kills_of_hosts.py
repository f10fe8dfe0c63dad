"""A directory on each host's own disk, under kills, lost disks and flipped bits."""

import dataclasses
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
import torch.distributed as dist

from host_runs import config, empty, move_to_host, same, state_of, why_no_mounts
from kit import warm
from kit.far import bindfs
from kit.limits import QUICK
from kit.patience import scaled
from kit.ranks import spawn_ranks, values
from kit.thorough import THOROUGH
from safe_ckpt import Checkpointer
from support import flip_bit, program_path

pytestmark = pytest.mark.skipif(bool(why_no_mounts()), reason=f"mounts of one's own: {why_no_mounts()}")


def _run_until_killed(folder, number, chance):
    """What both ranks say, by rank, before they are killed at random moments, perhaps one a little earlier."""
    command = [sys.executable, str(program_path("saves_on_hosts")), str(folder)]
    more = [str(folder / f"meeting{number}"), str(Path(__file__).parents[1])]
    jobs = [warm.Popen([*command, str(rank), *more], stdout=subprocess.PIPE, text=True) for rank in (0, 1)]
    said = [[], []]

    def listen(rank):
        said[rank] += [line.split() for line in jobs[rank].stdout]

    listeners = [threading.Thread(target=listen, args=(rank,)) for rank in (0, 1)]
    first, rest_s, between_s = chance.randrange(2), chance.uniform(0.0, 0.5), chance.choice([0.0, 0.05])
    begun = [jobs[rank].stdout.readline().split() for rank in (0, 1)]
    for rank in (0, 1):
        said[rank].append(begun[rank])
        listeners[rank].start()
    for rank, after_s in ((first, rest_s), (1 - first, between_s)):
        timer = threading.Timer(after_s, jobs[rank].kill)
        timer.start()
        timer.join()
    for job, listener in zip(jobs, listeners, strict=True):
        listener.join(60)
        job.wait(60)
        job.stdout.close()
    return said


def _told(said, word):
    return max((int(words[1]) for lines in said for words in lines if words and words[0] == word), default=0)


def _damaged(disk, chance):
    """One bit of the newest part on this disk differs. Whether there is one."""
    newest = sorted(disk.glob("step-*/*.safetensors"))[-1:]
    for file in newest:
        flip_bit(file, file.stat().st_size - 1 - chance.randrange(100_000))
    return bool(newest)


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.thorough)])
def test_kills_lost_disks_and_flipped_bits_of_hosts_lose_nothing_that_was_far(tmp_path, matrix, seed):
    """Two hosts are killed at a random moment; then one host's disk is lost, or a bit flips there, or neither.

    Both go on from one step: what was told to be near, or after a loss far, or newer; and each number is that step's.
    """
    chance, outcomes, known, safely_far = random.Random(seed), Counter(), 0, 0
    for number in range(250 if THOROUGH else 5):
        said = _run_until_killed(tmp_path, number, chance)
        came_back = [lines[0] for lines in said]
        assert came_back[0] == came_back[1] == ["resumed", came_back[0][1], "True"], (said, known)
        step = int(came_back[0][1])
        assert step >= known, (said, known)
        safely_far = max(safely_far, _told(said, "far"))
        host, harm = chance.randrange(2), chance.choice(["none", "lost", "flipped"])
        if harm == "lost" and safely_far:  # the only one of all, without a part, would be an error
            shutil.rmtree(tmp_path / f"host{host}")
            known = safely_far
        elif harm == "flipped" and safely_far and _damaged(tmp_path / f"host{host}", chance):
            known = safely_far
        else:
            known = max(_told(said, "near"), step)
        outcomes[f"{harm}: went on from what was told"] += 1
    matrix(
        "disk of a host lost, damaged or neither behind a kill of all",
        f"a directory on each host, seed {seed}",
        outcomes,
    )


TIMES = dataclasses.replace(QUICK, barrier_s=4, shutdown_s=2)


def _save_while_far_stands_still(rank, folder, server):
    """Seconds of each save while the far end gives no answer, and of the end."""
    near, took = move_to_host(rank, folder), []
    with Checkpointer(near, config(folder, far="disk/run", timeouts=TIMES)) as ckpt:
        ckpt.save(1, state_of(rank, 1)).result()
        ckpt.wait(mirrored=True)
        if rank == 0:
            os.kill(server, signal.SIGSTOP)
        dist.barrier()
        for step in (2, 3, 4):
            begun = time.monotonic()
            ckpt.save(step, state_of(rank, step)).result()
            took.append(time.monotonic() - begun)
        begun = time.monotonic()
    return max(took), time.monotonic() - begun


def _go_on(rank, folder, far):
    near, state = move_to_host(rank, folder), empty()
    with Checkpointer(near, config(folder, far=far, timeouts=TIMES)) as ckpt:
        step = ckpt.resume(state).step
        wrong = same(state, rank, step)
        ckpt.save(step + 1, state_of(rank, step + 1)).result()
    return step, wrong


@pytest.mark.thorough
@pytest.mark.timeout(180)
def test_a_far_end_that_gives_no_answer_holds_up_no_host(tmp_path):
    """A server that stops: two hosts save near, and end in time; both go on from there, and the far end gets the newest."""
    with bindfs(tmp_path / "behind", tmp_path / "disk") as server:
        for save_s, end_s in values(spawn_ranks(_save_while_far_stands_still, 2, tmp_path, server.pid)):
            assert save_s < scaled(3)
            assert end_s < scaled(6 * TIMES.shutdown_s)
        assert values(spawn_ranks(_go_on, 2, tmp_path, "disk/run")) == [(4, []), (4, [])]
        server.send_signal(signal.SIGCONT)
        assert values(spawn_ranks(_go_on, 2, tmp_path, "disk/run")) == [(5, []), (5, [])]
        for host in (0, 1):
            shutil.rmtree(tmp_path / f"host{host}")
        assert values(spawn_ranks(_go_on, 2, tmp_path, "disk/run")) == [(6, []), (6, [])]
