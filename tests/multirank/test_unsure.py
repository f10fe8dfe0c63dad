"""Ranks that lose contact while a save is agreed on: who has answered does not say that nothing was saved."""

import contextlib
import os
import socket
from pathlib import Path

from kit.inside import engine_of, store_port
from kit.ranks import spawn_ranks, values
from safe_ckpt import CheckpointConfig, Checkpointer, Timeouts
from safe_ckpt.core.coordination.rounds import LogEntry
from safe_ckpt.errors import CommitOutcomeUnknown, PeerLostError, SafeCheckpointError

TIMES = Timeouts(lengthy_s=60, barrier_s=30, peer_stall_s=20, shutdown_s=2)


def break_connections(port):
    """Every connection of this process to the store ends, as by a switch that forgets it."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            held = socket.socket(fileno=os.dup(fd))
        except OSError:
            continue  # no socket
        with held:
            try:
                if held.getpeername()[1] == port:
                    held.shutdown(socket.SHUT_RDWR)
            except (OSError, IndexError):
                pass


def _loses_contact(rank, path, answered):
    ckpt = Checkpointer(path, CheckpointConfig(timeouts=TIMES))
    ckpt.save(1, {"at": 1}).result()
    port, left = store_port(engine_of(ckpt).coordinator), [rank == 1]
    name = "answer" if answered else "said"
    real = getattr(LogEntry, name)

    def break_once(entry, *given, **more):
        breaks = left and left.pop()
        if breaks and not answered:
            break_connections(port)
        found = real(entry, *given, **more)
        if breaks and answered:
            break_connections(port)
        return found

    setattr(LogEntry, name, break_once)
    try:
        said = ckpt.save(2, {"at": 2}).result().step
    except SafeCheckpointError as error:
        said = type(error)
    with contextlib.suppress(SafeCheckpointError):
        ckpt.close()
    return said


def steps(folder):
    return sorted(int(one.name[-1]) for one in Path(folder).glob("step-*"))


def test_a_rank_that_loses_contact_behind_its_answer_does_not_know_the_outcome(tmp_path):
    """Rank 0 has the answer, goes on and commits. What the other rank raises must not say that nothing was saved."""
    found = values(spawn_ranks(_loses_contact, 2, tmp_path, True))
    assert found == [2, CommitOutcomeUnknown]
    assert steps(tmp_path) == [1, 2]


def test_a_rank_that_loses_contact_before_its_answer_knows_that_nothing_was_saved(tmp_path):
    """Rank 0 cannot go on without the answer: both say that the save failed, and there is none."""
    found = values(spawn_ranks(_loses_contact, 2, tmp_path, False))
    assert found[1] is PeerLostError
    assert issubclass(found[0], SafeCheckpointError)
    assert not issubclass(found[0], CommitOutcomeUnknown)
    assert steps(tmp_path) == [1]
