"""Storage or network are away for a moment: what that costs, and that everything works again afterwards."""

import os
import signal
import threading
import time

import host_job
import pytest
import torch.distributed as dist
from two_hosts import Job, check_start

from kit.hosts import Hosts, needs_hosts
from kit.patience import wait_until
from kit.ranks import spawn_over, spawn_ranks, values
from kit.thorough import THOROUGH
from safe_ckpt import CheckpointConfig, Checkpointer, Timeouts
from safe_ckpt.core.coordination import network
from safe_ckpt.core.coordination.coordinator import open_coordinator
from safe_ckpt.errors import PeerLostError, SafeCheckpointError

TIMES = Timeouts(lengthy_s=30, barrier_s=30, peer_stall_s=2, shutdown_s=5)


def _through_an_outage(rank, folder, told):
    config = CheckpointConfig(timeouts=TIMES, lease_s=3.0)
    with Checkpointer(folder, config) as ckpt:
        ckpt.save(1, {"x": 1}).result(timeout_s=20)
        told.touch()
        while told.exists():  # until the outage has begun
            time.sleep(0.01)
        with pytest.raises(SafeCheckpointError) as caught:
            ckpt.save(2, {"x": 2}).result(timeout_s=20)
        told.touch()
        while told.exists():  # until it is over
            time.sleep(0.01)
        return str(caught.value), ckpt.save(3, {"x": 3}).result(timeout_s=20).step


@needs_hosts
@pytest.mark.timeout(120)
def test_storage_away_for_longer_than_the_lease_costs_one_save(tmp_path, matrix):
    """EIO for two leases: the save within fails by name, the job keeps its directory, and the next save works."""
    told = tmp_path / "told"

    def wait_until_told():
        deadline = time.monotonic() + 60
        while not told.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    with Hosts(1, tmp_path) as hosts:
        folder = hosts.share("faulty")

        def outage():
            wait_until_told()
            folder.fail()
            told.unlink()
            wait_until_told()
            time.sleep(6.0)  # the outage itself: two leases
            folder.heal()
            told.unlink()

        thread = threading.Thread(target=outage)
        thread.start()
        (outcome,) = spawn_over(hosts, 1, _through_an_outage, folder.path / "exp", told)
        thread.join()
    assert outcome.error is None, outcome.error
    said, step = outcome.value
    assert "EIO" in said
    assert "took the directory over" not in said
    assert step == 3
    matrix("EIO for two leases", "faulty FUSE, 1 rank", {"the next save works": 1})


@needs_hosts
@pytest.mark.timeout(120)
def test_an_outage_shorter_than_peer_stall_costs_nothing(tmp_path, matrix):
    """One host of two is off the network for less than ``peer_stall_s``, again and again: no save fails."""
    outages = 4 if THOROUGH else 2
    with Hosts(2, tmp_path) as hosts:
        folder = hosts.share("ext4")
        job = Job.begin(list(hosts), folder.path / "exp", 0, pauses=True, stop=tmp_path / "stop")
        check_start(job, 0, "start")
        for trial in range(outages):
            job.await_words("COMMITTED", len(job.said("COMMITTED")) + 2, 30, f"before outage {trial}")
            hosts[trial % 2].unplug()
            time.sleep(host_job.PEER_STALL_S * 0.7)
            hosts[trial % 2].plug()
        job.await_words("COMMITTED", len(job.said("COMMITTED")) + 2, 30, "at the end")
        job.plan.stop.touch()
        job.await_words("CLOSED", job.plan.size, 60)
        job.reap()
        assert not job.said("FAILED", "ERROR"), job.text()
    matrix("a host unplugged for less than peer_stall_s", "2 hosts x 2 ranks", {"no save fails": outages})


def _each_for_itself(rank, folder, calls):
    """Saves once in a while, whatever comes of it, with nothing else that keeps the ranks together."""
    told = []
    with Checkpointer(folder, CheckpointConfig(timeouts=Timeouts(barrier_s=6, peer_stall_s=1.5, shutdown_s=5))) as ckpt:
        for step in range(1, calls + 1):
            try:
                told.append(ckpt.save(step, {"x": step}).result(timeout_s=30).step)
            except SafeCheckpointError as error:
                told.append(type(error).__name__)
            time.sleep(0.5 + 0.1 * rank)  # the pace of training, not the same on all ranks
    return told


