"""What is wrong in how a store is reached is said at once, and what to do about it; or soon, where it must be tried."""

import errno
import logging
import os
import time

import pytest
import torch

from kit import limits
from kit.fault_proxy import FaultProxy
from kit.patience import scaled
from safe_ckpt import CheckpointConfig, Checkpointer, Retention
from safe_ckpt.core.home.objects.lock import owner_of
from safe_ckpt.core.storage.objects.options import StorageOptions
from safe_ckpt.core.storage.objects.place import open_place
from safe_ckpt.errors import ConfigError
from safe_ckpt.tools.inspection.files import place_given
from safe_ckpt.tools.inspection.listing import read_listing

KEYS = ("access_key_id=someone", "secret_access_key=hunter2hunter2")
AZURE = ("account_name=someone", "account_key=aHVudGVyMg==")
NOWHERE = "http://127.0.0.1:9"


def options(*more, keys=KEYS, **kwargs):
    return StorageOptions(options=(*keys, *more), **{"give_up_after_s": 60, "request_timeout_s": 1, **kwargs})


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    for name in ("AWS_ALLOW_HTTP", "AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AZURE_ALLOW_HTTP", "AZURE_STORAGE_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)


def test_http_must_be_allowed():
    """A request to an endpoint that is http:// fails at once, and says which variable allows it."""
    place = open_place("s3://bucket/run", options(f"endpoint={NOWHERE}"))
    with pytest.raises(OSError, match="AWS_ALLOW_HTTP=true, or allow_http=true") as caught:
        place.bucket.read("x")
    assert caught.value.errno == errno.EINVAL
    assert NOWHERE in str(caught.value)  # one sees which endpoint was asked


@pytest.mark.parametrize("allowed", ["allow_http=true", "aws_allow_http=true"])
def test_storage_options_are_taken_with_and_without_obstores_prefix(allowed):
    """With obstore's prefix or without it; also where we have a value of our own."""
    given = options(f"aws_endpoint={NOWHERE}", allowed, "aws_checksum_algorithm=SHA256", give_up_after_s=0)
    with pytest.raises(TimeoutError):
        open_place("s3://bucket/run", given).bucket.read("x")


@pytest.mark.parametrize(
    ("url", "keys", "option"),
    [
        ("s3://b/r", KEYS, "endpoint"),
        ("s3://b/r", KEYS, "aws_endpoint_url"),
        ("az://b/r", AZURE, "endpoint"),
        ("az://b/r", AZURE, "azure_storage_endpoint"),
    ],
)
def test_an_endpoint_of_the_settings_needs_a_scheme(url, keys, option):
    """It is refused before a request is made of it; its value is not shown."""
    with pytest.raises(ConfigError, match=f"{option} needs http://") as caught:
        open_place(url, options(f"{option}=localhost:9000", keys=keys))
    assert "9000" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "keys", "variable"),
    [("s3://b/r", KEYS, "AWS_ENDPOINT_URL"), ("az://b/r", AZURE, "AZURE_STORAGE_ENDPOINT")],
)
def test_an_endpoint_of_the_environment_needs_a_scheme(monkeypatch, url, keys, variable):
    """The same, named by its variable; one in the settings counts more."""
    monkeypatch.setenv(variable, "localhost:9000")
    with pytest.raises(ConfigError, match="needs http://") as caught:
        open_place(url, options(keys=keys))
    assert caught.value.key == variable
    open_place(url, options("endpoint=http://localhost:9000", keys=keys))


def test_a_panic_of_the_client_is_an_error_like_others(monkeypatch):
    """It is no ``Exception`` there; here it is an ``OSError``, which is not tried again."""
    panic = type("PanicException", (BaseException,), {})
    place = open_place("s3://bucket/run", options())

    def panics():
        raise panic("request valid: InvalidUri")

    with pytest.raises(OSError, match="InvalidUri") as caught:
        place.bucket._again(panics, "x", "read")
    assert caught.value.errno == errno.EINVAL


def test_the_first_retry_is_a_warning(object_server, bucket, monkeypatch, caplog):
    """A store that does not answer is seen in the log, once for each request."""
    with FaultProxy(object_server.endpoint) as proxy:
        for name, value in bucket.environment(proxy.endpoint).items():
            monkeypatch.setenv(name, value)
        place = open_place(bucket.url(), StorageOptions(give_up_after_s=30, request_timeout_s=5))
        place.bucket.overwrite((place / "x").key, b"1")
        proxy.reset()
        for number in (1, 2, 3):
            proxy.plan(number, "503", "before")
        caplog.set_level(logging.DEBUG, logger="safe_ckpt")
        place.bucket.read((place / "x").key)
    tries = [record.levelno for record in caplog.records if "once more in" in record.message]
    assert tries == [logging.WARNING, logging.DEBUG, logging.DEBUG]


