"""Histories in an object store: the simulator sees what goes wrong there, and its store answers as a real client's does."""

import pytest

from kit.thorough import THOROUGH
from sim.running import found_by_its_seed, sim

pytest.importorskip("greenlet")
pytestmark = pytest.mark.slow

SEEDS_OF_PLANTED = {
    "no tombstone is set": 292,
    "a lost answer of a creation is a failure": 346,
    "a save is not announced": 4,
    "a deletion is not noted": 4,
    "the head is replaced whatever it is": 22,
    "a manifest is put whatever is there": 40,
    "one list is believed": 670,
    "one read of a manifest is believed": 550,
}
"""A seed that finds a planted bug; ``python -m sim --planted`` prints the first ones. Other plans have other seeds.

Three had one until a start asked the store more, and were not found again: another owner's tombstone, a rank that gives up, and
an owner who sleeps long after an outage (none of the first 1,200).
"""
SAMPLE = list(SEEDS_OF_PLANTED)[: None if THOROUGH else 1]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", SAMPLE)
def test_a_planted_bug_in_a_history_in_a_store_is_found(name):
    """With the bug the history violates a rule; without it the same history violates none."""
    found_by_its_seed(name, SEEDS_OF_PLANTED[name])


@pytest.mark.thorough
@pytest.mark.timeout(120)
def test_a_seed_gives_the_same_history_again():
    """Two processes write the same log of a history in a store, line by line."""
    runs = [sim("--seed", 34, "--trace") for _ in (1, 2)]
    assert "put run/.safe_ckpt/head" in runs[0].stdout
    assert runs[0].stdout == runs[1].stdout


def conversation(client, store):
    """What a client answers to a series of requests: results without times and tags, errors by name."""
    answers = []

    def ask(what, *given, **named):
        try:
            found = what(store, *given, **named)
        except Exception as error:
            answers.append(type(error).__name__)
            return None
        answers.append(_plain(found))
        return found

    first = ask(client.put, "run/a/x", b"one", mode="create", use_multipart=False)
    ask(client.put, "run/a/x", b"another", mode="create", use_multipart=False)
    ask(client.put, "run/a/y", b"second", use_multipart=False)
    ask(client.put, "run/b/c/z", b"third", use_multipart=False)
    for data in (b"two", b"three"):
        ask(client.put, "run/a/x", data, mode={"e_tag": first["e_tag"]}, use_multipart=False)
    ask(client.put, "run/none", b"", mode={"e_tag": first["e_tag"]}, use_multipart=False)
    ask(client.get, "run/a/x")
    ask(client.get, "run/none")
    ask(client.get_range, "run/a/y", start=2, length=3)
    ask(client.get_range, "run/a/y", start=2, length=30)
    ask(client.get_range, "run/a/y", start=30, length=3)
    ask(client.head, "run/a/y")
    ask(client.head, "run/a")
    ask(client.copy, "run/a/y", "run/b/y")
    ask(client.copy, "run/none", "run/b/y")
    for prefix in ("run", "run/", "run/a", "run/b", "r", None):
        ask(client.list_with_delimiter, prefix)
        answers.append(sorted(one["path"] for page in client.list(store, prefix, chunk_size=2) for one in page))
    ask(client.delete, ["run/a/x", "run/a/y"])
    ask(client.list_with_delimiter, "run")
    return answers


def _plain(found):
    if isinstance(found, dict):
        return {key: list(found[key]) for key in ("common_prefixes",) if key in found} | {"size": found.get("size")}
    if hasattr(found, "bytes"):
        return bytes(found.bytes())
    return None if found is None else bytes(found)


def test_the_store_answers_as_a_real_one():
    """Conditions, ranges, lists, copies and errors: the simulated client says what obstore says of a store in memory."""
    obstore = pytest.importorskip("obstore")
    from datetime import timedelta

    from obstore.store import MemoryStore

    from sim import objects
    from sim.world import Host, Proc, World

    class Nobody:
        def put(self, *_):
            pass

        deleted = put

    world, said = World(1), []
    world.objects = objects.Objects(world)
    world.objects.watcher = Nobody()
    client = objects.Client(
        "b", config={}, client_options={"timeout": timedelta(seconds=5)}, retry_config={"max_retries": 0}
    )
    proc = Proc(world, Host(world, 0), "client")
    proc.start(lambda: said.append(conversation(objects.modules()["obstore"], client)))
    world.run(1000.0)
    assert world.violations == []
    assert said == [conversation(obstore, MemoryStore())]
