"""What another rank sees at every moment of an exchange, and which ranks count as lost: without processes, in one thread."""

import json
import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from kit.patience import wait_until
from safe_ckpt import CheckpointConfig
from safe_ckpt.core.coordination import heartbeat
from safe_ckpt.core.coordination.heartbeat import Heartbeat, Peer
from safe_ckpt.core.coordination.preemption import Preemption
from safe_ckpt.core.coordination.rounds import Receipts, Round
from safe_ckpt.machine import machine_id


class Values:
    """A store of one process, and a connection to it. Calls ``before`` before each operation."""

    def __init__(self):
        self.kept, self.counts, self.before, self.waited, self.answer_s = {}, {}, lambda: None, lambda: None, 1.0

    def set(self, key, value):
        self.before()
        self.kept[key] = value.encode()

    def get(self, key):
        return self.kept[key]

    def multi_get(self, keys):
        return [self.kept[key] for key in keys]

    def check(self, keys):
        return self.kept.keys() >= set(keys)

    def add(self, key, amount):
        self.before()
        self.counts[key] = self.counts.get(key, 0) + amount
        return self.counts[key]

    def wait(self, keys, timeout):
        self.waited()

    def delete_key(self, key):
        return self.kept.pop(key, None) is not None

    def put(self, key, value, *, phase):
        self.set(key, json.dumps(value))

    def call(self, action, *, phase, check=None):
        return action(self)

    def close(self):
        pass


@pytest.mark.parametrize("moment", range(4))
def test_when_all_have_counted_themselves_all_messages_are_there(moment):
    """Another rank posts at any moment of a rank's post: whoever is woken by "all are there" finds the messages of all."""
    store = Values()
    exchange, seen, begun = Round(store, "op", [1, 2], "write"), [], []

    def look():
        if exchange.peek() is not None:
            seen.append(set(exchange.messages()))

    def before():
        begun.append(1)
        if len(begun) == moment + 1:
            exchange.post(2, {"error": "mine"})
        look()

    store.before = before
    exchange.post(1, {"files": []})
    store.before = lambda: None
    if len(begun) <= moment:
        exchange.post(2, {"error": "mine"})
    look()
    assert seen
    assert all(one == {1, 2} for one in seen), seen


@pytest.mark.parametrize("state", ["R", "S", "D", "T"])
def test_who_works_or_waits_for_a_disk_on_this_machine_is_not_lost(monkeypatch, state):
    """A count that stands still proves nothing of a process that the kernel shows as running, or as waiting in I/O."""
    states = {100: state, 200: "T"}
    monkeypatch.setattr(heartbeat, "process_state", states.get)
    store = Values()
    for rank in (1, 2):
        store.kept[f"beat/{rank}"] = json.dumps([1, 0, 0, []]).encode()
    peers = {rank: Peer(pid=100 * rank, host=machine_id()) for rank in (1, 2)}
    beats = Heartbeat(store, rank=0, peers=peers, stall_s=0.2, interval_s=0.01, progress=lambda: 0)
    try:
        wait_until(lambda: beats.lost() == (2 if state == "T" else 1), 10, "the stopped rank to be lost")
        looked = threading.Event()
        store.before = looked.set
        assert looked.wait(10)  # one more look
        beats.check([] if state == "T" else [1])
    finally:
        beats.close()


@pytest.mark.parametrize("waited_for", [False, True], ids=["a zombie", "gone"])
def test_a_process_of_this_machine_that_has_ended_is_lost_at_once(waited_for):
    """Also while its parent, such as torchrun, has not asked how it ended: nobody waits until its signs of life are missed."""
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and is kept
    if waited_for:
        process.wait()
    store = Values()
    store.kept["beat/1"] = json.dumps([1, 0, 0, []]).encode()
    peers = {1: Peer(pid=process.pid, host=machine_id())}
    beats = Heartbeat(store, rank=0, peers=peers, stall_s=3600, interval_s=0.01, progress=lambda: 0)
    try:
        wait_until(lambda: beats.lost() == 1, 10, "the process to be lost")
    finally:
        beats.close()
        process.wait()


@pytest.mark.parametrize("ahead", [0, 1, 63, 64, 65, 150])
def test_a_decision_is_there_until_every_rank_has_read_it(ahead):
    """The other rank waits for each decision, or is some behind: what is tidied away is what it has read, and nothing else."""
    store = Values()

    def one(rank):
        coordinator = SimpleNamespace(rank=rank, size=2, store_client=lambda _: store, receipts=Receipts())
        return Preemption(coordinator, CheckpointConfig(save_on_signals=()), lambda handler: handler)

    leader, follower = one(0), one(1)

    def publish():
        leader._lead()(store)
        leader._number += 1

    for _ in range(ahead):
        publish()
    for number in range(300):
        if ahead:
            publish()
        else:
            store.waited = publish
        assert follower._follow(store)["signal"] is None, number
        follower._number += 1
    assert len(store.kept) < 2 * 64 + ahead + 20
