"""Stores that speak S3 in ways of their own: Hugging Face Buckets as it is documented, and what is reported of others."""

import pytest

from kit.hub_gateway import HubGateway
from safe_ckpt import CheckpointConfig, Checkpointer, Retention, StorageConfig, Timeouts
from safe_ckpt.core.storage.objects.clients import ChangedError, ExistsError
from safe_ckpt.core.storage.objects.options import StorageOptions
from safe_ckpt.core.storage.objects.place import open_place
from safe_ckpt.errors import DirectoryError

PART = 5 << 20


@pytest.fixture
def store(object_server, monkeypatch):
    """Makes a gateway in front of a bucket of its own, which the environment names."""
    made = []

    def make(**how):
        made.append(HubGateway(object_server.new_bucket(), **how).__enter__())
        for name, value in made[-1].environment().items():
            monkeypatch.setenv(name, value)
        return made[-1]

    yield make
    for gateway in made:
        gateway.__exit__()


def place_on(gateway, *options):
    return open_place(gateway.url(), StorageOptions(give_up_after_s=3, part_bytes=PART, options=options))


def two_jobs(gateway, **settings):
    """Two jobs, one after the other; returns what is left on the server."""
    settings = CheckpointConfig(
        retention=Retention(keep_last=1), timeouts=Timeouts(lengthy_s=10, barrier_s=10), **settings
    )
    with Checkpointer(gateway.url(), settings) as ckpt:
        for step in (1, 2):
            ckpt.save(step, {"n": step}).result(timeout_s=30)
    state = {"n": 0}
    with Checkpointer(gateway.url(), settings) as ckpt:
        assert (ckpt.resume(state).step, state) == (2, {"n": 2})
    return sorted(key.rpartition("/")[2] for key in dict(gateway.keys()))


def test_a_read_follows_a_redirect_to_another_host_and_takes_no_key_there(store):
    """An object, and a range of one in parts, are read where a signed 302 leads; the store's credentials are not sent there."""
    gateway = store()
    place = place_on(gateway)
    bucket, key, big = place.bucket, f"{place.key}/one", f"{place.key}/big"
    bucket.create(key, b"0123456789")
    bucket.upload(big, 2 * PART + 3, lambda: iter([bytes(PART), bytes(PART), b"end"]))
    assert bucket.read(key)[0] == b"0123456789"
    assert bytes(bucket.read_range(key, 2, 3)) == b"234"
    assert bytes(bucket.read_range(big, 2 * PART - 1, 100)) == b"\0end"
    assert (gateway.redirects, gateway.refused) == (3, [])
    bucket.copy(key, f"{place.key}/copy", 10)
    assert {entry.key: entry.size_bytes for entry in bucket.entries(place.key)} == gateway.keys()
    bucket.delete([key, big, f"{place.key}/copy", f"{place.key}/not-there"])
    assert (gateway.keys(), gateway.refused) == ({}, [])


def test_a_client_that_names_itself_is_sent_the_bytes_by_the_gateway(store):
    """``user_agent`` in ``storage.options`` is what the store sees: no redirect, and the ETags of one place alone."""
    gateway = store(edge_etags=False)
    assert two_jobs(gateway, storage=StorageConfig(options=("user_agent=aws-sdk-rust",)))[0] == "head"
    assert gateway.redirects == 0


@pytest.mark.parametrize("how", [{}, {"bulk_delete": False}, {"conditions": "304"}], ids=str)
def test_jobs_save_and_resume_on_a_store_with_ways_of_its_own(store, how):
    """Redirects; no request that deletes several; 304 for a condition that does not hold: nothing is lost or left over."""
    gateway = store(**how)
    assert two_jobs(gateway) == ["head", "manifest.json", "n.json"]
    assert gateway.uploads() == []


def test_a_condition_that_is_answered_by_304_does_not_hold(store):
    """It is told as 412 is: the object is there already, or another one. It is no answer that may change in a moment."""
    place = place_on(store(conditions="304"))
    first = place.bucket.create(place.key, b"1")
    with pytest.raises(ExistsError):
        place.bucket.create(place.key, b"2")
    place.bucket.replace(place.key, b"2", first)
    with pytest.raises(ChangedError):
        place.bucket.replace(place.key, b"3", first)


REFUSED = [
    ("creates an object where there is one", {"conditions": "ignored"}),
    ("takes no conditional requests", {"conditions": "refused"}),
    ("by the version with which it is read", {"edge_etags": False}),
    ("by the version with which it is read", {"conditions": "unquoted"}),
]


@pytest.mark.parametrize(("says", "how"), REFUSED, ids=[str(how) for _, how in REFUSED])
def test_a_store_without_conditions_is_refused_at_the_first_start(store, says, how):
    """It ignores or refuses them, or its reads name other ETags: what is missing is named, before anything is saved."""
    gateway = store(**how)
    with pytest.raises(DirectoryError, match=says) as found:
        Checkpointer(gateway.url(), CheckpointConfig(timeouts=Timeouts(lengthy_s=10, barrier_s=10)))
    assert "storage.unfenced" in str(found.value)
    assert "head" in two_jobs(gateway, storage=StorageConfig(unfenced=True))
