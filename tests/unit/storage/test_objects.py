"""Object stores, request by request: conditions, answers that are lost, and what errors say."""

import os

import pytest

from kit.fault_proxy import FaultProxy
from safe_ckpt import CheckpointConfig, StorageConfig
from safe_ckpt.core.storage.objects.clients import ChangedError, ExistsError, cleaned, store_error
from safe_ckpt.core.storage.objects.options import StorageOptions, is_url
from safe_ckpt.core.storage.objects.place import ObjectPath, open_place
from safe_ckpt.errors import ConfigError
from support import run_program

QUICK = StorageOptions(give_up_after_s=3, request_timeout_s=1, part_bytes=5 << 20)


@pytest.fixture
def proxy(object_server, bucket, monkeypatch):
    with FaultProxy(object_server.endpoint) as made:
        made.hold_s = 2.0
        for name, value in bucket.environment(made.endpoint).items():
            monkeypatch.setenv(name, value)
        yield made


@pytest.fixture
def place(bucket):
    return open_place(bucket.url(), StorageOptions(give_up_after_s=3, request_timeout_s=1, part_bytes=5 << 20))


def through(proxy, bucket):
    del proxy
    # A bucket is kept with its connections: other options make another one.
    return open_place(bucket.url(), StorageOptions(give_up_after_s=3.5, request_timeout_s=1, part_bytes=5 << 20))


def test_objects_are_created_and_replaced_by_condition_alone(place):
    """An object is created once, and replaced only by who has seen it; the same request again is the same success."""
    store, key = place.bucket, (place / "head").key
    first = store.create(key, b"1")
    assert store.create(key, b"1") == first
    with pytest.raises(ExistsError):
        store.create(key, b"2")
    second = store.replace(key, b"2", first)
    assert store.replace(key, b"2", first) == second
    with pytest.raises(ChangedError):
        store.replace(key, b"3", first)
    with pytest.raises(ChangedError, match="gone"):
        store.replace(f"{key}x", b"3", first)
    assert store.read(key)[0] == b"2"


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("fault", ["drop", "reset", "500", "503", "409", "timeout", "truncated"])
def test_an_answer_that_is_lost_is_made_up_for(proxy, bucket, fault, when):
    """Whether the request had reached the store or not, creating and replacing say what became of it."""
    place = through(proxy, bucket)
    store, key = place.bucket, (place / "head").key
    proxy.reset()
    proxy.plan(1, fault, when)
    version = store.create(key, b"1")
    proxy.reset()
    proxy.plan(1, fault, when)
    store.replace(key, b"2", version)
    assert store.read(key)[0] == b"2"


@pytest.mark.parametrize("fault", ["drop", "503", "409", "truncated"])
def test_an_upload_of_which_a_request_fails_begins_anew(proxy, bucket, fault):
    """Whichever of its requests fails, the object is there in the end, whole."""
    place, data = through(proxy, bucket), os.urandom(11 << 20)
    for number in range(1, 6):  # begin, three parts, complete
        proxy.reset()
        proxy.plan(number, fault, "after")
        key = (place / f"big{number}").key
        place.bucket.upload(key, len(data), lambda: iter([data[: 6 << 20], data[6 << 20 :]]))
        assert bucket.read(key) == data


def test_all_objects_go_where_one_of_them_is_not_there(proxy, bucket):
    """A store that has none of the objects in one request, and says of one that it is not there: the others are deleted."""
    place = through(proxy, bucket)
    keys = [(place / name).key for name in "abcd"]
    for key in keys[1:]:
        place.bucket.overwrite(key, b"1")
    proxy.reset()
    for number in (1, 2):  # of all, and then of the first one
        proxy.plan(number, "404")
    place.bucket.delete(keys)
    assert len(proxy.hits) == 2
    assert place.bucket.entries(place.key) == []


def test_an_error_of_the_content_ends_an_upload_and_is_raised(place):
    """An error of the content ends an upload as itself, and nothing is there."""

    def pieces():
        yield bytes(9 << 20)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        place.bucket.upload((place / "bad").key, 20 << 20, pieces)
    assert place.bucket.entries(place.key) == []


def test_errors_show_no_secret(monkeypatch, bucket):
    """Neither a key of the settings, nor a signature in an address; a bucket that there is not is named."""
    options = StorageOptions(options=("secret_access_key=VERYSECRET", "access_key_id=KNOWNID"), give_up_after_s=0.1)
    assert "VERYSECRET" not in repr(options)
    config = CheckpointConfig(storage=StorageConfig(options=options.options))
    assert "VERYSECRET" not in repr(config) + config.deviations()
    with pytest.raises(ConfigError) as caught:
        StorageConfig(options=("VERYSECRET",))
    assert "VERYSECRET" not in str(caught.value)
    shown = cleaned(
        "GET http://u:VERYSECRET@h/b?sig=VERYSECRET&x failed: VERYSECRET\n\nDebug source: x", ["VERYSECRET"]
    )
    assert "VERYSECRET" not in shown
    with pytest.raises(FileNotFoundError, match="no such bucket"):
        open_place("s3://there-is-none/x", QUICK).bucket.read("x")
    assert isinstance(store_error(Exception("status code: 503"), "s3://b/k", "read", ()), TimeoutError)
    assert isinstance(store_error(Exception("status code: 403 Forbidden"), "s3://b/k", "read", ()), PermissionError)


def test_addresses_are_told_from_paths():
    """What is one, and what only looks like one."""
    assert is_url("s3://bucket/run")
    assert not is_url("/data/s3://x")
    assert not is_url("runs/exp")
    assert not is_url("file:///data")
    with pytest.raises(ConfigError, match="hf:// is not supported"):
        is_url("hf://x/y")
    with pytest.raises(ConfigError, match="as text"):
        is_url("s3:/bucket/run")
    for wrong in ("s3://bucket/../x", "s3://user:VERYSECRET@host/x", "s3://user:VERY/SECRET@host/x", "s3:///x"):
        with pytest.raises(ConfigError, match="a bucket and a plain path") as caught:
            open_place(wrong, QUICK, "mirror.url")
        assert (caught.value.key, "SECRET" in str(caught.value)) == ("mirror.url", False)
    with pytest.raises(ConfigError, match="small letters"):
        is_url("S3://bucket/run")
    place = open_place("s3://bucket/a//b/", QUICK)
    assert (str(place), place.name, str(place.parent), (place / "c.pt").suffix) == (
        "s3://bucket/a/b",
        "b",
        "s3://bucket/a",
        ".pt",
    )
    assert place.at("s3://bucket/x/y") == ObjectPath(place.bucket, "x/y")
    with pytest.raises(ValueError, match="does not lie in"):
        place.at("s3://other/x")


@pytest.mark.slow
def test_without_obstore_directories_work_and_addresses_say_what_to_install(tmp_path):
    """A directory needs no obstore, nothing imports it, and an address says what to install."""
    done = run_program("saves_without_obstore", str(tmp_path), fresh=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "1"
    assert "ConfigError" in done.stdout
    assert "pip install obstore" in done.stdout
