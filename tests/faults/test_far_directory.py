"""A directory as mirror whose disk is full or gives no answer: saves go on, and what was missed goes there later."""

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

import pytest
import torch

from kit import warm
from kit.disks import small_disk
from kit.far import bindfs
from kit.limits import QUICK
from kit.patience import scaled, wait_until
from kit.thorough import THOROUGH
from safe_ckpt import CheckpointConfig, Checkpointer, Mirror, Retention, events
from safe_ckpt.core.formats.manifest import read_manifest
from safe_ckpt.core.formats.verify import verify_files
from support import flip_bit, program_path

TIMES = dataclasses.replace(QUICK, barrier_s=4, shutdown_s=2)


def config(far, **more):
    return CheckpointConfig(timeouts=TIMES, mirror=Mirror(url=str(far), **more), retention=Retention(keep_last=2))


def state(value):
    return {"model": {"w": torch.full((1 << 16,), float(value))}, "step": value}


def steps(folder):
    return sorted(int(path.name[5:]) for path in folder.glob("step-*"))


def tried(seen, step):
    """What became of the copy of a step: its last event of that kind, or None."""
    found = [one for one in seen if isinstance(one, events.Mirrored) and one.path.endswith(f"{step:08d}")]
    return found[-1] if found else None


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to mount")
@pytest.mark.timeout(120)
def test_a_mirror_that_is_full_fails_no_save(tmp_path):
    """The event says how much is needed and free. Nothing there is deleted for it; with room, the newest goes there."""
    seen = []
    with small_disk(tmp_path / "disk", "1m") as disk:
        far = disk / "run"
        with Checkpointer(tmp_path / "near", config(far, keep_last=1), hooks=[seen.append]) as ckpt:
            ckpt.save(1, state(1)).result()
            wait_until(lambda: tried(seen, 1), 30)
            (disk / "other").write_bytes(bytes(600 << 10))
            for step in (2, 3):
                ckpt.save(step, state(step)).result()
            wait_until(lambda: tried(seen, 3), 30)
            assert "free" in tried(seen, 3).error
            assert (steps(far), steps(tmp_path / "near")) == ([1], [2, 3])
            (disk / "other").unlink()
            ckpt.save(4, state(4)).result()
            wait_until(lambda: tried(seen, 4), 30)
        assert tried(seen, 4).error == ""
        assert steps(far) == [4]
        verify_files(far / "step-00000004", read_manifest(far / "step-00000004"))


@pytest.mark.timeout(180)
def test_a_mirror_that_gives_no_answer_holds_up_nothing(tmp_path, caplog):
    """A server that stops: saves here are committed, the end comes in time; a start with nothing here is an error, in time,
    and one with a checkpoint here goes on from that.

    Back again, the next job puts the newest there.
    """
    near = tmp_path / "near"
    with bindfs(tmp_path / "behind", tmp_path / "disk") as server:
        far, seen = tmp_path / "disk" / "run", []
        with Checkpointer(near, config(far), hooks=[seen.append]) as ckpt:
            ckpt.save(1, state(1)).result()
            wait_until(lambda: tried(seen, 1), 30)
            server.send_signal(signal.SIGSTOP)
            for step in (2, 3, 4):
                begun = time.monotonic()
                ckpt.save(step, state(step)).result()
                assert time.monotonic() - begun < scaled(3)
            begun = time.monotonic()
        assert time.monotonic() - begun < scaled(4 * TIMES.shutdown_s)
        assert steps(near)[-2:] == [3, 4]  # and 2, which was on its way
        begun = time.monotonic()
        with pytest.raises(OSError, match="no answer"), Checkpointer(tmp_path / "empty", config(far)) as ckpt:
            ckpt.resume(state(0))
        assert time.monotonic() - begun < scaled(3 * TIMES.barrier_s)
        with Checkpointer(near, config(far)) as ckpt:
            assert ckpt.resume(state(0)).step == 4
        assert "the mirror is not looked at" in caplog.text
        server.send_signal(signal.SIGCONT)
        with Checkpointer(near, config(far)) as ckpt:
            ckpt.resume(state(0))
            ckpt.save(5, state(5)).result()
        assert steps(tmp_path / "behind" / "run")[-1] == 5


