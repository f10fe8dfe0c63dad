"""Who may have a directory: taken over from the dead at once or when their lease is over, never from the living."""

import errno
import itertools
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from kit.inside import lock_in
from safe_ckpt import set_up_directory
from safe_ckpt.core.home import file_lock as locks
from safe_ckpt.core.home import lease as leases
from safe_ckpt.core.home.file_home import FileHome
from safe_ckpt.core.home.file_lock import JobLock
from safe_ckpt.core.home.lease import Lease
from safe_ckpt.errors import DirectoryError, DirectoryInUseError
from support import holding_lock, needs_root, program_path, run_program


def of_elsewhere(**facts):
    known = {"token": "ab", "host": "elsewhere", "pid": 1, "started_at": "2026-01-01T00:00:00+00:00", "lease_s": 60.0}
    return Lease(**{**known, "kernel": "other", "namespace": 1, "process_start": 5, **facts})


@needs_root
def test_another_container_of_this_machine_is_asked_through_the_kernel(tmp_path):
    """A holder in another PID namespace: refused while it lives, taken over at once when it is killed, its pid unknown here."""
    with holding_lock(tmp_path, within=("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")) as holder:
        lease = Lease.from_bytes((tmp_path / "lock").read_bytes())
        assert lease.namespace != leases.pid_namespace()
        assert locks.fate_of(lease, tmp_path) == "unknown"
        with pytest.raises(DirectoryInUseError, match="no sign of life; its lease ends in"):
            lock_in(tmp_path, lease_s=2.0).acquire(patience_s=0.5)
        holder.kill()
        holder.wait()
        begun = time.monotonic()
        lock = lock_in(tmp_path, lease_s=2.0)
        lock.acquire()
        assert time.monotonic() - begun < 5
        lock.release()


@pytest.mark.parametrize("held", [False, True])
def test_a_process_that_cannot_be_seen_is_dead_where_the_kernel_has_its_lock_no_more(tmp_path, held):
    """One in another PID namespace of the same kernel: it ended where its kernel lock is free, else nobody knows."""
    lease = of_elsewhere(kernel=leases.kernel_id(), device=tmp_path.stat().st_dev)
    assert locks.fate_of(lease, tmp_path) == "unknown"  # it took none
    lock = locks.kernel_lock(tmp_path)
    lock.acquire()
    if not held:
        lock.release()
        (tmp_path / locks.KERNEL_NAME).touch()
    assert locks.fate_of(lease, tmp_path) == ("unknown" if held else "dead")
    lock.release()


def test_a_restarted_pod_is_not_its_predecessor(tmp_path):
    """Same host name, another machine or container: the lease runs out, and nothing is claimed to be alive."""
    (tmp_path / "lock").write_bytes(of_elsewhere(host=os.uname().nodename, pid=os.getpid(), lease_s=2.0).to_bytes())
    with pytest.raises(DirectoryInUseError) as caught:
        lock_in(tmp_path, lease_s=2.0).acquire(patience_s=0.2)
    assert "alive" not in str(caught.value)
    lock = lock_in(tmp_path, lease_s=2.0)
    lock.acquire(patience_s=10)
    lock.confirm()
    lock.release()
    assert os.listdir(tmp_path) == []


def test_waiting_is_counted_across_restarts(tmp_path):
    """A job that is restarted before the lease is over goes on waiting where it stopped; a live holder is heard meanwhile."""
    (tmp_path / "lock").write_bytes(of_elsewhere(lease_s=600.0).to_bytes())
    with pytest.raises(DirectoryInUseError, match="start again then"):
        lock_in(tmp_path, lease_s=2.0).acquire(patience_s=0.1)
    seen = json.loads((tmp_path / "lock.seen").read_text())
    (tmp_path / "lock.seen").write_text(json.dumps({**seen, "at": seen["at"] - 6}))
    (tmp_path / "lock").write_bytes(of_elsewhere(lease_s=6.0).to_bytes())  # not what was seen: counted anew
    with pytest.raises(DirectoryInUseError, match=r"lease ends in [56] s"):
        lock_in(tmp_path, lease_s=2.0).acquire(patience_s=0.5)
    seen = json.loads((tmp_path / "lock.seen").read_text())
    (tmp_path / "lock.seen").write_text(json.dumps({**seen, "at": seen["at"] - 6}))
    begun = time.monotonic()
    lock = lock_in(tmp_path, lease_s=2.0)
    lock.acquire()
    assert 1.9 < time.monotonic() - begun < 5  # a third of the lease, in which a live one would have shown itself
    lock.release()


