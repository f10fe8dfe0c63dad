"""Acting as one through a store: agreement, lateness, death."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch.distributed as dist

from kit.patience import wait_until
from kit.ranks import free_port, spawn_ranks, values
from safe_ckpt import Timeouts
from safe_ckpt.core.coordination.coordinator import open_coordinator
from safe_ckpt.core.coordination.rounds import reraise
from safe_ckpt.errors import CoordinationError, DesyncError, PeerLostError, RendezvousTimeout, UnexpectedError
from safe_ckpt.machine import process_state
from support import program_path

QUICK = Timeouts(barrier_s=20, peer_stall_s=2, shutdown_s=5)


def _total(answers):
    return sum(answers.values())


def _sum(rank):
    coordinator = open_coordinator(None, QUICK)
    results = []
    for number in range(200):
        view = {"number": number}
        results.append(coordinator.agree("sum", must_match=view, timeout_s=10, local=lambda: rank, decide=_total))
    begun = time.monotonic()
    coordinator.release()
    return set(results), time.monotonic() - begun, threading.active_count()


def test_every_rank_gets_what_rank_zero_decided():
    """200 agreed steps on four ranks: one result everywhere, a quick end, no thread left."""
    for results, seconds, threads in values(spawn_ranks(_sum, 4)):
        assert results == {6}
        assert seconds < 4
        assert threads == 1


def _fail_on_zero(rank):
    coordinator = open_coordinator(None, QUICK)

    def decide(answers):
        raise KeyError("loss")

    errors = []
    for _ in range(2):
        try:
            coordinator.agree("x", timeout_s=10, decide=decide)
        except Exception as error:
            errors.append(error)
    after = coordinator.agree("x", timeout_s=10, decide=lambda _: "fine")
    coordinator.release()
    return errors, after


def test_an_error_of_rank_0s_decision_is_raised_on_every_rank():
    """What the decision raises, every rank raises; the next step works."""
    for errors, after in values(spawn_ranks(_fail_on_zero, 3)):
        assert [type(error) for error in errors] == [UnexpectedError] * 2
        assert "KeyError" in str(errors[0])
        assert after == "fine"


def _fail_on_some(rank):
    coordinator = open_coordinator(None, QUICK)
    causes = {1: KeyError("loss"), 2: OSError(28, "No space left on device", "/x")}

    def local():
        if rank in causes:
            raise causes[rank]
        return rank

    try:
        # What a rank got wrong may be why it differs: its own error comes first.
        coordinator.agree("x", must_match={"n": rank}, timeout_s=10, local=local, decide=_total, phase="counting")
    except Exception as error:
        found = error
    else:
        raise AssertionError
    same = found is causes.get(rank)
    after = coordinator.agree("x", timeout_s=10, local=lambda: rank, decide=_total)
    coordinator.release()
    return same, found, after


def test_an_error_of_one_ranks_own_part_is_raised_on_every_rank():
    """A rank that fails in its own part raises its own exception; the others raise that of the lowest, named; all go on."""
    outcomes = values(spawn_ranks(_fail_on_some, 4))
    assert [same for same, _, _ in outcomes] == [False, True, True, False]
    for rank in (0, 3):
        error = outcomes[rank][1]
        assert isinstance(error, UnexpectedError)
        assert (error.rank, error.phase) == (1, "counting")
        assert "KeyError" in error.cause
    assert [after for _, _, after in outcomes] == [6] * 4


def _fail_at_another_step(rank):
    coordinator = open_coordinator(None, QUICK)
    try:
        coordinator.agree("save" if rank else "resume", timeout_s=10, local=reraise(KeyError("x") if rank else None))
    except DesyncError as error:
        return error.what
    finally:
        coordinator.release()
    return None


def test_ranks_at_different_steps_are_named_first():
    """A rank that fails in a step that the others do not make: all are told that the steps differ."""
    assert values(spawn_ranks(_fail_at_another_step, 3)) == ["kind"] * 3


def _differ_then_agree(rank):
    coordinator = open_coordinator(None, QUICK)
    try:
        coordinator.agree("save", must_match={"step": 2 if rank == 1 else 1}, timeout_s=10)
    except DesyncError as error:
        found = error
    after = coordinator.agree("save", must_match={"step": 5}, timeout_s=10, decide=lambda _: "fine")
    coordinator.release()
    return found, after


def test_ranks_that_differ_are_named_and_go_on():
    """Different views raise on all ranks, with the ranks and both values; afterwards they agree again."""
    for error, after in values(spawn_ranks(_differ_then_agree, 4)):
        assert error.what == "step"
        assert error.values == {"0": "1", "1": "2", "2": "1", "3": "1"}
        assert "[0, 2, 3]: 1" in str(error)
        assert "[1]: 2" in str(error)
        assert after == "fine"


@pytest.mark.parametrize("late", [0, 2])
def test_a_late_rank_reads_what_the_others_got(late):
    """One that comes after the deadline fails like the others, at once where these have given up; the next call works."""
    outcomes = values(spawn_ranks(_come_late, 3, late))
    for rank, (error, after) in enumerate(outcomes):
        assert isinstance(error, RendezvousTimeout), (rank, error)
        # A rank 0 that comes late finds nobody any more and says who is missing then.
        assert error.missing == ((1, 2) if rank == late == 0 else (late,))
        assert after == "fine"


def _come_late(rank, late):
    coordinator = open_coordinator(None, QUICK)
    if rank == late:
        time.sleep(3)
    error = None
    try:
        coordinator.agree("save", must_match={"step": 1}, timeout_s=1.5)
    except RendezvousTimeout as problem:
        error = problem
    after = coordinator.agree("save", must_match={"step": 2}, timeout_s=15, decide=lambda _: "fine")
    coordinator.release()
    return error, after


@pytest.mark.parametrize(
    ("victim", "number"),
    [
        (1, signal.SIGKILL),
        (0, signal.SIGKILL),
        pytest.param(1, signal.SIGSTOP, marks=pytest.mark.thorough),
        pytest.param(0, signal.SIGSTOP, marks=pytest.mark.thorough),
    ],
)
def test_a_lost_rank_is_named_long_before_the_deadline(victim, number):
    """A rank that is killed or stopped is noticed within seconds, though the deadline is minutes away."""
    outcomes = spawn_ranks(_lose, 3, victim, int(number), timeout_s=14)  # a stopped one is killed then
    for outcome in outcomes:
        if outcome.rank == victim:
            continue
        assert isinstance(outcome.error, PeerLostError), outcome
        assert victim in outcome.error.ranks
        assert outcome.seconds < 10


def _lose(rank, victim, number):
    coordinator = open_coordinator(None, Timeouts(barrier_s=300, peer_stall_s=2, shutdown_s=2))
    coordinator.agree("warm", timeout_s=20)
    if rank == victim:
        os.kill(os.getpid(), number)
    if number == signal.SIGSTOP:
        time.sleep(0.5)
    coordinator.agree("save", timeout_s=300)


def _retry_after_failed_meeting(rank):
    if rank == 1:
        with pytest.raises(RendezvousTimeout) as caught:
            open_coordinator(None, Timeouts(barrier_s=1))
        assert caught.value.missing == (0,)
    else:
        time.sleep(3)
    coordinator = open_coordinator(None, QUICK)
    result = coordinator.agree("x", timeout_s=10, decide=lambda _: 7)
    coordinator.release()
    return result


def test_a_failed_meeting_can_be_repeated():
    """A rank that gave up finding the others is not confused with itself when it tries again."""
    assert values(spawn_ranks(_retry_after_failed_meeting, 2)) == [7, 7]


def _outlive_the_group(rank):
    coordinator = open_coordinator(None, QUICK)
    dist.destroy_process_group()
    result = coordinator.agree("x", timeout_s=10, local=lambda: rank, decide=len)
    coordinator.release()
    return result


def test_agreement_outlives_the_process_group():
    """The ranks can still agree after destroy_process_group()."""
    assert values(spawn_ranks(_outlive_the_group, 3)) == [3, 3, 3]


def _subgroup(rank):
    evens = dist.new_group([0, 2])
    odds = dist.new_group([1, 3])
    coordinator = open_coordinator(evens if rank % 2 == 0 else odds, QUICK)
    result = coordinator.agree("x", timeout_s=10, local=lambda: rank, decide=lambda a: [a[r] for r in sorted(a)])
    coordinator.release()
    dist.barrier()  # of all: rank 0 hosts the store of the process group
    return result


def test_two_subgroups_agree_without_meeting_each_other():
    """Two groups of one world agree among themselves."""
    assert values(spawn_ranks(_subgroup, 4)) == [[0, 2], [1, 3], [0, 2], [1, 3]]


def _again_and_again(rank, port):
    for number in range(5):
        coordinator = open_coordinator(None, QUICK)
        assert coordinator.agree("x", must_match={"n": number}, timeout_s=10, decide=lambda _, n=number: n) == number
        coordinator.release(keep=number % 2 == 0)
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    coordinator = open_coordinator(None, QUICK)
    assert coordinator.agree("x", timeout_s=10, decide=lambda _: 1) == 1
    coordinator.release()


def test_sessions_can_be_opened_again():
    """Opened and released several times, kept or not, and again in a second process group."""
    values(spawn_ranks(_again_and_again, 2, free_port()))


def _timeout(rank):
    from safe_ckpt.core.coordination.process_groups import group_timeout_s

    return group_timeout_s(None)


def test_the_groups_own_timeout_can_be_read():
    """The private way to a group's timeout, which torch has no public getter for, still works."""
    assert values(spawn_ranks(_timeout, 2, group_timeout_s=77.0)) == [77.0, 77.0]


