"""Consolidating offloaded folders while ranks, or the whole job, are killed: one call's files or another's, never a mix."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from trials import SWEEP

from kit.patience import wait_until
from kit.ranks import spawn_ranks, values
from kit.thorough import THOROUGH
from safe_ckpt import consolidate_offloaded, restore_offloaded
from safe_ckpt.core.formats.manifest import read_manifest
from safe_ckpt.core.formats.verify import verify_files
from safe_ckpt.errors import CommitOutcomeUnknown, CoordinationError, RendezvousTimeout, SafeCheckpointError, SaveError
from safe_ckpt.testing import FaultyStorage
from support import processes_of_this_test, program_path, writers_of

MANY = 8
SIZES = {"optimizer.tensor": (1 << 20) + 17, "deep/parameter.tensor": 4096, "deep/empty.tensor": 0}
SPREAD_S = 0.5
# A killed rank is noticed at once, but eight ranks share a few cores here.
NOTICED_S = 20.0
LATE_S = 3.0


def body(generation, rank, name, size):
    """What belongs into a file: it tells its generation, and no byte depends on less than all of this."""
    return f"{generation}:".encode().ljust(16)[:size] + random.Random(f"{generation} {rank} {name}").randbytes(
        max(0, size - 16)
    )


def fill(folder, generation, ranks, sizes):
    for rank in range(ranks):
        for name, size in sizes.items():
            file = folder / f"disk{rank}" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(body(generation, rank, name, size))


def generation_at(destination, ranks, sizes):
    """Of which call all of it is, every byte; None when there is nothing."""
    if not os.path.lexists(destination):
        return None
    manifest = read_manifest(destination)
    verify_files(destination, manifest)
    names = {f"rank{rank}/{name}" for rank in range(ranks) for name in sizes}
    assert {entry.path for entry in manifest.files} == names
    assert {str(p.relative_to(destination)) for p in destination.rglob("*") if p.is_file()} == {*names, "manifest.json"}
    generation = int((destination / "rank0" / max(sizes, key=sizes.get)).read_bytes().split(b":")[0])
    for rank in range(ranks):
        for name, size in sizes.items():
            assert (destination / f"rank{rank}" / name).read_bytes() == body(generation, rank, name, size), (rank, name)
    return generation


def hidden(destination):
    return destination.parent / ".safe_ckpt/names" / destination.name


def consolidate(rank, folder, timeout_s=60.0):
    return consolidate_offloaded({f"rank{rank}": folder / f"disk{rank}"}, folder / "ckpt", timeout_s=timeout_s)


def go_on(folder, rank, victim, ranks):
    """Live on, as in training, until all others are through: nobody's end is to tell anybody anything."""
    (folder / f"through{rank}").touch()
    deadline = time.monotonic() + 150
    while time.monotonic() < deadline:
        if all((folder / f"through{other}").exists() for other in range(ranks) if other != victim):
            return
        time.sleep(0.01)


def _round(rank, folder, delays, victim, after_s, timeout_s):
    (folder / f"through{rank}").unlink(missing_ok=True)
    dist.barrier()
    if rank == victim:
        timer = threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGKILL))
        timer.daemon = True
        timer.start()
    time.sleep(delays[rank])
    begun = time.monotonic()
    try:
        said = consolidate(rank, folder, timeout_s)
    except SafeCheckpointError as error:
        said = error
    seconds = time.monotonic() - begun
    go_on(folder, rank, victim, MANY)
    return said, seconds


def draw(chance, usual_s):
    """Delays, and who is killed when: mostly while all are in the call, now and then before the victim has come to it."""
    delays = [chance.random() * SPREAD_S for _ in range(MANY)]
    kind = chance.choices(["none", "within", "early"], [2, 10, 1])[0]
    victim = chance.randrange(MANY) if kind != "none" else None
    after_s = max(delays) + chance.random() * usual_s
    if kind == "early":
        after_s = delays[victim] * chance.random()
    return delays, victim, after_s, LATE_S if kind == "early" else 60.0


