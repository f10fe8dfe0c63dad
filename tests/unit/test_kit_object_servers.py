"""The servers of object stores of the test kit: what they keep, and that they end with who started them."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import obstore
import pytest
from obstore.store import from_url

from kit import object_servers
from kit.patience import wait_until
from support import program_path


def needs(kind):
    if why := object_servers.missing(kind):
        pytest.skip(why)


@pytest.mark.parametrize("kind", object_servers.KINDS)
def test_a_bucket_shows_what_was_done_to_it(kind, tmp_path, monkeypatch):
    """Its objects, uploads that nobody completed, and nothing of another bucket; two servers do not meet."""
    needs(kind)
    with object_servers.start(kind, tmp_path / "a") as first, object_servers.start(kind, tmp_path / "b") as second:
        assert first.endpoint != second.endpoint
        bucket = first.new_bucket()
        for name, value in bucket.environment().items():
            monkeypatch.setenv(name, value)
        store = from_url(bucket.url("run"))
        obstore.put(store, "a b/ü+&", b"hello")
        with pytest.raises(obstore.exceptions.AlreadyExistsError):
            obstore.put(store, "a b/ü+&", b"again", mode="create")
        with (
            pytest.raises(KeyError),
            obstore.open_writer(store, "big", buffer_size=5 << 20, max_concurrency=1) as writer,
        ):
            for _ in range(3):
                writer.write(bytes(5 << 20))
            wait_until(lambda: bucket.uploads() == ["run/big"], 10, "the upload")
            raise KeyError
        assert bucket.keys() == bucket.keys("run/a") == {"run/a b/ü+&": 5}
        assert bucket.keys("b") == first.keys() == second.keys() == {}
        assert bucket.read("run/a b/ü+&") == b"hello"
        assert first.uploads() == []


def test_a_bucket_of_the_kit_lists_more_than_a_thousand_keys(tmp_path, monkeypatch):
    """More than the thousand that one answer of a server holds."""
    needs("ministack")
    with object_servers.start("ministack", tmp_path) as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        store = from_url(server.url("many"))
        for number in range(1001):
            obstore.put(store, f"{number:04}", b"")
        assert len(server.keys()) == 1001


@pytest.mark.parametrize("kind", object_servers.KINDS)
def test_an_object_server_ends_with_the_process_that_started_it(kind, tmp_path):
    """Even when that is killed."""
    needs(kind)
    environment = {**os.environ, "PYTHONPATH": str(Path(object_servers.__file__).parents[1])}
    command = [sys.executable, program_path("starts_an_object_server"), kind, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as starter:
        pid = int(starter.stdout.readline())
        assert Path(f"/proc/{pid}").exists()
        starter.send_signal(signal.SIGKILL)
    wait_until(lambda: not Path(f"/proc/{pid}/fd/0").exists(), 10, "the end of the server")


def test_a_missing_object_server_is_named_with_how_to_get_it(monkeypatch, tmp_path):
    """By name, and with how to give it."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert object_servers.missing("azurite") == "azurite needs node"
    with pytest.raises(RuntimeError, match="azurite needs node"):
        object_servers.start("azurite", tmp_path)


def test_a_server_that_does_not_start_says_why(monkeypatch, tmp_path):
    """With the end of its log."""
    needs("moto")
    monkeypatch.setenv("PYTHONHOME", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"moto does not start: .+"):
        object_servers.start("moto", tmp_path)
