"""Who may have a directory, whatever storage keeps the record of its holder: a lock file, or the head in a store."""

import os
import threading
import time
from dataclasses import replace

import pytest

from kit.patience import wait_until
from safe_ckpt.core.home.file_lock import JobLock
from safe_ckpt.core.home.lease import Lease, own_lease
from safe_ckpt.core.home.objects.head import Head
from safe_ckpt.core.home.objects.lock import ObjectOwner
from safe_ckpt.core.storage.objects.options import StorageOptions
from safe_ckpt.core.storage.objects.place import open_place
from safe_ckpt.errors import DirectoryInUseError
from safe_ckpt.machine import process_start


def of_elsewhere(**facts):
    known = {"token": "ab", "host": "elsewhere", "pid": 1, "started_at": "2026-01-01T00:00:00+00:00", "lease_s": 60.0}
    return Lease(**{**known, "kernel": "other", "namespace": 1, "process_start": 5, **facts})


class InFiles:
    """The record is a file."""

    def __init__(self, folder):
        self.folder = folder

    def lock(self, lease_s=60.0):
        return JobLock(self.folder, subject=self.folder, lease_s=lease_s, owner="")

    def record(self, lease):
        (self.folder / "lock").write_bytes(lease.to_bytes())


class InObjects:
    """The record is an object."""

    def __init__(self, place):
        self.place, self.versions = place, 0

    def lock(self, lease_s=60.0):
        return ObjectOwner(self.place, lease_s=lease_s, owner="", unfenced=False)

    def record(self, lease):
        self.versions += 1
        head = Head(fence=1, version=self.versions, lease=lease)
        self.place.bucket.overwrite((self.place / ".safe_ckpt/head").key, head.to_bytes())


@pytest.fixture(params=["a file", pytest.param("an object", marks=pytest.mark.server)])
def storage(request, tmp_path):
    if request.param == "a file":
        return InFiles(tmp_path)
    url = request.getfixturevalue("bucket").url()
    return InObjects(open_place(url, StorageOptions(give_up_after_s=5, request_timeout_s=2)))


@pytest.mark.slow
def test_a_dead_holders_own_lease_is_waited_for(storage):
    """Whoever comes with a longer or a shorter lease waits as long as the holder promised to show itself."""
    for other in (1.0, 300.0):
        storage.record(of_elsewhere(lease_s=3.0))
        begun = time.monotonic()
        lock = storage.lock(lease_s=other)
        lock.acquire()
        assert 2.5 < time.monotonic() - begun < 7
        lock.confirm()
        lock.release()


def test_a_holder_that_changes_its_record_is_refused_as_alive(storage):
    """A holder elsewhere that changes its record while it is watched is refused as alive, at its first sign."""
    lease = of_elsewhere(lease_s=6.0)
    storage.record(lease)
    timer = threading.Timer(0.5, lambda: storage.record(lease.next()))
    timer.start()
    begun = time.monotonic()
    with pytest.raises(DirectoryInUseError, match="gave a sign of life") as caught:
        storage.lock().acquire(patience_s=30)
    timer.join()
    assert time.monotonic() - begun < 4
    assert (caught.value.host, caught.value.pid) == ("elsewhere", 1)


def test_a_faster_jobs_lease_begins_anew_for_those_who_wait(storage):
    """The record names another holder while it is watched: what the first one did not show counts nothing against it."""
    storage.record(of_elsewhere(lease_s=2.0))
    timer = threading.Timer(1.0, lambda: storage.record(of_elsewhere(token="cd", lease_s=2.0)))
    timer.start()
    begun = time.monotonic()
    lock = storage.lock()
    lock.acquire(patience_s=30)
    timer.join()
    assert time.monotonic() - begun > 2.9
    lock.release()


def test_without_patience_the_rest_of_the_lease_is_told(storage):
    """The error names the holder and says when to come again."""
    storage.record(of_elsewhere(lease_s=6.0))
    with pytest.raises(DirectoryInUseError, match=r"lease ends in 6 s.*unlock --break-lock") as caught:
        storage.lock().acquire(patience_s=0.0)
    assert caught.value.host == "elsewhere"


def test_a_process_that_opens_a_directory_twice_is_refused(storage):
    """And has it again as soon as it has given it back."""
    first, second = storage.lock(), storage.lock()
    first.acquire()
    for other in (second, first):
        with pytest.raises(DirectoryInUseError, match="this process has it open already"):
            other.acquire()
    first.confirm()
    assert first.is_held
    first.release()
    second.acquire()
    second.release()
    assert not second.is_held


def test_a_record_this_process_could_not_give_back_is_taken_at_once(storage, monkeypatch):
    """The storage refused when it was given back: the record names this process, which holds it no more."""
    lock = storage.lock()
    lock.acquire()
    with monkeypatch.context() as patch:
        patch.setattr(type(lock), "_give_back", lambda *_: (_ for _ in ()).throw(OSError(5, "no")))
        lock.release()
    begun = time.monotonic()
    again = storage.lock()
    again.acquire()
    assert time.monotonic() - begun < 5
    again.release()