def _meet_in_a_subgroup(rank, folder):
    group = dist.new_group([1, 2])
    dist.barrier()  # everything that torch itself does through the store is over
    if rank == 0:
        (folder / "pid").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
        return None
    pid = folder / "pid"
    wait_until(lambda: pid.exists() and process_state(int(pid.read_text() or 0)) == "T", 60, "that rank 0 is stopped")
    begun = time.monotonic()
    try:
        open_coordinator(group, Timeouts(barrier_s=3, peer_stall_s=1, shutdown_s=1))
    except CoordinationError as error:
        said = str(error)
    seconds = time.monotonic() - begun
    if rank == 1:
        time.sleep(1)
        os.kill(int((folder / "pid").read_text()), signal.SIGCONT)
    return said, seconds


def test_a_default_store_that_stands_still_does_not_hold_a_subgroup(tmp_path):
    """Rank 0 hosts the default store and is stopped; ranks 1 and 2 meet without it, and give up in time."""
    _, *others = values(spawn_ranks(_meet_in_a_subgroup, 3, tmp_path))
    assert "the process group's own store does not answer" in others[0][0]
    assert all(seconds < 15 for _, seconds in others)


def _change_timeouts(rank):
    first = open_coordinator(None, Timeouts(peer_stall_s=30, shutdown_s=120))
    second = open_coordinator(None, Timeouts(peer_stall_s=3, shutdown_s=7))
    assert first is second
    found = second._calls.answer_s, second._heartbeat._stall_s, second._shutdown_s
    second.release()
    first.release()
    return found


