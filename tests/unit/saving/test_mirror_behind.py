"""A mirror that is slower than the saves: which checkpoints it leaves out, and which it does not."""

import shutil
import threading

import pytest
import torch
from small_runs import wait_for_mirror

from kit.fault_proxy import FaultProxy
from kit.inside import upload_at_once
from kit.memory_store import MemoryStore, no_answer
from kit.patience import scaled, wait_until
from safe_ckpt import CheckpointConfig, Checkpointer, Mirror, Retention, StorageConfig, Timeouts, events
from safe_ckpt.core.formats.manifest import read_manifest
from safe_ckpt.core.home.file_home import FileHome
from safe_ckpt.core.home.objects.head import list_objects
from safe_ckpt.core.home.objects.home import ObjectHome
from safe_ckpt.core.storage import durable
from safe_ckpt.core.storage.objects.options import StorageOptions
from safe_ckpt.core.storage.objects.place import open_place
from safe_ckpt.errors import SafeCheckpointError
from safe_ckpt.extensions.mirror.fetching import fetch_into
from safe_ckpt.extensions.mirror.tier import Tier
from safe_ckpt.testing import inline_saves

TIMES = Timeouts(lengthy_s=120, barrier_s=60, shutdown_s=60)


@pytest.fixture
def gate(object_server, bucket, monkeypatch):
    """Two events: the upload of a checkpoint has begun; it, and what comes after it, may go on."""
    begun, free = threading.Event(), threading.Event()

    def hold(record):
        if record.method == "PUT" and "/step-" in record.path:
            begun.set()
            free.wait(scaled(60))

    with FaultProxy(object_server.endpoint) as proxy:
        proxy.on_request = hold
        for name, value in bucket.environment(proxy.endpoint).items():
            monkeypatch.setenv(name, value)
        yield begun, free
        free.set()


@pytest.mark.parametrize(("every", "expected"), [(None, [1, 6]), (2, [1, 2, 4, 6]), (5, [1, 5, 6])])
def test_only_the_newest_that_waits_is_uploaded(tmp_path, bucket, gate, every, expected):
    """Besides the one that was under way, the newest; and each that ``keep_every_steps`` names."""
    begun, free = gate
    seen = []
    config = CheckpointConfig(
        timeouts=TIMES,
        mirror=Mirror(url=bucket.url(), keep_every_steps=every),
        storage=StorageConfig(request_timeout_s=60),
    )
    with Checkpointer(tmp_path, config, hooks=[seen.append]) as ckpt:
        for step in range(1, 7):
            ckpt.save(step, {"w": {"t": torch.full((4,), float(step))}}).result(timeout_s=60)
            assert begun.wait(scaled(60))  # of the first; the others wait behind it
        free.set()
    mirrored = [event for event in seen if isinstance(event, events.Mirrored)]
    assert {event.error for event in mirrored} == {""}
    assert sorted(int(event.path[-8:]) for event in mirrored) == expected
    there = [one.manifest.step for one in list_objects(open_place(bucket.url(), StorageOptions(give_up_after_s=30)))]
    assert sorted(there) == [step for step in expected if every is None or step % every == 0 or step == 6]


def following(bucket, keep_last):
    return CheckpointConfig(
        timeouts=TIMES,
        retention=Retention(keep_last=keep_last),
        mirror=Mirror(url=bucket.url(), follow=True, required=True),
        storage=StorageConfig(request_timeout_s=60),
    )


def save(ckpt, step):
    return ckpt.save(step, {"w": {"t": torch.full((4,), float(step))}}).result(timeout_s=60)


def there(bucket):
    found = list_objects(open_place(bucket.url(), StorageOptions(give_up_after_s=30)))
    return {one.manifest.op_id: one.manifest.step for one in found}


def test_a_step_that_was_deleted_and_is_saved_again_stays_in_the_mirror(tmp_path, bucket, monkeypatch):
    """Retention has deleted a step, and with ``follow`` its copy goes; the store refuses that, so it is put off. Meanwhile the
    run has gone back and saves the step again: what is deleted then is the old copy, and not the new one.
    """
    real, refuses = ObjectHome.discard, threading.Event()

    def discard(self, places):
        if refuses.is_set():
            raise TimeoutError(110, "no answer", str(self.path))
        return real(self, places)

    monkeypatch.setattr(ObjectHome, "discard", discard)
    with Checkpointer(tmp_path, following(bucket, keep_last=2)) as ckpt:
        for step in (1, 2):
            save(ckpt, step)
        wait_for_mirror(ckpt)
        refuses.set()
        third, again = save(ckpt, 3), save(ckpt, 1)  # 1 and then 2 are deleted
        wait_until(lambda: {third.op_id, again.op_id} <= there(bucket).keys(), 60, "both uploads")
        refuses.clear()
        last = save(ckpt, 4)
    assert sorted(path.name[-1] for path in tmp_path.glob("step-*")) == ["1", "4"]
    assert there(bucket) == {again.op_id: 1, last.op_id: 4}