@pytest.mark.timeout(1500)
def test_ranks_that_come_at_odd_times_and_die_leave_one_call_or_another(tmp_path, matrix):
    """Eight ranks, late by chance, one killed at a random moment, again and again into one destination: 2 rounds, 50 in
    ``make faults``; what is there is complete and of one call, the survivors agree on it and learn of a loss in time.
    """
    seed = int(os.environ.get("SAFE_CKPT_KILL_SEED") or random.randrange(1 << 30))
    chance, outcomes = random.Random(seed), Counter()
    generation, usual_s, there = 0, 0.0, None
    for number in range(50 if THOROUGH else 2):
        if (
            generation in (0, there) or chance.random() < 0.5
        ):  # else the same once more, with what is left of its copies
            generation += 1
            fill(tmp_path, generation, MANY, SIZES)
        delays, victim, after_s, timeout_s = draw(chance, usual_s)
        if number == 0:  # tells how long an undisturbed call takes from when all have come
            victim, timeout_s = None, 60.0
        outcomes_here = spawn_ranks(
            _round, MANY, tmp_path, delays, victim, after_s, timeout_s, timeout_s=200, group_timeout_s=90
        )
        where = f"seed {seed}, round {number}, rank {victim} killed after {after_s:.3f} s of {delays}: {outcomes_here}"
        alive = [outcome for outcome in outcomes_here if outcome.value is not None]
        assert len(alive) >= MANY - (victim is not None), where
        said = [outcome.value[0] for outcome in alive]
        done = [word for word in said if not isinstance(word, Exception)]
        before, there = there, generation_at(tmp_path / "ckpt", MANY, SIZES)
        assert there in (before, generation), where
        if victim is None:
            assert len(done) == MANY, where
            usual_s = min(outcome.value[1] for outcome in alive)
        assert there == generation or not done, where
        unsure = any(isinstance(word, CommitOutcomeUnknown) for word in said)
        assert there == before or done or unsure or before == generation, where
        for word, seconds in (outcome.value for outcome in alive):
            assert not isinstance(word, Exception) or isinstance(
                word, CoordinationError | SaveError | CommitOutcomeUnknown
            ), where
            early = isinstance(word, RendezvousTimeout)
            assert seconds < (SPREAD_S + 3 * timeout_s if early else SPREAD_S + NOTICED_S), where
        kinds = "/".join(sorted({type(word).__name__ for word in said if isinstance(word, Exception)}))
        outcomes[f"{'committed' if there == generation else 'as before'}{', ' * bool(kinds)}{kinds}"] += 1
    # Whatever was left behind is taken over, or swept.
    values(spawn_ranks(consolidate, MANY, tmp_path, timeout_s=90))
    assert generation_at(tmp_path / "ckpt", MANY, SIZES) == generation
    assert not hidden(tmp_path / "ckpt").exists()
    matrix("SIGKILL of one of 8 ranks", "consolidate_offloaded, random delays", outcomes)


SOME = {f"{number:02}.tensor": (8 << 20) + number for number in range(4)}
HEAVY = {f"{number:02}.tensor": (8 << 20) + number for number in range(12)}


def _lost(rank, folder, when):
    def watch():
        while not ((folder / "ckpt").exists() if when == "after the commit" else copied_in(folder / "ckpt")):
            pass
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == 2:
        threading.Thread(target=watch, daemon=True).start()
    begun = time.monotonic()
    try:
        said = consolidate(rank, folder).name
    except SafeCheckpointError as error:
        said = error
    seconds = time.monotonic() - begun
    go_on(folder, rank, 2, 3)
    return said, seconds


