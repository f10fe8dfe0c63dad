"""How much memory may still be taken: the least of what the machine and the control groups leave."""

import ctypes
import errno
import os
import resource
import threading
import time

import pytest

from safe_ckpt.core.staging import buffer
from safe_ckpt.core.staging.buffer import GRANULE, SharedBuffer
from safe_ckpt.errors import NotEnoughSpaceError
from safe_ckpt.machine import available_bytes

GIB = 1 << 30


@pytest.fixture
def machine(tmp_path):
    (tmp_path / "meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable:   {8 * GIB // 1024} kB\n")
    (tmp_path / "groups/job/step").mkdir(parents=True)
    (tmp_path / "groups/memory/job").mkdir(parents=True)
    return tmp_path


def ask(machine, membership):
    (machine / "membership").write_text(membership)
    files = {"meminfo": machine / "meminfo", "membership": machine / "membership", "cgroups": machine / "groups"}
    return available_bytes(**files)


def limit(folder, names, most, used, cached):
    most_name, used_name, cached_name = names
    (folder / most_name).write_text(f"{most}\n")
    (folder / used_name).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{cached_name} {cached}\n")


V2 = ("memory.max", "memory.current", "inactive_file")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def test_available_memory_without_control_groups_is_the_machines(machine):
    """MemAvailable; and nothing is claimed where nothing can be read."""
    assert ask(machine, "0::/job\n") == 8 * GIB
    missing = machine / "missing"
    assert available_bytes(meminfo=missing, membership=missing, cgroups=missing) is None