def test_a_stopped_holder_is_taken_over_and_told_by_name(tmp_path):
    """Stopped beyond its lease and then continued: it is told who has the directory, and what it moves then goes nowhere."""
    first, second = FileHome(tmp_path, lease_s=6), FileHome(tmp_path, lease_s=6)
    first.open()
    staged = first.make_pending("op") / "step-1"
    staged.mkdir()
    aside = first.aside("op", tmp_path / "step-0")
    first.confirm()  # and here it is stopped
    (first.hidden / "lock").write_bytes(of_elsewhere(lease_s=1.0).to_bytes())
    second.open()
    (tmp_path / "step-0").mkdir()
    for one, other in ((staged, tmp_path / "step-1"), (tmp_path / "step-0", aside)):
        with pytest.raises(FileNotFoundError):
            os.rename(one, other)
    assert first.discard([tmp_path / "step-0"]) == []
    with pytest.raises(DirectoryInUseError, match="took the directory over") as caught:
        first.confirm()
    assert caught.value.pid == os.getpid()
    assert (tmp_path / "step-0").is_dir()
    first.close()
    second.confirm()
    second.close()


def test_an_outage_longer_than_the_lease_ends_nothing(tmp_path):
    """The storage is away for several leases: a job that nobody took over goes on, and shows signs of life again."""
    hidden = tmp_path / "exp"
    hidden.mkdir()
    lock = lock_in(hidden, lease_s=1.0)
    lock.acquire()
    hidden.rename(tmp_path / "away")
    with pytest.raises(DirectoryInUseError, match="its lock is gone") as caught:
        lock.confirm()
    assert "in use by" not in str(caught.value)  # nobody holds it
    time.sleep(2.5)  # the outage itself
    (tmp_path / "away").rename(hidden)
    lock.confirm()
    before = (hidden / "lock").read_bytes()
    deadline = time.monotonic() + 10
    while (hidden / "lock").read_bytes() == before:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    lock.release()


@pytest.mark.parametrize("left", ["a dead process", "nobody"])
def test_one_of_eight_contenders_gets_a_dead_processs_lock(tmp_path, left):
    """Eight contenders for the lock of a dead process, or of one that was killed before it wrote its name: one has it, and
    the others are refused by its name.
    """
    here = {"kernel": leases.kernel_id(), "namespace": leases.pid_namespace()}
    dead = of_elsewhere(**here, pid=2**22 - 1).to_bytes()
    (tmp_path / "lock").write_bytes(dead if left == "a dead process" else b"")
    started = [
        subprocess.Popen(
            [sys.executable, program_path("holds_a_lock"), str(tmp_path), "60", "20"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(8)
    ]
    # The one that holds it says so and waits; the others end.
    said = [process.stdout.readline() for process in started]
    assert sorted(said) == [""] * 7 + ["held\n"]
    winner = started[said.index("held\n")]
    for process in started:
        errors = process.communicate("")[1]
        if process is not winner:
            assert f"in use by process {winner.pid}" in errors


@pytest.mark.parametrize("left", ["", "{", "[]", '{"token": 1}', "x" * 10_000, '{"lease_s": "nan"}'])
def test_a_lock_file_that_says_nothing_is_taken_over(tmp_path, left):
    """A creator that was killed before it wrote its name, or a file of something else, keeps nobody out for long."""
    (tmp_path / "lock").write_text(left)
    lock = lock_in(tmp_path, lease_s=2.0)
    lock.acquire(patience_s=10)
    lock.confirm()
    lock.release()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo, lambda path: os.symlink("/dev/null", path)])
