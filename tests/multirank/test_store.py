"""The store in which the ranks meet: what others who reach its port can do to a job, and what they cannot."""

import base64
import json
import os
import pickle
import random
import socket
import struct
import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from kit.inside import engine_of, store_port
from kit.limits import QUICK
from kit.patience import wait_until
from kit.ranks import free_port, spawn_ranks, values
from safe_ckpt import CheckpointConfig, Checkpointer, Network
from safe_ckpt.core.coordination import network, process_groups, rendezvous
from safe_ckpt.core.coordination import store as store_module
from safe_ckpt.core.coordination.coordinator import open_coordinator
from safe_ckpt.core.coordination.store import SealedStore
from safe_ckpt.errors import ConfigError, PeerLostError, SafeCheckpointError, StateError, TamperedError
from support import run_program


class Bomb:
    """Unpickled, it leaves a file behind."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_a_value_of_somebody_else_is_refused():
    """Set by one who does not know the secret, moved to another key, or changed: an error that names the key."""
    store = process_groups.host_store(network.listen("127.0.0.1", 0))
    ours = SealedStore(store, "secret")
    ours.set("a", "1")
    ours.set("b", "2")
    ours.set("c", "3")
    assert (ours.get("a"), ours.multi_get(["b", "c"])) == (b"1", [b"2", b"3"])
    store.set("d", store.get("a"))
    store.set("b", "2")
    store.set("c", bytes(store.get("c"))[:-1] + b"4")
    for key in "dbc":
        with pytest.raises(TamperedError, match=f"^{key}: "):
            ours.get(key)
    with pytest.raises(TamperedError):
        ours.multi_get(["a", "b"])
    with pytest.raises(TamperedError):
        SealedStore(store, "another").get("a")


def test_values_above_the_limit_of_the_store_go_in_parts():
    """A TCPStore refuses more than 8 MiB: what compresses goes whole, the rest in parts, and these are deleted with the key."""
    store = process_groups.host_store(network.listen("127.0.0.1", 0))
    ours, theirs = SealedStore(store, "secret"), SealedStore(store, "secret")
    before = store.num_keys()
    dense, again = (random.Random(seed).randbytes(11 << 20).hex() for seed in (1, 2))
    ours.set("dense", dense)
    ours.set("even", "x" * (40 << 20))
    ours.set("a", "1")
    ours.set("b", again)
    assert store.num_keys() > before + 4
    assert theirs.get("dense") == dense.encode()
    assert theirs.get("even") == b"x" * (40 << 20)
    assert theirs.multi_get(["a", "b", "dense"]) == [b"1", again.encode(), dense.encode()]
    ours.set("dense", "small now")
    assert theirs.get("dense") == b"small now"
    SealedStore(store, "secret").delete_key("b")  # one that has neither written nor read it
    for key, deleter in (("dense", ours), ("even", theirs), ("a", theirs)):
        deleter.delete_key(key)
    assert store.num_keys() == before


def test_parts_of_somebody_else_are_refused():
    """A part that is changed, or not there: an error that names the key, at once."""
    store = process_groups.host_store(network.listen("127.0.0.1", 0))
    ours = SealedStore(store, "secret")
    value = random.Random(3).randbytes(9 << 20).hex()
    ours.set("a", value)
    store.set("a/part/1", bytes(store.get("a/part/0")))
    with pytest.raises(TamperedError, match=r"^a: "):
        ours.get("a")
    for count in (b"\x00\x01", b"\xff\xff"):  # invented altogether
        store.set("b", bytes(16) + b"=" + count)
        with pytest.raises(TamperedError, match=r"^b: "):
            ours.get("b")
    ours.set("a", value)
    store.delete_key("a/part/0")
    begun = time.monotonic()
    with pytest.raises(TamperedError, match=r"^a: "):
        ours.get("a")
    assert time.monotonic() - begun < 5


def test_a_value_too_large_for_the_store_is_named_with_its_size(monkeypatch):
    """Which value, how large it is, how large it may be; and nothing of it is written."""
    monkeypatch.setattr(store_module, "_MOST_PARTS", 1)
    store = process_groups.host_store(network.listen("127.0.0.1", 0))
    with pytest.raises(StateError, match=r"a: \d+ bytes are to go from rank to rank, 4194304 are the most"):
        SealedStore(store, "secret").set("a", random.Random(4).randbytes(9 << 20).hex())
    assert not store.check(["a/part/0"])


def _attacked(rank, folder):
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    spread = distribute_tensor(torch.arange(8.0), init_device_mesh("cpu", (2,)), [Shard(0)])
    with Checkpointer(folder, CheckpointConfig(timeouts=QUICK)) as ckpt:
        coordinator = engine_of(ckpt).coordinator
        name = f"log/{coordinator.call + 1}.0"
        if rank == 0:
            # One who reaches the port answers in rank 1's place before it does.
            port = store_port(coordinator)
            client = dist.TCPStore(
                "127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=9)
            )
            bomb = base64.b64encode(pickle.dumps(Bomb(str(folder / "boom")))).decode()
            forged = {"answer": {"s": {"token": None, "plan": bomb, "lengths": {}}}}
            client.set(f"{name}/from/1", json.dumps(forged))
            client.set(f"{name}/all/0", "{}")
        else:
            wait_until((folder / "over").exists, 60)
        with pytest.raises(SafeCheckpointError) as caught:
            ckpt.save(1, {"s": {"t": spread}}).result(timeout_s=20)
        (folder / "over").touch()
        dist.barrier()
        return type(caught.value).__name__, str(caught.value), (folder / "boom").exists()


def test_a_forged_plan_runs_nothing(tmp_path):
    """A plan that another program puts into the store is refused by name on every rank, and no code of it is run."""
    for kind, said, ran in values(spawn_ranks(_attacked, 2, tmp_path)):
        assert kind == "TamperedError"
        assert "was not written by a rank of this job" in said
        assert not ran


def _disturbed(rank):
    coordinator = open_coordinator(None, QUICK)
    if rank == 0:
        for garbage in (b"", b"GET / HTTP/1.0\r\n\r\n", os.urandom(4096)):
            with socket.create_connection(("127.0.0.1", store_port(coordinator)), timeout=5) as stranger:
                stranger.sendall(garbage)
    found = [
        coordinator.agree("x", must_match={"n": n}, timeout_s=10, local=lambda: rank, decide=lambda a: sum(a.values()))
        for n in range(20)
    ]
    coordinator.release()
    return set(found)


def test_strangers_at_the_port_disturb_nothing():
    """Port scans, a browser, random bytes: the ranks go on."""
    assert values(spawn_ranks(_disturbed, 2)) == [{1}] * 2


def _no_such_interface(rank):
    config = CheckpointConfig(timeouts=QUICK, network=Network(interface="nowhere0"))
    with pytest.raises(ConfigError, match="nowhere0") as caught:
        Checkpointer("/nowhere", config)
    return caught.value.key


def test_an_interface_that_is_not_there_is_every_ranks_error():
    """Rank 0 cannot listen where it is to: all ranks are told, at once, by the name of the setting."""
    outcomes = spawn_ranks(_no_such_interface, 3)
    assert values(outcomes) == ["network.interface"] * 3
    assert all(outcome.seconds < 15 for outcome in outcomes)


def _several_sessions(rank, port):
    group = dist.new_group([0, 1])
    where = Network(interface="127.0.0.1", port=port)
    coordinators = [open_coordinator(one, QUICK, network=where) for one in (None, group)]
    found = [
        coordinator.agree("x", timeout_s=10, local=lambda: rank, decide=lambda a: sum(a.values()))
        for coordinator in coordinators
    ]
    ports = sorted(store_port(coordinator) for coordinator in coordinators)
    for coordinator in coordinators:
        coordinator.release()
    return found, ports


def test_each_session_on_a_given_port_takes_the_next_one():
    """A port that is given is the first of sixteen: several groups of one job do not collide."""
    port = free_port()
    for found, ports in values(spawn_ranks(_several_sessions, 2, port)):
        assert found == [1, 1]
        assert len(set(ports)) == 2
        assert all(port <= taken < port + network.PORTS for taken in ports)


def test_no_free_port_is_named():
    """All sixteen are taken: an error with the setting and the ports."""
    port = next(p for p in range(21000, 60000, network.PORTS) if _all_free(p))
    taken = [socket.create_server(("127.0.0.1", number)) for number in range(port, port + network.PORTS)]
    with pytest.raises(ConfigError, match=f"ports {port} to {port + 15}") as caught:
        network.listen("127.0.0.1", port)
    assert caught.value.key == "network.port"
    for one in taken:
        one.close()


def _all_free(port):
    try:
        for number in range(port, port + network.PORTS):
            socket.create_server(("127.0.0.1", number)).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_store_on_an_ipv4_or_ipv6_address_is_reached(address):
    """IPv4 and IPv6: a store that listens on one address is reached there."""
    try:
        listening = network.listen(address, 0)
    except ConfigError as error:
        pytest.skip(f"no such family here: {error}")
    port = listening.getsockname()[1]
    store = process_groups.host_store(listening)
    store.set("a", "1")
    assert network.addresses(address) == [address]
    assert next(network.reachable([address], port)) == address
    assert process_groups.connect_store(address, port, 5.0).get("a") == b"1"


def test_a_rank_0_that_dies_behind_the_knock_is_noticed_at_once():
    """A process that ends between its answer to a knock and a connection: it is said in seconds (torch tries 20 s)."""
    listening = socket.create_server(("127.0.0.1", 0), backlog=8)
    port = listening.getsockname()[1]

    def die_at_the_second() -> None:
        listening.accept()[0].close()  # the knock
        second, _ = listening.accept()
        listening.close()
        second.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        second.close()

    dying = threading.Thread(target=die_at_the_second)
    dying.start()
    begun = time.monotonic()
    with pytest.raises(PeerLostError, match="nobody listens there any more"):
        rendezvous._Connector(["127.0.0.1"], port, "token", "secret")()
    assert time.monotonic() - begun < 15  # torch alone: 20
    dying.join()


def test_a_masters_address_that_is_not_ours_is_not_offered(monkeypatch):
    """MASTER_ADDR names another host: the others are not sent there. One's own name in it is offered."""
    monkeypatch.setenv("MASTER_ADDR", "203.0.113.9")
    assert "203.0.113.9" not in network.addresses("::")
    own = next((a for a in network.addresses("0.0.0.0") if a[0].isdigit()), None)
    if own is not None:
        monkeypatch.setenv("MASTER_ADDR", own)
        assert own in network.addresses("::")
    assert "127.0.0.1" not in network.addresses("::")