def test_what_vanished_before_its_upload_protects_nothing(tmp_path, bucket, monkeypatch):
    """With ``required`` an older checkpoint stays until a newer one is in the mirror. One that somebody deleted while it waited
    is not there.
    """
    real, begun, vanished, tries = Tier.upload, threading.Event(), threading.Event(), []

    def upload(self, one, send, check):
        if one.info.step == 2:
            begun.set()
            assert vanished.wait(scaled(60))
            return real(self, one, send, check)
        tries.append(one.info.step)
        raise TimeoutError(110, "no answer", one.info.name)

    monkeypatch.setattr(Tier, "upload", upload)
    with Checkpointer(tmp_path, following(bucket, keep_last=1)) as ckpt:
        save(ckpt, 1)
        save(ckpt, 2)
        assert begun.wait(scaled(60))
        shutil.rmtree(tmp_path / "step-00000002")
        before = len(tries)
        vanished.set()
        wait_until(lambda: len(tries) > before, 60, "the end of the upload of what is not there")
        save(ckpt, 3)
        assert sorted(path.name[-1] for path in tmp_path.glob("step-*")) == ["1", "3"]
        assert there(bucket) == {}
        monkeypatch.setattr(Tier, "upload", real)
    assert list(there(bucket).values()) == [3]


def test_what_was_fetched_without_a_word_of_the_disk_replaces_nothing_for_good(tmp_path, bucket, monkeypatch):
    """The disk does not confirm the name of what was fetched, and it cannot be taken back: the older one that it replaced is
    still there, whole.
    """
    config = CheckpointConfig(timeouts=TIMES, mirror=Mirror(url=bucket.url()))
    run, step = tmp_path / "run", tmp_path / "run/step-00000001"
    with Checkpointer(run, config) as ckpt:
        old = save(ckpt, 1)
        shutil.copytree(step, tmp_path / "old")
        new = save(ckpt, 1)
    shutil.rmtree(step)
    (tmp_path / "old").rename(step)
    exchange, sync, asked = durable.exchange, durable.sync_directory, []

    def once(*names):
        asked.append(names)
        return exchange(*names) if len(asked) == 1 else False

    def unconfirmed(path):
        if path == str(run) and read_manifest(step).op_id != old.op_id:
            raise OSError(5, "Input/output error", path)
        sync(path)

    monkeypatch.setattr(durable, "exchange", once)
    monkeypatch.setattr(durable, "sync_directory", unconfirmed)
    home = FileHome(run, lease_s=60)
    home.open()
    (copy,) = list_objects(open_place(bucket.url(), StorageOptions(give_up_after_s=30)))
    with pytest.raises(durable.HalfCommittedError):
        fetch_into(home, copy.path, copy.manifest, timeouts=TIMES)
    assert read_manifest(step).op_id == new.op_id
    kept = [read_manifest(path.parent).op_id for path in home.pending.rglob("manifest.json")]
    assert kept == [old.op_id]
    monkeypatch.undo()
    home.close()


FOLLOWING = {
    "plain": ({}, Retention(), [5]),
    "follow": ({"follow": True}, Retention(), [1, 2, 3, 4, 5]),
    "every second": ({"keep_every_steps": 2}, Retention(), [2, 4, 5]),
    "the best": ({"follow": True}, Retention(keep_last=1, keep_best=1, metric="loss"), [2, 5]),
    "required": ({"follow": True, "required": True}, Retention(keep_last=2), [4, 5]),
}


@pytest.mark.parametrize("rules", FOLLOWING)
def test_what_is_still_there_is_uploaded_after_an_outage(tmp_path, monkeypatch, rules):
    """Five saves without a store, the second is the best: with ``follow`` all that are here are there in the end."""
    upload_at_once(monkeypatch)
    store = MemoryStore(monkeypatch)
    mirror, retention, expected = FOLLOWING[rules]
    config = CheckpointConfig(timeouts=TIMES, mirror=Mirror(url=store.url(), **mirror), retention=retention)
    with inline_saves(), Checkpointer(tmp_path, config) as ckpt:
        store.before = no_answer
        for step in range(1, 6):
            ckpt.save(step, {"w": {"t": torch.full((4,), float(step))}}, metrics={"loss": abs(step - 2)}).result()
        store.before = None
    assert sorted(one["step"] for one in store.manifests().values()) == expected
    here = sorted(int(path.name[-8:]) for path in tmp_path.glob("step-*"))
    assert "follow" not in mirror or set(expected) <= set(here)


@pytest.mark.parametrize("here", [False, True])
def test_a_mirror_without_an_answer_is_no_fresh_start(tmp_path, monkeypatch, here):
    """Where nothing is here, whether the run is new is not known: an error. What is here is taken, whatever the mirror has."""
    upload_at_once(monkeypatch)
    store = MemoryStore(monkeypatch)
    config = CheckpointConfig(timeouts=TIMES, mirror=Mirror(url=store.url()))
    with inline_saves():
        with Checkpointer(tmp_path, config) as ckpt:
            ckpt.save(1, {"n": 1})
        if not here:
            shutil.rmtree(tmp_path)
        state = {"n": 0}
        with Checkpointer(tmp_path, config) as ckpt:
            store.before = no_answer
            if here:
                assert ckpt.resume(state).step == state["n"] == 1
            else:
                with pytest.raises(SafeCheckpointError):
                    ckpt.resume(state)
            store.before = None
            assert ckpt.resume(state).step == state["n"] == 1