def test_a_folder_pipe_or_link_in_the_place_of_the_lock_is_moved_away(tmp_path, make):
    """A directory, a pipe or a link in the place of the lock is moved out of the way."""
    make(tmp_path / "lock")
    lock = lock_in(tmp_path, lease_s=2.0)
    lock.acquire(patience_s=10)
    lock.confirm()
    lock.release()


def test_a_lock_that_another_took_meanwhile_is_given_back(tmp_path):
    """Judged dead, but replaced by a live job's before it could be removed: that one keeps it, with links and without."""
    mine = of_elsewhere(token="new").to_bytes()
    for refused in (False, True):
        (tmp_path / "lock").write_bytes(mine)
        answers = iter([True, False])  # the judged one when looked at, the other when it was renamed
        with pytest.MonkeyPatch.context() as patch:
            if refused:
                patch.setattr(locks.os, "link", lambda *_: (_ for _ in ()).throw(OSError(95, "no links")))
            assert not locks.take_away(tmp_path, lambda _, answers=answers: next(answers))
        assert (tmp_path / "lock").read_bytes() == mine
        assert os.listdir(tmp_path) == ["lock"]


def test_a_holder_that_lost_its_lock_between_two_looks_leaves_the_next_ones_as_it_is(tmp_path, monkeypatch):
    """It looks, is stopped, loses the lock, and goes on with its sign of life: not a byte of the new owner's lock changes."""
    lock = lock_in(tmp_path)
    lock.acquire()
    lease = Lease.from_bytes((tmp_path / "lock").read_bytes())
    theirs, look = of_elsewhere(token="cd" * len(lease.token)).to_bytes(), JobLock._holder

    def stopped_behind_the_look(self, ours):
        holder = look(self, ours)
        monkeypatch.setattr(JobLock, "_holder", look)
        assert locks.take_away(tmp_path, lambda data: locks.token_of(data) == lease.token)
        (tmp_path / "lock").write_bytes(theirs)
        return holder

    monkeypatch.setattr(JobLock, "_holder", stopped_behind_the_look)
    lock._renew(lease.next())
    assert JobLock._holder is look
    assert (tmp_path / "lock").read_bytes() == theirs
    with pytest.raises(DirectoryInUseError, match="took the directory over"):
        lock.confirm()
    lock.release()
    assert (tmp_path / "lock").read_bytes() == theirs


def test_overwriting_waits_for_the_lease_of_a_dead_job(tmp_path):
    """set_up_directory(mode="overwrite") after a crash elsewhere: the holder's lease counts, not one of its own."""
    (tmp_path / "exp/.safe_ckpt").mkdir(parents=True)
    (tmp_path / "exp/.safe_ckpt/lock").write_bytes(of_elsewhere(lease_s=2.0).to_bytes())
    (tmp_path / "exp/old").touch()
    set_up_directory(tmp_path / "exp", mode="overwrite", timeout_s=30)
    assert not (tmp_path / "exp/old").exists()


def test_a_directory_that_could_not_be_overwritten_is_given_back(tmp_path, monkeypatch):
    """The disk fails: what is in it stays, and a job of the same process may take it."""
    (tmp_path / "exp/.safe_ckpt").mkdir(parents=True)
    gone = replace(leases.own_lease(token="ab", started_at="", lease_s=60.0), process_start=1)
    (tmp_path / "exp/.safe_ckpt/lock").write_bytes(gone.to_bytes())
    (tmp_path / "exp/old").touch()

    def fails(path, target):
        raise OSError(errno.EIO, "Input/output error", str(path))

    with monkeypatch.context() as away:
        away.setattr(Path, "rename", fails)
        with pytest.raises(DirectoryError, match="Input/output error"):
            set_up_directory(tmp_path / "exp", mode="overwrite", timeout_s=30)
    home = FileHome(tmp_path / "exp", lease_s=6)
    home.open()
    home.close()
    assert (tmp_path / "exp/old").exists()


