"""Who owns a directory in an object store: many processes that want it at once, and an owner that was stopped and wakes up."""

import contextlib
import multiprocessing
import os
import random
import signal
from collections import Counter

import pytest
from object_job import FIRST, SECOND, Told, check, config_of, options_of, said_in, train
from object_race import LEASE_S, PROCESSES, races
from object_sweep import end_of, new_store, start

from kit import object_servers
from kit.fault_proxy import FaultProxy
from kit.inside import judge_owners
from kit.thorough import THOROUGH
from safe_ckpt.core.home.objects.head import list_objects
from safe_ckpt.core.storage.objects.options import StorageOptions
from safe_ckpt.core.storage.objects.place import open_place

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

RACES, ROUNDS, WAKES = (100, 5, 50) if THOROUGH else (2, 2, 1)
KINDS = [pytest.param(kind, marks=() if kind == "ministack" else pytest.mark.thorough) for kind in object_servers.KINDS]


@pytest.fixture(params=KINDS)
def server(request, tmp_path_factory):
    if why := object_servers.missing(request.param):
        pytest.skip(why)
    with object_servers.start(request.param, tmp_path_factory.mktemp(request.param)) as server:
        yield server


@pytest.mark.parametrize("elsewhere", [False, True], ids=["one host", "other hosts"])
def test_one_of_sixteen_processes_owns_it(server, elsewhere, matrix):
    """In every round one owns it and fifteen are refused: in a new directory, one that was given back, one whose owner died."""
    url, options = server.url("race"), options_of(server)
    done = 0
    for _ in range(RACES // ROUNDS):
        told = races(url, options, ROUNDS, elsewhere=elsewhere)
        assert told == {"owner": ROUNDS, "refused": ROUNDS * (PROCESSES - 1)}, done
        done += ROUNDS
        # Every owner has committed: with two owners in a round there would be more.
        assert len(list_objects(open_place(url, StorageOptions(options=options)))) == done
    where = "other hosts" if elsewhere else "one host"
    matrix(f"16 processes want it, {server.kind}", where, {"one owner, fifteen refused": done})


def stopped_and_woken(server, proxy, folder, number, monkeypatch):
    """The job stops at a request, another one takes over, and then it goes on: that request comes late, and all others."""
    store = new_store(server)
    lines = folder / f"lines-{store.prefix}"
    stopped = multiprocessing.Event()
    woken = multiprocessing.Event()
    process = start(store.url, config_of(server, proxy.endpoint, inline=number % 2 == 0, lease_s=LEASE_S), lines, FIRST)
    proxy.reset()

    def hold(record):
        if record.number == number:
            os.kill(process.pid, signal.SIGSTOP)
            stopped.set()
        if stopped.is_set():
            woken.wait(120)

    proxy.on_request = hold
    while not stopped.wait(0.05) and process.is_alive():
        pass
    before, said = said_in(lines), []
    judge_owners(monkeypatch, "unknown")
    train(store.url, config_of(server, lease_s=LEASE_S), lambda *words: said.append(words), SECOND, resumes=True)
    monkeypatch.undo()
    proxy.on_request = None
    woken.set()
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGCONT)
    end_of(process, 120.0)
    proxy.settle(20.0)
    after = said_in(lines)[len(before) :]
    (resumed,) = [words[1] for words in said if words[0] == "RESUMED"]
    assert resumed in Told(before).allowed, (before, said)
    late = [words for words in after if words[0] == "COMMITTED" and words[1] > resumed]
    assert not late, (before, said, after)
    check(store, [*before, *said])
    store.wipe()
    return (
        "it was told so" if any(words[0] in ("FAILED", "ERROR", "REFUSED") for words in after) else "it was at its end"
    )


def test_a_stopped_owner_that_wakes_up_commits_nothing(server, tmp_path, monkeypatch, matrix):
    """Whatever it was doing when it was stopped: the next owner's checkpoint stays the newest, and nothing is left over."""
    chance = random.Random(int(os.environ.get("SAFE_CKPT_KILL_SEED", "7")))
    outcomes = Counter()
    with FaultProxy(server.endpoint) as proxy:
        for _ in range(WAKES):
            number = chance.randint(8, 60)
            try:
                outcomes[stopped_and_woken(server, proxy, tmp_path, number, monkeypatch)] += 1
            except Exception as error:
                error.add_note(f"stopped at request {number}")
                raise
    matrix(f"a stopped owner wakes up, {server.kind}", "at any request", outcomes)