@pytest.mark.timeout(250)
@pytest.mark.parametrize("when", ["in the middle", "after the commit"] if THOROUGH else ["after the commit"])
def test_consolidation_with_a_killed_rank_soon_ends_on_the_others(tmp_path, matrix, when):
    """Rank 2 of 3 is killed while it copies, or before it has heard of the commit: the call soon ends on both others, which
    live on, with a named error or the checkpoint.
    """
    fill(tmp_path, 1, 3, HEAVY if when == "in the middle" else SIZES)
    *others, victim = spawn_ranks(_lost, 3, tmp_path, when, timeout_s=200)
    assert victim.exit_code == -signal.SIGKILL
    said = [outcome.value[0] for outcome in others]
    if when == "after the commit":
        assert said == ["ckpt", "ckpt"]
        assert generation_at(tmp_path / "ckpt", 3, SIZES) == 1
    else:
        assert all(isinstance(word, CoordinationError | SaveError | CommitOutcomeUnknown) for word in said), said
        assert not (tmp_path / "ckpt").exists()
    assert max(outcome.value[1] for outcome in others) < NOTICED_S, others
    matrix("SIGKILL of one of 3 ranks", f"consolidate_offloaded, {when}", Counter({"the others go on": 1}))


def _job(rank, folder):
    (folder / f"pid{rank}").write_text(str(os.getpid()))
    dist.barrier()
    consolidate(rank, folder)


def copied_in(destination):
    """The names of the folders of ranks of which something is being copied."""
    with contextlib.suppress(FileNotFoundError):  # it is being renamed
        return {file.parent.name for file in (hidden(destination) / "pending").glob(f"*/{destination.name}/*/*")}
    return set()


def stop_and_kill(folder, ranks):
    """SIGKILL the whole job once every rank is copying. Returns the processes."""
    wait_until(lambda: len(copied_in(folder / "ckpt")) == ranks, 60, "every rank to copy")
    pids = [int((folder / f"pid{rank}").read_text()) for rank in range(ranks)]
    everybody = [*pids, *(writer for pid in pids for writer in writers_of(pid))]
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in everybody:
            os.kill(pid, number)
    return everybody


@pytest.mark.timeout(300)
def test_a_killed_job_leaves_the_old_and_nothing_behind_after_the_next(tmp_path, matrix):
    """SIGKILL of all processes in the middle of copying: the old content is untouched; the next call has all of the new
    and sweeps what was left.
    """
    destination, outcomes, old = tmp_path / "ckpt", Counter(), 1
    fill(tmp_path, old, 2, HEAVY)
    values(spawn_ranks(consolidate, 2, tmp_path))
    for _ in range(8 if THOROUGH else 1):
        fill(tmp_path, old + 1, 2, HEAVY)
        with ThreadPoolExecutor(1) as pool:
            job = pool.submit(spawn_ranks, _job, 2, tmp_path)
            killed = stop_and_kill(tmp_path, 2)
            assert [outcome.exit_code for outcome in job.result()] == [-signal.SIGKILL] * 2
        wait_until(lambda left=set(killed): not left & set(processes_of_this_test()), 30, "the end of all of them")
        assert len(copied_in(destination)) == 2
        assert generation_at(destination, 2, HEAVY) == old
        values(spawn_ranks(consolidate, 2, tmp_path))
        assert generation_at(destination, 2, HEAVY) == old + 1
        assert not hidden(destination).exists()
        outcomes["the old one, then the new one"] += 1
        old += 1
    matrix("SIGKILL of the job", "in the middle of consolidate_offloaded, 2 ranks", outcomes)


def _restore(rank, folder, kill):
    if kill and rank:
        target = folder / f"back{rank}"

        def watch():
            while not any(name.startswith(".safe_ckpt-") for name in os.listdir(target)):
                pass
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=watch, daemon=True).start()
    try:
        restore_offloaded(folder / "ckpt", {f"rank{rank}": folder / f"back{rank}"}, timeout_s=60)
    except SafeCheckpointError as error:
        return error