def test_a_stopped_process_of_this_machine_is_named(tmp_path):
    """It is there, so nothing is taken from it: whoever is refused learns its pid."""
    with holding_lock(tmp_path) as holder:
        os.kill(holder.pid, signal.SIGSTOP)
        with pytest.raises(DirectoryInUseError, match=f"process {holder.pid}"):
            lock_in(tmp_path, lease_s=2.0).acquire(patience_s=1)


def test_a_disk_that_refuses_the_lock_file_is_a_typed_error(tmp_path):
    """No lock without a lock file: a typed error with the errno, and nothing is held."""
    lock = lock_in(tmp_path / "missing", lease_s=2.0, subject=tmp_path)
    with pytest.raises(DirectoryError) as caught:
        lock.acquire()
    assert caught.value.errno == 2
    (tmp_path / "missing").mkdir()
    lock.acquire()
    lock.release()
    assert Path(tmp_path / "missing").exists()


def test_a_start_that_cannot_write_its_lock_takes_none_away(tmp_path):
    """On a disk without room the lock of a silent job stays: it may only have been stopped, and goes on."""
    record = of_elsewhere(lease_s=0.5).to_bytes()
    (tmp_path / "lock").write_bytes(record)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))  # each write fails, with EFBIG
    try:
        with pytest.raises(OSError, match="File too large"):
            lock_in(tmp_path, lease_s=0.5).acquire(patience_s=10)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / "lock").read_bytes() == record


def test_lock_files_left_by_killed_contenders_are_swept(tmp_path):
    """Half-made locks and such that were being taken away: gone with the next start; the end leaves nothing."""
    for number in range(3):
        (tmp_path / f"lock.{number:032x}").write_bytes(of_elsewhere().to_bytes())
    lock = lock_in(tmp_path, lease_s=2.0)
    lock.acquire()
    assert sorted(os.listdir(tmp_path)) == ["lock", "lock.alive"]
    lock.release()
    assert os.listdir(tmp_path) == []


def test_another_thread_of_the_process_does_not_take_the_lock_away(tmp_path, monkeypatch):
    """Two threads open one directory at the same time: one has it, the other is told so, and the lock file stays."""
    inside, go_on = threading.Event(), threading.Event()
    create = JobLock._take

    def slowly(self, *seen):
        made = create(self, *seen)
        if not inside.is_set():
            inside.set()
            go_on.wait(20)
        return made

    monkeypatch.setattr(JobLock, "_take", slowly)
    first, second = (lock_in(tmp_path, lease_s=6.0) for _ in range(2))
    thread = threading.Thread(target=first.acquire)
    thread.start()
    inside.wait(20)
    with pytest.raises(DirectoryInUseError, match="this process has it open already"):
        second.acquire()
    go_on.set()
    thread.join(20)
    first.confirm()
    first.release()
    second.acquire()
    second.release()


@pytest.mark.parametrize("lease_s", [1e12, 3601.0])
def test_no_lock_file_is_waited_for_without_end(tmp_path, lease_s):
    """A lease that no setting allows is nonsense: it is bounded, and the error says how to free the directory."""
    (tmp_path / "lock").write_bytes(of_elsewhere(lease_s=lease_s).to_bytes())
    with pytest.raises(DirectoryInUseError, match=r"ends in 3600 s.*unlock --break-lock"):
        lock_in(tmp_path, lease_s=6.0).acquire(0.0)