@needs_hosts
@pytest.mark.thorough
@pytest.mark.timeout(180)
def test_steps_of_two_ranks_meet_again_after_an_outage(tmp_path, matrix):
    """Each rank makes its calls at its own pace, many of them fail during an outage: afterwards the same steps meet again, and
    no step is committed for one rank and failed for another.
    """
    calls = 24
    with Hosts(2, tmp_path) as hosts:
        folder = hosts.share("ext4")

        def outage():
            wait_until((folder.behind / "exp/step-00000003").exists, 60, "step 3")
            hosts[1].unplug()
            time.sleep(6.0)  # the outage itself
            hosts[1].plug()

        thread = threading.Thread(target=outage)
        thread.start()
        told = values(spawn_over(hosts, 1, _each_for_itself, folder.path / "exp", calls, timeout_s=150))
        thread.join()
    for step, words in enumerate(zip(*told, strict=True), start=1):
        committed = [word for word in words if word == step]
        unsure = [word for word in words if word == "CommitOutcomeUnknown"]
        assert len(committed) in {0, len(words) - len(unsure)}, (step, told)
    assert told[0][:3] == [1, 2, 3]
    assert told[0][-4:] == told[1][-4:] == list(range(calls - 3, calls + 1)), told
    assert any(isinstance(word, str) for word in told[0]), told
    matrix("a host unplugged, each rank at its own pace", "2 hosts, 24 saves", {"the same steps meet again": 1})


def _meet_in_the_second_host(rank):
    group = dist.new_group([2, 3])
    odd = dist.new_group([1, 2])
    begun, found = time.monotonic(), None
    for ranks, one in (((2, 3), group), ((1, 2), odd)):
        if rank in ranks:
            coordinator = open_coordinator(one, TIMES)
            found = coordinator.agree(
                "x", timeout_s=10, local=lambda: rank, decide=lambda given: sorted(given.values())
            )
            coordinator.release()
    dist.barrier()
    return found, time.monotonic() - begun


@needs_hosts
@pytest.mark.timeout(120)
def test_a_group_whose_rank_0_is_not_at_the_masters_address_meets(tmp_path):
    """MASTER_ADDR is another host than that of the group's rank 0: the group meets within moments all the same."""
    with Hosts(2, tmp_path) as hosts:
        outcomes = values(spawn_over(hosts, 2, _meet_in_the_second_host))
    assert [found for found, _ in outcomes] == [None, [1, 2], [1, 2], [2, 3]]
    assert all(seconds < 15 for _, seconds in outcomes)


def _listen_on_one(rank):
    os.environ["SAFE_CKPT__NETWORK__INTERFACE"] = "eth0"
    os.environ["SAFE_CKPT__NETWORK__PORT"] = "28000"
    coordinator = open_coordinator(None, TIMES)
    ports = set()
    if rank == 0:
        with open("/proc/net/tcp", encoding="utf-8") as table:
            rows = [line.split() for line in table.readlines()[1:]]
        ports = {row[1] for row in rows if row[3] == "0A" and int(row[1].split(":")[1], 16) in range(28000, 28016)}
    coordinator.agree("x", timeout_s=10)
    coordinator.release()
    return ports


@needs_hosts
def test_rank_0s_store_listens_on_the_given_interface_and_port_alone(tmp_path):
    """network.interface and network.port: rank 0's store listens on that address alone, on the first free port from there."""
    with Hosts(2, tmp_path) as hosts:
        ports, _ = values(spawn_over(hosts, 1, _listen_on_one))
        address = "".join(f"{int(part):02X}" for part in reversed(hosts[0].address.split(".")))
    assert ports == {f"{address}:{28000:04X}"}


def _stop_and_go_on(rank, victim, folder):
    config = CheckpointConfig(timeouts=TIMES)
    with Checkpointer(folder, config) as ckpt:
        ckpt.save(1, {"x": 1}).result(timeout_s=20)
        if rank == victim and os.fork() == 0:
            os.kill(os.getppid(), signal.SIGSTOP)
            time.sleep(8.0)  # the stop itself
            os.kill(os.getppid(), signal.SIGCONT)
            os._exit(0)
        said = None
        if rank == victim:
            time.sleep(0.5)  # stopped in here
        try:
            said = ckpt.save(2, {"x": 2}).result(timeout_s=25).step
        except SafeCheckpointError as error:
            said = error
        dist.barrier()  # all go on together, as in training
        return said, ckpt.save(3, {"x": 3}).result(timeout_s=25).step


@pytest.mark.timeout(120)
@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.thorough), 1])
def test_a_rank_stopped_beyond_peer_stall_joins_the_next_save(tmp_path, victim, matrix):
    """SIGSTOP for longer than ``peer_stall_s``, then SIGCONT: what was under way failed by name, the next save works."""
    outcomes = values(spawn_ranks(_stop_and_go_on, 3, victim, tmp_path, timeout_s=100))
    for rank, (said, step) in enumerate(outcomes):
        assert step == 3
        if rank != victim:
            assert isinstance(said, PeerLostError), (rank, said)
            assert victim in said.ranks
    matrix("SIGSTOP, then SIGCONT", f"rank {victim} of 3", {"the next save works": 1})


def test_an_address_that_swallows_packets_delays_no_connection(tmp_path):
    """Addresses that swallow what is sent to them cost nothing: the one that answers is found while they are waited for."""
    listening = network.listen("127.0.0.1", 0)
    port = listening.getsockname()[1]
    begun = time.monotonic()
    found = next(network.reachable(["198.51.100.7", "203.0.113.9", "127.0.0.1"], port))
    assert found == "127.0.0.1"
    assert time.monotonic() - begun < 5
    listening.close()
