"""A job over two hosts: killed in part or whole, cut apart, or with a second one that wants the same directory."""

import os
import signal
import time
from collections import Counter

import host_job
import pytest
from two_hosts import START_S, Job, check_start, chosen

from kit.hosts import Hosts, behind, needs_hosts
from kit.patience import wait_until
from kit.thorough import THOROUGH
from safe_ckpt.core.formats.manifest import read_manifest
from safe_ckpt.core.formats.verify import verify_files

pytestmark = [needs_hosts, pytest.mark.slow]

HERE_S = 2.0  # a take-over on the same host, where it can be seen that the other process is gone
ELSEWHERE_S = host_job.LEASE_S + 5
FAULTS = ["one rank", "one host", "one host without a word", "all ranks", "all hosts"]


def strike(kind, job, chance):
    """Kill part of a job or all of it, and then, as a launcher does, what is left. Returns the hosts that went down."""
    hosts, down = job.hosts, []
    if kind == "one rank":
        victim = behind(chance.choice(job.processes))
        if victim:
            os.kill(victim, signal.SIGKILL)
    elif kind in {"one host", "one host without a word"}:
        down = [chance.choice(hosts)]
    elif kind == "all hosts":
        down = list(hosts)
    for host in down:
        if kind == "one host without a word":  # the power goes: no connection of it is closed
            host.unplug()
        host.kill()
    if kind not in {"all ranks", "all hosts"}:
        time.sleep(chance.random() * 0.5)  # until the launcher notices
    for host in hosts:
        if host not in down:
            host.end_processes()
    job.reap()
    for host in down:
        host.restart(rebooted=chance.random() < 0.5)
    return down


def seconds_to_hold(job):
    """How long rank 0 took to get the directory."""
    (line,) = (line for line in job.lines() if line.word == "HELD" and line.rank == 0)
    return line.seconds


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "kind", ["glusterfs", *(pytest.param(kind, marks=pytest.mark.thorough) for kind in ("bindfs", "ext4"))]
)
def test_kills_over_two_hosts_lose_nothing(tmp_path, matrix, kind):
    """One rank, one host or all of a 2x2 job is killed, within a save or not: every restart goes on by itself, at nothing
    older than what was reported committed, with every byte; on the same host within 2 s, from another one within the lease
    and 5 s. SAFE_CKPT_HOST_KILLS sets how often.
    """
    trials, chance = chosen("SAFE_CKPT_HOST_KILLS", 3 if THOROUGH else 2)
    outcomes, within, committed = Counter(), 0, 0
    with Hosts(2, tmp_path) as hosts:
        folder = hosts.share(kind)
        pending = folder.behind / "exp/.safe_ckpt/pending"
        before, down = None, []
        for trial in range(trials + 1):
            order = [hosts[0], hosts[1]] if chance.random() < 0.5 else [hosts[1], hosts[0]]
            fault = chance.choice(FAULTS)
            job = Job.begin(order, folder.path / "exp", trial)
            where = f"start {trial}, rank 0 on {order[0].name}, before on {before}, rebooted {[h.name for h in down]}"
            committed = check_start(job, committed, where)
            stayed = before == order[0].name and order[0] not in down
            seconds = seconds_to_hold(job)
            assert seconds < (HERE_S if stayed or before is None else ELSEWHERE_S), f"{where}: {seconds} s {job.text()}"
            job.await_words("SAVING", job.plan.size * chance.randint(1, 4), 30, where)
            time.sleep(chance.random() * 0.25)
            if trial == trials:
                break
            assert not job.said("ERROR", "FAILED"), f"{where}: {job.text()}"
            before, down = order[0].name, strike(fault, job, chance)
            within += pending.is_dir() and any(pending.iterdir())
            committed = max([committed, *(line.step for line in job.said("COMMITTED"))])
            outcomes["the next start went on by itself, 0 lost, 0 torn"] += 1
            assert not mixed_up(job), f"{where}, {fault}: {job.text()}"
        for host in hosts:
            host.end_processes()
        committed = max([committed, *(line.step for line in job.said("COMMITTED"))])
        newest = max(steps_in(folder.behind / "exp"))
        assert newest >= committed
        verify_step(folder.behind / "exp", newest)
    print(f"{trials} kills, {within} of them within a save, {committed} steps saved")
    matrix("part of a job or all of it killed", f"random moments, 2 hosts x 2 ranks, {kind}", outcomes)


def mixed_up(job):
    """Whether a rank found bytes of another step. That others are lost ends ranks, too: gloo's errors are none of ours."""
    return any("AssertionError" in " ".join(line.rest) for line in job.said("ERROR"))


def verify_step(folder, step):
    """Raises when a byte differs from what was written."""
    path = folder / f"step-{step:08d}"
    verify_files(path, read_manifest(path))


def steps_in(folder):
    return {int(path.name.removeprefix("step-")) for path in folder.glob("step-*")}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["ext4", pytest.param("bindfs", marks=pytest.mark.thorough)])