@pytest.mark.timeout(120)
def test_a_mirror_that_gives_no_answer_is_left_when_the_grace_is_over(tmp_path):
    """After a signal ``shutdown_s`` counts no more: a scheduler kills what stays, and what comes behind the block is lost."""
    near, far, before = tmp_path / "near", tmp_path / "disk" / "run", signal.getsignal(signal.SIGTERM)
    times = dataclasses.replace(TIMES, shutdown_s=90)
    settings = dataclasses.replace(config(far), timeouts=times, save_on_signals=("SIGTERM",), signal_grace_s=scaled(3))
    signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with bindfs(tmp_path / "behind", tmp_path / "disk") as server:
            with Checkpointer(near, settings) as ckpt:
                ckpt.save(1, state(1))
                ckpt.wait(mirrored=True)
                server.send_signal(signal.SIGSTOP)
                signal.raise_signal(signal.SIGTERM)
                begun = time.monotonic()
                assert ckpt.stop_requested
                ckpt.save(2, state(2))
            assert time.monotonic() - begun < scaled(8)
            assert steps(near) == [1, 2]
    finally:
        signal.signal(signal.SIGTERM, before)


def _goes_on_until_killed(near, far, after_s):
    """What a job says before it is killed: (word, step) each, and whether its numbers are those of the step it resumed."""
    command = [sys.executable, str(program_path("saves_near_and_far")), str(near), str(far)]
    with warm.Popen(command, stdout=subprocess.PIPE, text=True) as job:
        said = [job.stdout.readline().split()]
        while said[-1] and said[-1][0] != "resumed":
            said.append(job.stdout.readline().split())
        killer = threading.Timer(after_s, job.kill)
        killer.start()
        said += [line.split() for line in job.stdout]
        killer.join()
    assert any(words and words[0] == "resumed" for words in said), said
    return said


def _damaged(near, chance):
    """One bit of the newest near checkpoint's tensors differs. Whether there is one."""
    newest = sorted(near.glob("step-*/*.safetensors"))[-1:]
    for file in newest:
        flip_bit(file, file.stat().st_size - 1 - chance.randrange(100_000))
    return bool(newest)


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.thorough)])
def test_kills_lost_disks_and_flipped_bits_lose_nothing_that_was_far(tmp_path, matrix, seed):
    """A job is killed at a random moment; then its near disk is lost, or a bit flips there, or neither.

    The next one goes on from what was told to be near, or after a loss far, or newer; and each number is that step's.
    """
    near, far = tmp_path / "near", tmp_path / "far"
    chance, outcomes, known, safely_far = random.Random(seed), Counter(), 0, 0
    for _ in range(250 if THOROUGH else 6):
        said = _goes_on_until_killed(near, far, chance.uniform(0.0, 0.4))
        (came_back,) = [words for words in said if words[0] == "resumed"]
        assert int(came_back[1]) >= known, (said, known)
        assert came_back[2] == "True", said
        told = {word: max((int(words[1]) for words in said if words[0] == word), default=0) for word in ("near", "far")}
        safely_far = max(
            safely_far, told["far"], int(came_back[1]) if any(words[0] == "fetched" for words in said) else 0
        )
        harm = chance.choice(["none", "lost", "flipped"])
        if harm == "lost":
            shutil.rmtree(near)
            known = safely_far
        elif harm == "flipped" and safely_far and _damaged(near, chance):
            known = safely_far  # or an older one that is near. The only one of all, damaged, would be an error
        else:
            known = max(told["near"], int(came_back[1]))
        outcomes[f"{harm}: went on from what was told"] += 1
    matrix("near disk lost, damaged or neither behind a kill", f"a far directory, seed {seed}", outcomes)