def test_the_limit_of_descriptors_is_raised_or_named():
    """Rank 0 raises the soft limit where it may; where it may not it says how many are needed and how to allow them."""
    first, second, third = run_program("asks_for_descriptors").stdout.splitlines()
    assert first == "True True"
    assert "file descriptors are needed here and 4096 allowed" in second
    assert "ulimit -Hn" in second
    assert third == "4096"


def test_a_store_without_a_free_descriptor_says_so():
    """EMFILE where a connection is opened: that is what the error says, not that another process is stopped."""
    done = run_program("connects_without_descriptors")
    assert "no file descriptor left (ulimit -n is 64)" in done.stdout, done.stderr


def test_a_job_on_one_host_listens_on_the_loopback_alone(monkeypatch):
    """Where torchrun says that all ranks run here, nobody else can even connect."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("WORLD_SIZE", "4")
    listening = network.listen(None, 0)
    assert listening.getsockname()[0] == "127.0.0.1"
    listening.close()
    monkeypatch.setenv("WORLD_SIZE", "8")
    listening = network.listen(None, 0)
    assert listening.getsockname()[0] in ("::", "0.0.0.0")
    listening.close()


def test_nothing_from_the_store_is_unpickled():
    """No module that reads from the store calls pickle.loads."""
    found = subprocess.run(
        [sys.executable, "-c", "import safe_ckpt; print(safe_ckpt.__path__[0])"],
        capture_output=True,
        text=True,
        check=True,
    )
    home = found.stdout.strip()
    for folder, _, names in os.walk(os.path.join(home, "core")):
        for name in names:
            if name.endswith(".py"):
                with open(os.path.join(folder, name), encoding="utf-8") as file:
                    assert "pickle.load" not in file.read(), name
