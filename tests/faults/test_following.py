"""Readers beside a job that keeps one checkpoint, and kills of both sides."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch

import safe_ckpt
from kit import warm
from kit.thorough import THOROUGH
from safe_ckpt import CheckpointConfig, Checkpointer, Retention
from safe_ckpt.testing import inline_saves
from support import program_path

SAVES, PASSES, AT_A_TIME, TTL_S = (5000, 200, 8, 3.0) if THOROUGH else (90, 5, 3, 2.0)
MOST_KILLS = 40 if THOROUGH else 1


def start(program, *args):
    return warm.Popen(
        [sys.executable, "-W", "ignore", str(program_path(program)), *map(str, args)], stdout=subprocess.DEVNULL
    )


def left_out(lines):
    """Of the steps from its begin to the last of a pass: those untold, those it was told of, and its own."""
    taken = [int(line.split()[1]) for line in lines if line.startswith("TAKEN")]
    missed = {int(line.split()[1]) for line in lines if line.startswith("MISSED")}
    began = next((int(line.split()[1]) for line in lines if line.startswith("FROM")), 0)
    between = set(range(began + 1, max(taken) + 1)) if taken else set()
    return between - set(taken) - missed, missed & between, taken


def told_of_its_own(lines):
    """Steps that a pass was told it missed although it had taken them before."""
    taken, wrong = set(), []
    for line in lines:
        word, _, step = line.partition(" ")
        if word == "TAKEN":
            taken.add(step)
        elif word == "MISSED" and step in taken:
            wrong.append(step)
    return wrong


class Soak:
    """A writer that is started again when it was killed, and readers, some of which are killed while they hold one."""

    def __init__(self, folder, chance):
        self.run, self.folder, self.chance = folder / "run", folder, chance
        self.writer = None
        self.readers = {}
        self.kills = {"writer": 0, "reader": 0}
        self.begun = 0

    def begin_reader(self):
        limit = self.chance.choice([1000, 1000, 2])
        count = self.chance.randint(5, 40)
        out = self.folder / f"pass-{self.begun}-{limit}"
        process = start(
            "reads_each_once", self.run, out, self.begun, count, limit, 0.05 if limit == 1000 else 0.2, TTL_S
        )
        kill_at = time.monotonic() + self.chance.uniform(0.5, 3.0) if self.chance.random() < 0.3 else None
        self.readers[process] = kill_at
        self.begun += 1

    def tick(self, kill_writer_at):
        if self.writer is None or self.writer.poll() is not None:
            self.writer = start("saves_for_readers", self.run, SAVES)
        for process, kill_at in list(self.readers.items()):
            if process.poll() is None and kill_at is not None and time.monotonic() >= kill_at:
                process.send_signal(signal.SIGKILL)
                process.wait(timeout=30)
                self.kills["reader"] += 1
            if process.poll() is not None:
                del self.readers[process]
        if kill_writer_at is not None and time.monotonic() >= kill_writer_at:
            self.writer.send_signal(signal.SIGKILL)
            self.writer.wait(timeout=30)
            self.kills["writer"] += 1
            return None
        return kill_writer_at

    def due(self):
        """How many passes may have begun: they are spread over all saves."""
        steps = (
            [int(name[5:]) for name in os.listdir(self.run) if name.startswith("step-")] if self.run.exists() else []
        )
        return AT_A_TIME + max(steps, default=0) * PASSES // SAVES

    def is_over(self):
        return self.writer is not None and self.writer.poll() == 0

    def go(self):
        kill_at = None
        try:
            while not self.is_over():
                while len(self.readers) < AT_A_TIME and self.begun < min(PASSES, self.due()):
                    self.begin_reader()
                if kill_at is None and self.kills["writer"] < MOST_KILLS:
                    kill_at = time.monotonic() + self.chance.uniform(1.0, 3 * TTL_S)
                kill_at = self.tick(kill_at)
                time.sleep(0.02)
            for process in self.readers:
                process.wait(timeout=60)
        finally:
            for process in [self.writer, *self.readers]:
                if process is not None and process.poll() is None:
                    process.kill()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_kills_of_readers_and_writers_tear_nothing_and_leave_nothing_out(tmp_path):
    """With keep_last=1: what is held stays whole, none is left out of a pass whose limit is not reached, the rest is told."""
    seed = int(os.environ.get("SAFE_CKPT_KILL_SEED") or random.randrange(1 << 30))
    soak = Soak(tmp_path, random.Random(seed))
    began = time.monotonic()
    soak.go()
    figures = {"seed": seed, "seconds": round(time.monotonic() - began), "kills": soak.kills, "passes": soak.begun}
    bad, taken, told = [], 0, 0
    for file in tmp_path.glob("pass-*"):
        lines = file.read_text().splitlines()
        bad += [f"{file.name}: {line}" for line in lines if line.startswith(("TORN", "WRONG"))]
        out, missed, steps = left_out(lines)
        bad += [f"{file.name}: left out {sorted(out)}"] if out else []
        bad += [f"{file.name}: told of {step}, which it took" for step in told_of_its_own(lines)]
        bad += [f"{file.name}: not in order"] if steps != sorted(set(steps)) else []
        if file.name.endswith("-1000") and missed:
            bad += [f"{file.name}: missed {sorted(missed)}"]
        taken += len(steps)
        told += len(missed)
    figures |= {
        "saves": SAVES,
        "taken": taken,
        "told as missed": told,
    }
    print(json.dumps(figures))
    assert bad == [], figures
    assert taken > 0
    # A dead reader's pin ends: one more job deletes all but the newest.
    with inline_saves(), Checkpointer(soak.run, CheckpointConfig(retention=Retention(keep_last=1))) as ckpt:
        for step in range(SAVES + 1, SAVES + 4):
            ckpt.save(step, {"n": step}).result()
            time.sleep(TTL_S * 0.6)
    assert [one.step for one in safe_ckpt.checkpoints(soak.run)] == [SAVES + 3], figures
    assert list((soak.run / ".safe_ckpt" / "pins").glob("*.pin")) == []


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_dead_readers_pin_ends_within_its_time(tmp_path):
    """What a killed reader held is deleted by the first save behind its time to live, and not before."""
    with inline_saves(), Checkpointer(tmp_path / "run", CheckpointConfig(retention=Retention(keep_last=1))) as ckpt:
        ckpt.save(1, {"t": torch.ones(2)}).result()
        reader = start("reads_each_once", tmp_path / "run", tmp_path / "out", 1, 1, 10, 1000, TTL_S)
        pins = tmp_path / "run" / ".safe_ckpt" / "pins"
        while not pins.exists() or not any(b'"holds": "step' in one.read_bytes() for one in pins.glob("*.pin")):
            time.sleep(0.01)
        ckpt.save(2, {"t": torch.ones(2)}).result()
        reader.kill()
        reader.wait(timeout=30)
        killed, step = time.monotonic(), 2
        while (tmp_path / "run" / "step-00000001").exists():
            step += 1
            ckpt.save(step, {"t": torch.ones(2)}).result()
            time.sleep(0.05)
            assert time.monotonic() < killed + TTL_S + 5
        lasted = time.monotonic() - killed
    assert TTL_S * 0.7 < lasted < TTL_S + 1.5
