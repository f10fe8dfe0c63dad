"""A rank that is killed, stopped or late in a phase of a save, and what the others learn of it."""

import contextlib
import os
import signal
import time

from entries import ENTRIES

from kit.limits import limits, stretched
from safe_ckpt import CheckpointConfig
from safe_ckpt.core.coordination.rounds import TwoPhaseCommit
from safe_ckpt.core.home.file_home import FilePublication
from safe_ckpt.core.saving import one_save
from safe_ckpt.core.saving.engine import Engine
from safe_ckpt.core.staging import snapshot
from safe_ckpt.core.storage import durable
from safe_ckpt.errors import CommitOutcomeUnknown, CoordinationError, SafeCheckpointError, SaveError

TIMES = limits(lengthy_s=12, barrier_s=8, writer_stall_s=5, peer_stall_s=1.5, shutdown_s=2)


CONFIG = CheckpointConfig(timeouts=TIMES)


SIZE = 4


LATE_S = stretched(4.0)  # longer than a rank may be silent
MOST_S = TIMES.lengthy_s + 10  # what is not over by then hangs


# Where to strike: the object, its method, and whether before or after it has run.
PHASES = {
    "agree": (Engine, "save", "before"),
    "snapshot": (snapshot, "lay_out", "before"),
    "prepare": (FilePublication, "prepare", "before"),
    "write": (one_save, "write", "before"),
    "report": (TwoPhaseCommit, "report", "before"),
    "commit": (durable, "publish_directory", "before"),
    "after the rename": (durable, "publish_directory", "after"),
    "verdict": (TwoPhaseCommit, "verdict", "before"),
    "after the verdict": (TwoPhaseCommit, "conclude", "after"),
}


def strike(action):
    if action == "late":
        time.sleep(LATE_S)
    else:
        os.kill(os.getpid(), getattr(signal, action))
        time.sleep(0.1)  # a stop reaches the threads of a process one after the other


def arm(phase, action):
    owner, name, when = PHASES[phase]
    real = getattr(owner, name)

    def struck(*arguments, **more):
        setattr(owner, name, real)
        if when == "before":
            strike(action)
        result = real(*arguments, **more)
        if when == "after":
            strike(action)
        return result

    setattr(owner, name, struck)


def await_others(folder, what, rank):
    while not all((folder / f"{what}{other}").exists() for other in range(SIZE) if other != rank):
        time.sleep(0.01)


def lose(rank, folder, name, victim, phase, action):
    (folder / f"pid{rank}").write_text(str(os.getpid()))
    entry = ENTRIES[name](folder / "exp", CONFIG, rank=rank)
    entry.save(1).result(timeout_s=MOST_S)
    (folder / f"saved{rank}").touch()
    if rank == victim:
        await_others(folder, "saved", rank)  # who is still reading the first verdict would rightly not know it
        arm(phase, action)
    begun, said = time.monotonic(), None
    try:
        said = entry.save(2).result(timeout_s=MOST_S).step
    except SafeCheckpointError as error:
        said = error
    seconds = time.monotonic() - begun
    if rank != victim:
        release(folder, rank, victim, stopped=action == "SIGSTOP")
    with contextlib.suppress(SafeCheckpointError):  # told above
        entry.close()
    return said, seconds


def release(folder, rank, victim, *, stopped):
    """When all others are through, end the stopped one: it cannot end by itself."""
    (folder / f"through{rank}").touch()
    if stopped and rank == min(r for r in range(SIZE) if r != victim):
        await_others(folder, "through", victim)
        os.kill(int((folder / f"pid{victim}").read_text()), signal.SIGKILL)


def judge(outcomes, found, victim, phase, action):
    """Whether what the others were told is true and in time. Returns it in words."""
    others = [outcome for outcome in outcomes if outcome.rank != victim]
    assert all(outcome.error is None and outcome.value for outcome in others), others
    said = [outcome.value[0] for outcome in others]
    for outcome in others:
        assert outcome.value[1] < TIMES.lengthy_s - stretched(2), outcome
    done_its_part = phase in {"verdict", "after the verdict"}
    if phase == "after the verdict" and action != "late":
        # The store stands still with it, or is gone: who has not read the verdict yet cannot.
        assert all(word == 2 or isinstance(word, CommitOutcomeUnknown) for word in said), said
        assert found == 2
    elif action == "late" or done_its_part:
        assert said == [2] * 3, said
        assert found == 2
    else:
        assert all(isinstance(error, CoordinationError | SaveError | CommitOutcomeUnknown) for error in said), said
        assert found == (2 if phase == "after the rename" else 1)
        if phase in {"commit", "after the rename"}:
            assert all(isinstance(error, CommitOutcomeUnknown) for error in said), said
        assert all(str(victim) in str(error) for error in said), said
    return "committed" if said == [2] * 3 else "/".join(sorted({type(error).__name__ for error in said}))