def test_a_holder_that_was_replaced_says_so_once(storage, caplog):
    """Its thread ends with one line that names the next holder, and nothing it does commits."""
    lock = storage.lock(lease_s=1.2)
    lock.acquire()
    keeper = lock._keeper
    if isinstance(storage, InObjects):
        storage.versions = lock.head.version + 10
        head = Head(fence=lock.head.fence + 1, version=storage.versions, lease=of_elsewhere())
        storage.place.bucket.overwrite((storage.place / ".safe_ckpt/head").key, head.to_bytes())
    else:
        storage.record(of_elsewhere())
    keeper.join(10)
    assert not keeper.is_alive()
    with pytest.raises(DirectoryInUseError, match="took the directory over") as caught:
        lock.confirm()
    assert caught.value.host == "elsewhere"
    assert len([one for one in caplog.records if "nothing more is committed" in one.getMessage()]) == 1
    lock.release()


@pytest.mark.parametrize("fate", ["dead", "unknown"])
def test_only_a_process_known_to_be_gone_is_taken_over_at_once(storage, monkeypatch, fate):
    """Of one that is not known the lease counts."""
    storage.record(of_elsewhere(lease_s=60.0))
    monkeypatch.setattr(type(storage.lock()), "_fate", lambda *_: fate)
    lock = storage.lock()
    if fate == "unknown":
        with pytest.raises(DirectoryInUseError, match="no sign of life"):
            lock.acquire(patience_s=0.5)
        return
    begun = time.monotonic()
    lock.acquire()
    assert time.monotonic() - begun < 5
    lock.release()


@pytest.mark.parametrize("began", ["later", "then", "unknown"])
def test_the_pid_of_a_dead_holder_may_be_another_processs_by_now(storage, began):
    """A pid that the kernel has given away again is no sign of life: the lock is taken over at once. A process that began when
    the holder did is the holder; where that is not known, it may be.
    """
    pid = os.getppid()  # lives as long as this one, and holds nothing
    start = {"later": process_start(pid) - 1, "then": process_start(pid), "unknown": 0}[began]
    here = own_lease(token="ab", started_at="2026-01-01T00:00:00+00:00", lease_s=600.0)
    storage.record(replace(here, pid=pid, process_start=start))
    lock = storage.lock()
    if began != "later":
        with pytest.raises(DirectoryInUseError, match=f"process {pid}"):
            lock.acquire(patience_s=0.1)
        return
    lock.acquire(patience_s=0.1)
    lock.confirm()
    lock.release()


def test_this_process_refuses_itself_whatever_is_known_of_processes(storage, monkeypatch):
    """Where nothing tells which boot this is, and the holder's signs of life do not come through, it is refused at once."""
    monkeypatch.setattr("safe_ckpt.core.home.lease.kernel_id", lambda: "")
    first, second = storage.lock(), storage.lock()
    first.acquire()
    try:
        first._stop.set()
        begun = time.monotonic()
        with pytest.raises(DirectoryInUseError, match="this process has it open already"):
            second.acquire()
        assert time.monotonic() - begun < 15
        first.confirm()
    finally:
        first.release()


def test_time_in_which_the_storage_stands_still_is_no_silence(storage, monkeypatch):
    """Not in asking for the holder's fate either: it keeps the time of its signs of life."""
    lock = storage.lock(lease_s=2.0)
    storage.record(of_elsewhere(lease_s=2.0))

    def slow(self, lease):
        time.sleep(1.6)
        return "unknown"

    monkeypatch.setattr(type(lock), "_fate", slow)
    with pytest.raises(DirectoryInUseError, match="no sign of life"):
        lock.acquire(patience_s=6.0)


def test_a_record_that_was_given_back_is_no_takeover(storage, caplog):
    """The next job's log says nothing of a holder."""
    first = storage.lock()
    first.acquire()
    first.release()
    with caplog.at_level("INFO"):
        second = storage.lock()
        second.acquire()
        second.release()
    assert "taken over" not in caplog.text


def test_a_holder_shows_one_sign_of_life_after_the_other(storage):
    """Each changes the record: who looks twice within a lease, whenever that is, sees that it lives."""
    lock, watcher = storage.lock(lease_s=0.6), storage.lock(lease_s=0.6)
    lock.acquire()
    try:
        beats = []

        def has_changed(times):
            beat = watcher._look().lease.beat
            beats.extend([beat] if beat not in beats else [])
            return len(beats) > times

        wait_until(lambda: has_changed(3), 20, "four different records")
        assert beats == sorted(beats)
    finally:
        lock.release()
