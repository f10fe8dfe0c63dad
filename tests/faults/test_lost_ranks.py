"""A rank dies, stops or is late in each phase of a save of four ranks; rank 0, which hosts the store, included."""

import contextlib
import os
import signal
import time
from collections import Counter

import pytest
from entries import ENTRIES, entered
from trials import THOROUGH, sampled

from safe_ckpt import CheckpointConfig, Timeouts
from safe_ckpt.core.coordination.mailbox import TwoPhaseCommit
from safe_ckpt.core.saving.commit_protocol import CommitProtocol
from safe_ckpt.core.saving.engine import Engine
from safe_ckpt.core.staging import snapshot
from safe_ckpt.core.storage import durable
from safe_ckpt.errors import CommitOutcomeUnknown, CoordinationError, SafeCheckpointError, SaveError
from safe_ckpt.testing import spawn_ranks
from support import names_in

TIMES = Timeouts(lengthy_s=12, barrier_s=8, writer_stall_s=5, peer_stall_s=1.5, shutdown_s=2)
CONFIG = CheckpointConfig(timeouts=TIMES)
SIZE = 4
LATE_S = 4.0
# Where to strike: the object, its method, and whether before or after it has run.
PHASES = {
    "agree": (Engine, "save", "before"),
    "snapshot": (snapshot, "lay_out", "before"),
    "prepare": (CommitProtocol, "_prepare", "before"),
    "write": (CommitProtocol, "_write", "before"),
    "report": (TwoPhaseCommit, "report", "before"),
    "commit": (durable, "publish_directory", "before"),
    "after the rename": (durable, "publish_directory", "after"),
    "verdict": (TwoPhaseCommit, "verdict", "before"),
    "after the verdict": (TwoPhaseCommit, "conclude", "after"),
}
OF_RANK_0 = ["agree", "snapshot", "prepare", "write", "commit", "after the rename", "after the verdict"]
OF_OTHERS = ["agree", "snapshot", "write", "report", "verdict"]
CASES = [(0, phase, action) for phase in OF_RANK_0 for action in ("SIGKILL", "SIGSTOP", "late")]
CASES += [(2, phase, action) for phase in OF_OTHERS for action in ("SIGKILL", "SIGSTOP", "late")]
ALL = [(name, *case) for name in ENTRIES for case in CASES]
SOME = sampled(
    [("Checkpointer", *case) for number, case in enumerate(CASES) if number % 3 == number // 3 % 3],
    lambda number: number % 3 != 1,
)
SOME += [("accelerator.save_state", *case) for number, case in enumerate(CASES) if number % 12 == 4]


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
    entry.save(1).result(timeout_s=20)
    (folder / f"saved{rank}").touch()
    if rank == victim:
        await_others(folder, "saved", rank)  # who is still reading the first verdict would rightly not know it
        arm(phase, action)
    begun, said = time.monotonic(), None
    try:
        said = entry.save(2).result(timeout_s=30).step
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


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("name", "victim", "phase", "action"), ALL if THOROUGH else SOME)
def test_the_others_learn_of_it_in_time(tmp_path, matrix, name, victim, phase, action):
    """The others get a named error well before the deadline, or the save is committed when the rank was only late, or had done
    its part; after a rename nobody guesses: CommitOutcomeUnknown, and the resume finds it.
    """
    outcomes = spawn_ranks(lose, SIZE, tmp_path, name, victim, phase, action, timeout_s=60)
    with entered(name, tmp_path / "exp", CONFIG) as entry:
        found = entry.load()
    assert names_in(tmp_path / "exp/.safe_ckpt/pending") == []
    what = judge(outcomes, found, victim, phase, action)
    matrix(f"rank {victim} {action}", f"in each phase, 4 ranks; {name}", Counter({what: 1}))


def judge(outcomes, found, victim, phase, action):
    """Whether what the others were told is true and in time. Returns it in words."""
    others = [outcome for outcome in outcomes if outcome.rank != victim]
    assert all(outcome.error is None and outcome.value for outcome in others), others
    said = [outcome.value[0] for outcome in others]
    for outcome in others:
        assert outcome.value[1] < TIMES.lengthy_s - 2, outcome
    done_its_part = phase in {"verdict", "after the verdict"}
    if phase == "after the verdict" and action != "late":
        # The store stands still with it, or is gone: who has not read the verdict yet cannot.
        assert all(word == 2 or isinstance(word, CommitOutcomeUnknown) for word in said), said
        assert found == 2
    elif action == "late" or done_its_part:
        assert said == [2] * 3, said
        assert found == 2
    else:
        assert all(isinstance(error, CoordinationError | SaveError) for error in said), said
        assert found == (2 if phase == "after the rename" else 1)
        if phase in {"commit", "after the rename"}:
            assert all(isinstance(error, CommitOutcomeUnknown) for error in said), said
        assert all(str(victim) in str(error) for error in said), said
    return "committed" if said == [2] * 3 else "/".join(sorted({type(error).__name__ for error in said}))