@pytest.mark.parametrize("of_the_keeper", [True, False], ids=["a sign of life", "a commit"])
def test_one_wrong_read_of_its_lock_costs_a_holder_nothing(tmp_path, monkeypatch, of_the_keeper):
    """A read that brings another token, once, ends neither the signs of life nor a commit. Two such reads do."""
    lock = lock_in(tmp_path)
    lock.acquire()
    real, wrong = locks.read_lock, []

    def read(directory, name=locks.LOCK_NAME):
        data = real(directory, name)
        if wrong:
            token = Lease.from_bytes(data).token
            data = data.replace(token.encode(), wrong.pop().encode())
        return data

    monkeypatch.setattr(locks, "read_lock", read)
    lease = Lease.from_bytes((tmp_path / "lock").read_bytes())
    call = (lambda: lock._renew(lease.next())) if of_the_keeper else lock.confirm
    wrong[:] = ["ab"]
    call()
    assert wrong == []
    assert of_the_keeper == ((tmp_path / "lock").read_bytes() == lease.next().to_bytes())
    wrong[:] = ["ab", "ab"]
    with pytest.raises(DirectoryInUseError, match="took the directory over"):
        call()
    lock.release()


@pytest.mark.parametrize("number", [1, 2, 3, 6])
def test_one_wrong_read_of_a_dead_jobs_lock_is_no_sign_of_life(tmp_path, monkeypatch, number):
    """A look that brings other bytes, once, whichever it is: the directory is taken over when the lease is over."""
    holder = of_elsewhere(lease_s=1.0)
    (tmp_path / "lock").write_bytes(holder.to_bytes())
    real, looks = locks.read_lock, []

    def read(directory, name=locks.LOCK_NAME):
        data = real(directory, name)
        if name == locks.LOCK_NAME and data is not None:
            looks.append(data)
            if len(looks) == number:
                return data.replace(b'"beat": "0', b'"beat": "1')
        return data

    monkeypatch.setattr(locks, "read_lock", read)
    lock = lock_in(tmp_path, lease_s=1.0)
    lock.acquire()
    assert lock.is_held
    assert len(looks) > number
    lock.release()


def test_a_lock_that_was_taken_is_held_although_its_first_name_cannot_be_removed(tmp_path, monkeypatch):
    """The file system fails between the two: a job that thought it had nothing would show no sign of life."""
    real = locks.Path.unlink

    def failing(path, **options):
        if path.name.startswith("lock."):
            raise OSError(116, "Stale file handle", str(path))
        real(path, **options)

    lock = lock_in(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(locks.Path, "unlink", failing)
        lock.acquire()
    assert lock.is_held
    lock.confirm()
    lock.release()
    lock.acquire()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", locks.KERNEL_NAME]
    lock.release()


def test_a_lock_that_could_not_be_given_back_is_taken_again_at_once(tmp_path, monkeypatch):
    """By the process that left it, also where it cannot be told which process that was: nobody waits for its lease."""
    lock = lock_in(tmp_path)
    lock.acquire()
    with monkeypatch.context() as patch:
        patch.setattr(locks, "take_away", lambda *_: (_ for _ in ()).throw(OSError(116, "Stale file handle")))
        lock.release()
    assert (tmp_path / "lock").exists()
    monkeypatch.setattr(locks, "fate_of", lambda *_: "unknown")
    again = lock_in(tmp_path)
    again.acquire(0.0)
    again.release()


@pytest.mark.slow
def test_a_program_that_begins_anew_by_an_exec_takes_its_directory_again(tmp_path):
    """It is the same process, and it was not closed: what the one before it held is nobody's."""
    done = run_program("begins_anew_by_exec", str(tmp_path / "run"), "2")
    assert done.stdout.split() == ["None", "8", "9"], done.stderr


@pytest.mark.parametrize("first", [0, 1])
def test_a_holder_whose_record_is_read_old_and_new_in_turn_keeps_its_lock(tmp_path, first):
    """It gives signs of life, and every second look shows a state from before them: that is no silence."""
    looks = itertools.count(first)

    class Flickering(JobLock):
        def _look(self, *, again=False):
            seen = super()._look(again=again)
            return replace(seen, state=b"old") if next(looks) % 2 else seen

        def _take(self, lease, seen):
            raise AssertionError("it was taken for dead")

    with holding_lock(tmp_path, lease_s=0.5):
        rival = Flickering(tmp_path, subject=tmp_path, lease_s=0.5)
        rival._fate = lambda _: "unknown"
        with pytest.raises(DirectoryInUseError):
            rival.acquire(3.0)