def test_a_limit_of_a_control_group_above_counts(machine):
    """Version 2: what any level leaves, where file pages that can be dropped do not count as used."""
    limit(machine / "groups/job/step", V2, "max", 0, 0)
    limit(machine / "groups/job", V2, 4 * GIB, 3 * GIB, GIB // 2)
    assert ask(machine, "0::/job/step\n") == GIB + GIB // 2


@pytest.mark.parametrize("names", [V1, V2], ids=["version 1", "version 2"])
def test_page_cache_in_use_does_not_count_as_taken(machine, names):
    """The kernel reclaims it before it kills: a snapshot that fits then is not refused. Shared memory, and what version 1 says
    of a group without those below it, is not that.
    """
    folder, membership = {V1: ("memory/job", "4:memory:/job\n"), V2: ("job", "0::/job\n")}[names]
    limit(machine / "groups" / folder, names, 4 * GIB, 4 * GIB, GIB)
    above, other = ("total_", "") if names is V1 else ("", "total_")
    rows = {
        f"{above}active_file": 2 * GIB,
        f"{above}inactive_file": GIB,
        f"{other}active_file": 5,
        f"{other}inactive_file": 6,
    }
    rows |= {"anon": 7, "shmem": 8, f"{above}shmem": 9, f"{above}unevictable": 10}
    text = "".join(f"{name} {size}\n" for name, size in rows.items())
    (machine / "groups" / folder / "memory.stat").write_text(text)
    assert ask(machine, membership) == 3 * GIB


def test_limits_of_version_1_control_groups_count(machine):
    """The memory controller's own hierarchy."""
    limit(machine / "groups/memory/job", V1, 2 * GIB, GIB, 0)
    assert ask(machine, "4:memory:/job\n3:cpuset:/\n") == GIB


def test_a_snapshot_that_does_not_fit_is_an_error_and_not_a_kill(monkeypatch):
    """Asked for more than is left: a typed error with needed and free, before a page is touched."""
    monkeypatch.setattr(buffer.host_memory, "available_bytes", lambda: 5 << 20)
    one = SharedBuffer()
    one.reserve(4 << 20)
    with pytest.raises(NotEnoughSpaceError) as caught:
        one.reserve(64 << 20)
    assert (caught.value.needed_bytes, caught.value.free_bytes) == (60 << 20, 5 << 20)
    assert one.size == 4 << 20
    one.close()


def allocated_bytes(fd):
    return os.fstat(fd).st_blocks * 512


@pytest.mark.parametrize("by_faults", [True, False], ids=["huge pages on advice", "not on advice"])
@pytest.mark.parametrize("can_map", [True, False], ids=["populating", "older kernel"])
@pytest.mark.parametrize("waiting", [True, False], ids=["training waits", "ahead"])
def test_all_of_an_arena_is_allocated_before_it_is_filled(monkeypatch, by_faults, can_map, waiting):
    """Whatever the kernel can and the machine is set to: memory that is short is an error of reserve, never a SIGBUS later."""
    monkeypatch.setattr(buffer, "_huge_on_advice", lambda: by_faults)
    if not can_map:
        monkeypatch.setattr(buffer, "_map", lambda *_: False)
    made = SharedBuffer()
    for size in (GRANULE + 5, 9 * GRANULE, 41 * GRANULE):
        made.reserve(size, waiting=waiting)
        assert made.size == -(-size // GRANULE) * GRANULE
        assert allocated_bytes(made.fileno()) >= made.size
        made.bytes[-1] = 1
    made.close()


@pytest.mark.parametrize("waiting", [True, False], ids=["training waits", "ahead"])
def test_the_first_copy_finds_every_page_mapped(waiting):
    """Filling what was reserved costs no page faults, whichever way it was made ready."""
    made = SharedBuffer()
    made.reserve(48 * GRANULE, waiting=waiting)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    ctypes.memset(made.bytes.data_ptr(), 1, made.size)  # on this thread, whose faults are counted
    faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
    assert faults < made.size // resource.getpagesize() // 20
    made.close()


@pytest.mark.parametrize("half", ["first", "second"])
def test_memory_that_runs_out_on_one_of_two_threads_is_given_back(monkeypatch, half):
    """Training waits, and two threads make memory ready: what one of them does not get is a named error of both."""
    made, mapping, caller, steps = SharedBuffer(), buffer._map, threading.current_thread(), []
    made.reserve(GRANULE)
    made.bytes[:7] = 3

    def short(*of):
        if (threading.current_thread() is caller) == (half == "first"):
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        steps.append(time.sleep(0.01))
        return mapping(*of)

    monkeypatch.setattr(buffer, "_map", short)
    with pytest.raises(NotEnoughSpaceError):
        made.reserve(400 * GRANULE, waiting=True)
    assert len(steps) < 50  # the one that could go on has stopped as well
    assert made.size == os.fstat(made.fileno()).st_size == GRANULE
    assert made.bytes[:7].tolist() == [3] * 7
    monkeypatch.setattr(buffer, "_map", mapping)
    made.reserve(48 * GRANULE, waiting=True)
    assert allocated_bytes(made.fileno()) >= 48 * GRANULE
    made.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_memory_left_by_a_thread_that_ended_silently_is_allocated(monkeypatch):
    """Its half was not mapped, and nothing says why: it is allocated all the same, not left to a SIGBUS."""
    made, mapping, caller = SharedBuffer(), buffer._map, threading.current_thread()

    def fail(*of):
        if threading.current_thread() is not caller:
            raise MemoryError
        return mapping(*of)

    monkeypatch.setattr(buffer, "_map", fail)
    made.reserve(48 * GRANULE, waiting=True)
    assert allocated_bytes(made.fileno()) >= 48 * GRANULE
    made.close()


def test_without_a_second_thread_memory_is_made_ready_by_one(monkeypatch):
    """The system gives no more threads: the caller does all of it."""

    def refuse(self):
        raise RuntimeError("can't start new thread")

    made = SharedBuffer()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        made.reserve(48 * GRANULE, waiting=True)
    assert allocated_bytes(made.fileno()) >= 48 * GRANULE
    made.close()


def test_memory_that_runs_out_half_way_is_given_back(monkeypatch):
    """The kernel gives pages in parts and then none: a named error, the memory that was got is free, the arena still works."""
    made, writing, left = SharedBuffer(), os.pwrite, [5]
    made.reserve(GRANULE)
    made.bytes[:7] = 3

    def pwrite(fd, data, at):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return writing(fd, data[: len(data) // 2 or 1], at)

    monkeypatch.setattr(buffer, "_huge_on_advice", lambda: False)
    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(NotEnoughSpaceError):
        made.reserve(20 * GRANULE)
    assert left[0] == -1
    assert made.size == GRANULE
    assert os.fstat(made.fileno()).st_size == GRANULE
    assert made.bytes[:7].tolist() == [3] * 7
    monkeypatch.setattr(os, "pwrite", writing)
    made.reserve(20 * GRANULE)
    assert allocated_bytes(made.fileno()) >= 20 * GRANULE
    made.close()


def test_closing_stops_an_allocation(monkeypatch):
    """A job that ends does not wait until memory is made ready for a save that never comes."""
    made, writing, begun, go = SharedBuffer(), os.pwrite, threading.Event(), threading.Event()
    found = []

    def pwrite(fd, data, at):
        begun.set()
        go.wait(20)
        return writing(fd, data, at)

    def reserve():
        try:
            made.reserve(50 * GRANULE)
        except OSError as error:
            found.append(error.errno)

    monkeypatch.setattr(buffer, "_huge_on_advice", lambda: False)
    monkeypatch.setattr(os, "pwrite", pwrite)
    allocating = threading.Thread(target=reserve)
    allocating.start()
    assert begun.wait(20)
    closing = threading.Thread(target=made.close)
    closing.start()
    while not made._closing:
        pass
    go.set()
    closing.join(20)
    allocating.join(20)
    assert found == [errno.ECANCELED]
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(made.fileno())
