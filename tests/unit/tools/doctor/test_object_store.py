"""``safe-ckpt doctor`` on the address of an object store: what is measured, and what it says of stores that do not do."""

import json
import os
import socket
import time

import pytest
from typer.testing import CliRunner

from kit.hub_gateway import HubGateway
from kit.object_servers import missing, start
from kit.patience import scaled
from safe_ckpt import Checkpointer
from safe_ckpt.core.storage.objects.bucket import Bucket
from safe_ckpt.errors import DirectoryError
from safe_ckpt.tools.cli.app import app

SECRET = "do-not-print-this-secret"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    if why := missing("ministack"):
        pytest.skip(why)
    with start("ministack", tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture
def store(server, monkeypatch):
    """A bucket of its own, and the environment in which it is found."""
    bucket = server.new_bucket()
    for name, value in {**bucket.environment(), "AWS_SECRET_ACCESS_KEY": SECRET}.items():
        monkeypatch.setenv(name, value)
    return bucket


def run(*args):
    done = CliRunner().invoke(app, ["doctor", *map(str, args)])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    assert SECRET not in done.output
    return done


def findings(done):
    return {finding["check"]: finding for finding in json.loads(done.stdout)["findings"]}


def test_doctor_tries_every_guarantee_of_a_store_and_leaves_nothing(store):
    """Each guarantee and speed is a finding, beside a live job, which is named; what was written for that is gone."""
    url = store.url()
    with Checkpointer(url) as ckpt:
        ckpt.save(1, {"n": 1}).result(timeout_s=20)
        before = store.keys()
        done = run(url, "--mebibytes", "20", "--json")
        assert store.keys().keys() == before.keys()
        assert store.uploads() == []
    found = findings(done)
    assert done.exit_code == 0
    assert list(found)[:7] == [
        *("directory", "held by", "conditions", "listing", "latency", "speed", "unfinished uploads"),
    ]
    assert {finding["state"] for finding in list(found.values())[:7]} <= {"ok", "warn"}
    assert f"process {os.getpid()} on host" in found["held by"]["measured"]
    assert found["held by"]["figures"]["checkpoints"] == 1
    assert found["latency"]["figures"]["median_s"] > 0
    assert found["speed"]["figures"]["put_bytes_per_s"] > 0
    assert "20.0 MiB in parts of 8.0 MiB" in found["speed"]["measured"]
    assert "versions" in found
    text = run(url, "--mebibytes", "0").stdout
    assert "not measured" in text
    assert f"{url}: " in text.splitlines()[-1]


def without_create(monkeypatch):
    monkeypatch.setattr(Bucket, "create", Bucket.overwrite)


def without_replace(monkeypatch):
    monkeypatch.setattr(Bucket, "replace", lambda self, key, data, version: Bucket.overwrite(self, key, data))


def without_any(monkeypatch):
    def refuse(self, key, data, version=None):
        raise OSError(22, "not implemented", key)

    monkeypatch.setattr(Bucket, "create", refuse)


@pytest.mark.parametrize(
    ("breaking", "says"),
    [(without_create, "If-None-Match"), (without_replace, "If-Match"), (without_any, "takes no conditional requests")],
    ids=["create", "replace", "refused"],
)
def test_a_store_without_conditions_fails(store, monkeypatch, breaking, says):
    """It names the guarantee that is not given, and what follows: refused unless storage.unfenced is set; then a warning."""
    breaking(monkeypatch)
    found = findings(done := run(store.url(), "--mebibytes", "0", "--json"))["conditions"]
    assert (done.exit_code, found["state"], says in found["measured"]) == (1, "fail", True)
    assert "unless storage.unfenced is set" in found["advice"]
    with pytest.raises(DirectoryError):
        Checkpointer(store.url())
    monkeypatch.setenv("SAFE_CKPT__STORAGE__UNFENCED", "true")
    assert findings(run(store.url(), "--mebibytes", "0", "--json"))["conditions"]["state"] == "warn"


WAYS = [
    ("creates an object only where there is none", {}),
    ("also for one of 8 at a time", {"conditions": "304"}),
    ("creates an object where there is one already", {"conditions": "ignored"}),
    ("takes no conditional requests", {"conditions": "refused"}),
    ("by the version with which it is read", {"edge_etags": False}),
    ("by the version with which it is read", {"conditions": "unquoted"}),
]


@pytest.mark.parametrize(("says", "how"), WAYS, ids=[str(how) for _, how in WAYS])
def test_doctor_tells_of_a_store_that_redirects_what_it_does_with_conditions(store, monkeypatch, says, how):
    """Reads answered by 302, lists of one kind alone, no request that deletes several: all is right but what is named."""
    with HubGateway(store, bulk_delete=False, **how) as gateway:
        for name, value in gateway.environment().items():
            monkeypatch.setenv(name, value)
        found = findings(run(gateway.url(), "--mebibytes", "6", "--json"))
        assert gateway.redirects > 0
    assert says in found["conditions"]["measured"]
    assert found["conditions"]["state"] == ("ok" if how in ({}, {"conditions": "304"}) else "fail")
    assert {found["listing"]["state"], found["speed"]["state"]} <= {"ok", "warn"}
    assert store.keys() == {}


def test_a_store_whose_condition_is_not_atomic_fails(store, monkeypatch):
    """Of several that create one object at a time exactly one may succeed, whatever happens one after the other."""
    create = Bucket.create

    def racy(self, key, data):
        return Bucket.overwrite(self, key, data) if key.endswith("/race") else create(self, key, data)

    monkeypatch.setattr(Bucket, "create", racy)
    found = findings(run(store.url(), "--mebibytes", "0", "--json"))["conditions"]
    assert (found["state"], "let 8 of 8 create one object" in found["measured"]) == ("fail", True)


def test_the_rule_for_unfinished_uploads_is_named(store):
    """What a killed job leaves of an upload is charged for until a lifecycle rule aborts it."""
    found = findings(run(store.url(), "--mebibytes", "0", "--json"))["unfinished uploads"]
    assert (found["state"], "lifecycle rule" in found["advice"]) == ("ok", True)


def test_doctor_ends_in_time_on_a_store_that_does_not_answer(store, monkeypatch):
    """It ends in time, with a few tries of ``--timeout-s``; says so once, with status 1, and tries nothing more."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        begun = time.monotonic()
        done = run(f"s3://{store.bucket}-x/run", "--timeout-s", "1", "--json")
        seconds = time.monotonic() - begun
    found = findings(done)
    assert 0.9 < seconds < scaled(6)
    assert (done.exit_code, found["held by"]["state"], found["speed"]["state"]) == (1, "fail", "skipped")
    assert "--timeout-s" in found["held by"]["advice"]


def test_doctor_says_what_to_do_about_a_missing_bucket(store):
    """Status 1, and what to do."""
    done = run("s3://there-is-none/run", "--json")
    assert (done.exit_code, "create the bucket" in findings(done)["held by"]["advice"]) == (1, True)


def test_one_wrong_answer_is_no_reason_for_another_store(store, monkeypatch):
    """A new object that is not listed, or a byte that differs, once: a warning that says to try again, and no failure."""
    lies = {
        "listing": ("entries", "small", lambda _: []),
        "speed": ("read_range", "parts", lambda data: memoryview(bytes(len(data)))),
    }
    for check, (method, name, change) in lies.items():
        real, told = getattr(Bucket, method), []

        def lie(self, key, *args, real=real, told=told, name=name, change=change):
            answer = real(self, key, *args)
            if told or name not in key:
                return answer
            told.append(key)
            return change(answer)

        with monkeypatch.context() as once:
            once.setattr(Bucket, method, lie)
            found = findings(run(store.url(), "--mebibytes", "4", "--json"))
        assert told
        assert found[check]["state"] == "warn", found
        assert "reads disagreed, try again" in found[check]["measured"]