def test_commands_wait_a_little_for_a_first_answer(monkeypatch):
    """Where nothing answers, a command gives up after some seconds, and not after ``barrier_s``."""
    monkeypatch.setattr("safe_ckpt.tools.inspection.files._FIRST_ANSWER_S", 0.5)
    for name, value in {
        "ENDPOINT_URL": NOWHERE,
        "ALLOW_HTTP": "true",
        "ACCESS_KEY_ID": "a",
        "SECRET_ACCESS_KEY": "b",
    }.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    begun = time.monotonic()
    with pytest.raises(TimeoutError, match=NOWHERE):
        place_given("s3://bucket/run")
    assert time.monotonic() - begun < scaled(30)


def test_a_bucket_that_is_missing_is_said_to_be(bucket, monkeypatch):
    """In a few words, by whatever asks first; nobody is told that a directory in it is free."""
    for name, value in bucket.environment().items():
        monkeypatch.setenv(name, value)
    place = open_place("s3://there-is-none/run", StorageOptions(give_up_after_s=30))
    for ask in (owner_of, read_listing):
        with pytest.raises(FileNotFoundError) as caught:
            ask(place)
        assert caught.value.strerror == "there is no such bucket"
    with pytest.raises(FileNotFoundError, match="no such bucket"):
        place.bucket.upload("run/x", 3, lambda: iter([b"abc"]))
    assert owner_of(open_place(bucket.url(), StorageOptions())) is None


def test_credentials_that_expire_are_asked_for_again(object_server, bucket, monkeypatch):
    """S3 says so with status 400; the request is made once more with what the source of credentials has by then."""
    with FaultProxy(object_server.endpoint) as proxy:
        for name, value in bucket.environment(proxy.endpoint).items():
            monkeypatch.setenv(name, value)
        place = open_place(bucket.url(), StorageOptions(give_up_after_s=30, request_timeout_s=5))
        place.bucket.overwrite((place / "x").key, b"1")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "another")
        proxy.reset()
        proxy.plan(1, "400")
        assert place.bucket.read((place / "x").key)[0] == b"1"
        first, second = (record.headers["authorization"] for record in proxy.seen)
        assert ("Credential=another/" in first, "Credential=another/" in second) == (False, True)
        for number in (3, 4):
            proxy.plan(number, "400")
        with pytest.raises(OSError, match="ExpiredToken: of the fault proxy"):
            place.bucket.read((place / "x").key)


@pytest.fixture
def renewed(object_server, bucket, monkeypatch):
    """Has the store refuse the credentials there are as expired, from now on; others are in the environment then."""
    with FaultProxy(object_server.endpoint) as proxy:
        for name, value in bucket.environment(proxy.endpoint).items():
            monkeypatch.setenv(name, value)

        def expire():
            new = f"{os.environ['AWS_ACCESS_KEY_ID']}x"
            monkeypatch.setenv("AWS_ACCESS_KEY_ID", new)
            proxy.reset()
            for number in range(1, 100):
                proxy.plan(
                    number, "400", match=lambda record: f"Credential={new}/" not in record.headers["authorization"]
                )

        yield expire


def test_every_request_is_made_with_the_credentials_there_are_by_then(renewed, bucket):
    """Not reads alone: whatever a save, a listing or a deletion asks for, in one request or in parts."""
    store = open_place(bucket.url(), StorageOptions(give_up_after_s=5, request_timeout_s=5, part_bytes=5 << 20)).bucket
    version = store.create("run/x", b"1")
    for request in (
        lambda: store.upload("run/small", 3, lambda: iter([b"abc"])),
        lambda: store.upload("run/large", 11 << 20, lambda: iter([bytes(11 << 20)])),
        lambda: store.replace("run/x", b"2", version),
        lambda: store.create("run/y", b"3"),
        lambda: store.overwrite("run/z", b"4"),
        lambda: store.copy("run/z", "run/zz", 1),
        lambda: store.read_range("run/z", 0, 1),
        lambda: store.size_of("run/z"),
        lambda: store.list_folders("run"),
        lambda: store.delete(["run/zz"]),
        lambda: store.entries("run"),
        lambda: store.afresh().read("run/z"),
        lambda: store.within(5).upload("run/again", 3, lambda: iter([b"abc"])),
    ):
        renewed()
        request()
    found = {entry.key: entry.size_bytes for entry in store.entries("run")}
    assert found == {"run/small": 3, "run/large": 11 << 20, "run/x": 1, "run/y": 1, "run/z": 1, "run/again": 3}


def test_a_run_whose_credentials_expire_goes_on_saving(renewed, bucket):
    """They are renewed while it trains: each later save is committed, and a resume takes the newest."""
    state = {"model": {"w": torch.zeros(1000)}}
    settings = CheckpointConfig(retention=Retention(keep_last=2), timeouts=limits.QUICK)
    with Checkpointer(bucket.url(), settings) as ckpt:
        for step in range(1, 5):
            state["model"]["w"].fill_(step)
            ckpt.save(step, state).result(60)
            renewed()
        state["model"]["w"].fill_(0)
        assert ckpt.resume(state).step == 4
    assert state["model"]["w"].eq(4).all()