def test_a_killed_restore_leaves_nothing_behind_after_the_next(tmp_path, matrix):
    """SIGKILL of a rank that is restoring: the others raise and keep their files; the next restore has all and tidies up."""
    fill(tmp_path, 1, 2, SOME)
    values(spawn_ranks(consolidate, 2, tmp_path))
    for rank in range(2):
        (tmp_path / f"back{rank}").mkdir()
        (tmp_path / f"back{rank}/00.tensor").write_bytes(b"old")
    survivor, victim = spawn_ranks(_restore, 2, tmp_path, True)
    assert victim.exit_code == -signal.SIGKILL
    assert isinstance(survivor.value, CoordinationError), survivor
    assert survivor.seconds < NOTICED_S
    assert {path.name: path.read_bytes() for path in (tmp_path / "back0").iterdir()} == {"00.tensor": b"old"}
    assert values(spawn_ranks(_restore, 2, tmp_path, False)) == [None, None]
    for rank in range(2):
        found = {path.name: path for path in (tmp_path / f"back{rank}").iterdir()}
        assert sorted(found) == sorted(SOME)
        for name, size in SOME.items():
            assert found[name].read_bytes() == body(1, rank, name, size)
    matrix("SIGKILL of a rank", "in the middle of restore_offloaded, 2 ranks", Counter({"the next has all": 1}))


# The first operation that goes wrong, and the step to the next.
EACH = (1, 1) if THOROUGH else (5, 16)


def sweep(folder, fault, first, step):
    """As ``trials.sweep``, of consolidations."""
    kit = folder / "kit"
    environment = {**os.environ, **FaultyStorage(kit).environment, "RES_OPTIONS": "timeout:1"}
    command = [sys.executable, str(program_path("sweeps_consolidations")), str(kit), str(folder / "exp")]
    command += ["folders", fault, str(first), str(step), str(SWEEP.parent)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, check=False, env=environment, start_new_session=True
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


@pytest.mark.timeout(900)
@pytest.mark.parametrize("fault", ["kill_job", "tear"] if THOROUGH else ["tear"])
def test_a_kill_at_any_operation_leaves_the_old_or_the_new(tmp_path, matrix, fault):
    """SIGKILL before the n-th operation of a replacement, or in the middle of it: old or new, the new one if it was reported;
    the next call has all and leaves nothing.
    """
    (whole, *trials), said = sweep(tmp_path, fault, *EACH)
    assert whole["found"] == 2, whole
    assert len(trials) >= 4
    outcomes = Counter()
    for trial in trials:
        where = f"{trial}\n{said[-3000:]}"
        assert trial["status"] == -9, where
        assert trial["restart"] == 0, where
        assert trial["found"] in {1, 2}, where
        assert trial["found"] == 2 or not trial["reported"], where
        outcomes["the new one" if trial["found"] == 2 else "the old one"] += 1
    matrix("SIGKILL of the job" if fault == "kill_job" else "SIGKILL in mid-write", "consolidate_offloaded", outcomes)
    assert not {trial["at"]: trial["left"] for trial in trials if trial["left"]}


FAILURES = [f"{error}{often}" for error in ("ENOSPC", "EIO", "EDQUOT", "EROFS") for often in ("", " from here on")]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("fault", FAILURES if THOROUGH else ["EIO"])
def test_a_failing_disk_is_a_named_error_and_the_next_call_works(tmp_path, matrix, fault):
    """An operation fails, once or from there on: committed all the same, or a named error; then the next call works."""
    (_, *trials), said = sweep(tmp_path, fault, *EACH)
    assert len(trials) >= 4
    outcomes = Counter()
    for trial in trials:
        where = f"{trial}\n{said[-3000:]}"
        assert trial["status"] == 0, where
        assert trial["restart"] == 0, where
        assert trial["reported"] or trial["again"], where
        assert trial["found"] == 2, where
        assert trial.get("error", "") in ("", "NotEnoughSpaceError", "DirectoryError", "CommitOutcomeUnknown"), where
        outcomes[trial.get("error", "committed all the same")] += 1
    matrix(fault, "consolidate_offloaded", outcomes)
    assert not {trial["at"]: trial["left"] for trial in trials if trial["left"]}