def test_a_host_that_was_unplugged_comes_back(tmp_path, matrix, kind):
    """One host is off the network for one to three times ``peer_stall_s``: every save is committed or fails by name, on all
    ranks, and the first one that all begin when the link is back works. SAFE_CKPT_PARTITIONS sets how often.
    """
    trials, chance = chosen("SAFE_CKPT_PARTITIONS", 3 if THOROUGH else 2)
    outcomes = Counter()
    with Hosts(2, tmp_path) as hosts:
        folder = hosts.share(kind)
        job = Job.begin([hosts[0], hosts[1]], folder.path / "exp", 0, pauses=True, stop=tmp_path / "stop")
        check_start(job, 0, "start")
        for trial in range(trials):
            seen = len(job.said("COMMITTED"))
            job.await_words("COMMITTED", seen + 2, 30, f"before partition {trial}")
            time.sleep(chance.random() * 0.3)
            cut, seconds = chance.choice(list(hosts)), host_job.PEER_STALL_S * (1 + 2 * chance.random())
            cut.unplug()
            time.sleep(seconds)
            cut.plug()
            plugged = time.monotonic()
            where = f"partition {trial}: {cut.name} for {seconds:.1f} s until {plugged:.3f}"
            step = first_after(job, plugged, where)
            done = wait_until(lambda step=step: told_of(job, step), 60, f"{where}: an outcome of step {step}")
            assert set(done) <= {"COMMITTED", "AGREED"}, f"{where}: step {step} is {done}; {job.text()}"
            outcomes["every save committed or failed by name, the first one after it works"] += 1
        job.plan.stop.touch()
        job.await_words("CLOSED", job.plan.size, 60, "at the end")
        job.reap()
        assert not job.said("ERROR"), job.text()
        for step in sorted({line.step for line in job.said("SAVING")}):
            words = told_of(job, step)
            assert words, f"not every rank was told what became of step {step}: {job.text()}"
            committed = [word for word in words if word in {"COMMITTED", "AGREED"}]
            unsure = [word for word in words if word == "CommitOutcomeUnknown"]
            assert len(committed) in {0, len(words) - len(unsure)}, f"step {step} is {words}: {job.text()}"
    matrix("a host unplugged and plugged in again", f"2 hosts x 2 ranks, {kind}", outcomes)


def first_after(job, at, where):
    """The first step that every rank began to save after this time."""

    def found():
        begun = Counter(line.step for line in job.said("SAVING") if line.at > at)
        return min((step for step, count in begun.items() if count == job.plan.size), default=0)

    try:
        return wait_until(found, 60)
    except TimeoutError:
        raise AssertionError(f"{where}: no save within 60 s: {job.text()}") from None


def told_of(job, step):
    """What every rank was told of a step: COMMITTED, AGREED, or the name of the error; empty until all have been told."""
    lines = [line for line in job.said("COMMITTED", "AGREED", "FAILED") if line.step == step]
    found = [line.rest[0] if line.word == "FAILED" else line.word for line in lines]
    return found if len(found) == job.plan.size else []


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "kind", ["ext4", *(pytest.param(kind, marks=pytest.mark.thorough) for kind in ("bindfs", "glusterfs"))]
)
def test_a_job_that_was_taken_over_leaves_no_trace(tmp_path, matrix, kind):
    """A job is stopped at a random moment, one on another host takes its directory over, then the first one goes on: nothing of
    it appears after the first commit of the second, it is told who has the directory, and all that is there verifies.
    SAFE_CKPT_TWO_JOBS sets how often.
    """
    trials, chance = chosen("SAFE_CKPT_TWO_JOBS", 2 if THOROUGH else 1)
    outcomes = Counter()
    with Hosts(2, tmp_path) as hosts:
        folder = hosts.share(kind)
        for trial in range(trials):
            exp, stop = folder.path / f"exp{trial}", tmp_path / f"stop{trial}"
            old, new = chance.sample(list(hosts), 2)
            first = Job.begin([old], exp, 2 * trial, per_host=1, keep_last=None, pauses=chance.random() < 0.5)
            first.await_words("SAVING", chance.randint(2, 6), START_S)
            time.sleep(chance.random() * 0.2)
            old.signal(signal.SIGSTOP)
            second = Job.begin([new], exp, 2 * trial + 1, per_host=1, keep_last=None, pauses=True, leap=1000, stop=stop)
            check_start(second, max([0, *(line.step for line in first.said("COMMITTED"))]), f"trial {trial}")
            assert seconds_to_hold(second) < ELSEWHERE_S, second.text()
            second.await_words("COMMITTED", 1, START_S)
            there = files_before(folder.behind / exp.name, 1000)
            old.signal(signal.SIGCONT)
            wait_until(lambda first=first: not first.processes[0].is_alive(), 60, "the end of the job that was stopped")
            more = len(second.said("COMMITTED")) + 2
            second.await_words("COMMITTED", more, START_S)
            stop.touch()
            second.await_words("CLOSED", 1, START_S)
            where = f"trial {trial}: {first.text()}\n{second.text()}"
            assert files_before(folder.behind / exp.name, 1000) == there, where
            told = [line.rest[:2] for line in first.said("FAILED")]
            assert told[-1:] == [["DirectoryInUseError", new.name]], where
            assert not second.said("FAILED", "ERROR"), where
            for step in steps_in(folder.behind / exp.name):
                verify_step(folder.behind / exp.name, step)
            outcomes["nothing of the first after the second's first commit; it is told who has the directory"] += 1
            old.end_processes()
            first.reap()
            second.reap()
    matrix("stopped beyond its lease, and taken over", f"random moments, 2 jobs, {kind}", outcomes)


def files_before(exp, step):
    """Every file of the checkpoints below this step, with its inode and size."""
    found = {}
    for path in sorted(exp.glob("step-*/*")):
        if int(path.parent.name.removeprefix("step-")) < step:
            facts = path.stat()
            found[f"{path.parent.name}/{path.name}"] = (facts.st_ino, facts.st_size)
    return found