def test_the_latest_users_timeouts_hold():
    """A session that set_up_directory opened with its own timeouts does not keep them for a Checkpointer."""
    assert values(spawn_ranks(_change_timeouts, 2)) == [(3, 3, 7)] * 2


def _outlive_the_launcher(rank, port, launcher):
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    open_coordinator(None, QUICK).release()
    dist.barrier()
    if rank == 0:
        os.kill(launcher, signal.SIGKILL)
    wait_until(lambda: process_state(launcher) in ("", "Z", "X"), 60, "the end of the launcher")
    with pytest.raises(PeerLostError) as caught:
        open_coordinator(None, QUICK)
    return caught.value.ranks, str(caught.value)


def test_orphans_of_a_killed_launcher_name_no_rank(tmp_path):
    """The process that hosts the group's store is no rank: all ranks live, none says that one is lost, least of all itself."""
    port = free_port()
    command = [sys.executable, str(program_path("hosts_a_groups_store")), str(port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as launcher:
        assert launcher.stdout.readline() == b"up\n"
        try:
            found = values(spawn_ranks(_outlive_the_launcher, 2, port, launcher.pid, init=False))
        finally:
            launcher.kill()
    for ranks, words in found:
        assert ranks == ()
        assert "lost ranks" not in words
        assert "the process group's own store" in words
        assert "launcher (torchrun)" in words
