"""The writer process dies, stops or runs out of memory: before, within and after its work, on either rank."""

import os
import re
import resource
import signal
import time
from collections import Counter

import pytest
import torch.distributed as dist
from entries import ENTRIES, entered
from trials import sampled

from kit.inside import once_written
from kit.limits import QUICK
from kit.patience import scaled, wait_until
from kit.ranks import spawn_ranks, values
from safe_ckpt import CheckpointConfig, Checkpointer, WriterConfig
from safe_ckpt.errors import WriterError
from support import run_program, writers_of

SLOW = WriterConfig(chunk_bytes=4096, flush_every_bytes=4096, direct_io="off", inline_bytes=0)
HARMS = ("SIGKILL", "SIGSTOP", "SIGSEGV", "out of memory")
MOMENTS = ("idle", "in mid-write", "between write and commit")


def harm(writer, kind):
    pid = writer.pid
    if kind == "out of memory":
        resource.prlimit(pid, resource.RLIMIT_AS, (1 << 20, 1 << 20))
    else:
        os.kill(pid, getattr(signal, kind))


def one_save(entry, step, kind, moment, mine):
    """Save, with something done to this rank's writer if it is ``mine``. Returns how long save() and the step after took."""
    writer = entry.writer
    writer.start()
    if mine and moment == "idle":
        harm(writer, kind)
    if mine and moment == "between write and commit":
        once_written(lambda _: harm(writer, kind))
    begun = time.monotonic()
    handle = entry.save(step)
    call_s = time.monotonic() - begun
    if mine and moment == "in mid-write":
        child = writer._child
        start = child.beats()
        while child.beats() < start + 20 and not handle.done():
            time.sleep(0.001)
        harm(writer, kind)
    handle.result(timeout_s=50)
    return call_s


def go_through(rank, folder, name, victim):
    found = {}
    config = CheckpointConfig(timeouts=QUICK, writer=SLOW)
    step = 0
    for kind in HARMS:
        for moment in MOMENTS:
            events = []
            step += 1
            with entered(name, folder, config, rank=rank, size=200_000) as entry:
                entry.engine.emit.add(events.append)
                call_s = one_save(entry, step, kind, moment, rank == victim)
                exact = entry.load() == step
                step += 1
                entry.save(step).result(timeout_s=50)
                dist.barrier()
            wait_until(lambda: not writers_of(os.getpid()), 10, f"the end of the writers after {kind} {moment}")
            respawns = [event.ended for event in events if event.kind == "respawned"]
            found[kind, moment] = (exact, call_s, respawns)
    return found


VICTIMS = sampled([("Checkpointer", 0), ("Checkpointer", 1), ("accelerator.save_state", 0)], lambda number: number == 1)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("name", "victim"), VICTIMS)
def test_whatever_happens_to_a_writer_the_save_is_committed(tmp_path, matrix, name, victim):
    """Killed, stopped, crashed or out of memory; idle, writing, or done: replaced, the same snapshot written again, the
    training thread not held, and the reason told: pid, signal or status, file and bytes.
    """
    found = values(spawn_ranks(go_through, 2, tmp_path, name, victim, timeout_s=380))
    outcomes = Counter()
    for (kind, moment), (exact, call_s, respawns) in found[victim].items():
        assert exact, (kind, moment)
        assert call_s < scaled(3), (kind, moment, call_s)  # a writer that makes no progress is waited for longer
        assert respawns, (kind, moment)
        expected = {
            "SIGKILL": r"killed by SIGKILL \(the kernel's out-of-memory killer sends this\)",
            "SIGSEGV": "killed by SIGSEGV",
            "SIGSTOP": "made no progress",
            # Without room for a stack it crashes, or a thread of it never begins.
            "out of memory": "exited with status 1|killed by SIGSEGV|made no progress",
        }[kind]
        assert re.search(expected, respawns[0]), respawns
        if moment == "in mid-write":
            assert re.search(ENTRIES[name].large_files, respawns[0]), respawns
            assert "bytes" in respawns[0], respawns
        outcomes["committed after a respawn"] += 1
    assert all(not respawns for _, _, respawns in found[1 - victim].values())
    matrix("writer killed, stopped, crashed, out of memory", f"idle, writing, done; rank {victim}; {name}", outcomes)


def test_a_writer_that_dies_again_and_again_is_done_without(tmp_path):
    """After max_respawns deaths this process writes by itself: committed, with one warning for each and one for that."""
    done = run_program("saves_with_writers_that_die", str(tmp_path / "exp"))
    assert done.stdout.split() == ["1"], done.stderr
    assert done.stderr.count("WARNING") == 4, done.stderr
    assert done.stderr.count("exited with status 3") == 3
    assert "writing in this process" in done.stderr


def test_a_disk_that_stalls_every_writer_is_an_error(tmp_path):
    """No writer makes progress: a WriterError with the last one's pid and reason, in time, and the process is free again."""
    done = run_program("saves_where_every_writer_stalls", str(tmp_path / "exp"))
    assert done.stdout.split() == ["step-00000001", "True", "True", "True", "2"], done.stderr
    assert issubclass(WriterError, RuntimeError)


def test_the_writer_process_is_nice_and_has_a_session_of_its_own(tmp_path):
    """Training keeps its share of the processor: the writer yields to it, and is a group of its own to the scheduler."""
    config = CheckpointConfig(timeouts=QUICK, writer=WriterConfig(niceness=5, inline_bytes=0))
    with Checkpointer(tmp_path, config) as ckpt:
        ckpt.save(1, {"n": 1}).result(timeout_s=50)
        (pid,) = writers_of(os.getpid())
        assert os.getsid(pid) == pid
        own = os.getpriority(os.PRIO_PROCESS, 0)
        assert os.getpriority(os.PRIO_PROCESS, pid) == min(own + 5, 19)
