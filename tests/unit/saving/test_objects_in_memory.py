"""Saves to an object store and what is read there, with a store in this process: every request is real but for the network."""

import logging
import uuid

import pytest
import torch
from small_runs import config, wait_for_mirror

from safe_ckpt import Checkpointer, Mirror, PerRank, load, newest
from safe_ckpt.core.storage.objects import bucket as buckets
from safe_ckpt.core.writer.inline import inline
from safe_ckpt.errors import NoValidCheckpointError


@pytest.fixture
def url(monkeypatch):
    """The address of a run in a bucket of its own."""
    store = pytest.importorskip("obstore.store").MemoryStore()
    monkeypatch.setattr(buckets, "connect", lambda *_: store)
    return f"s3://{uuid.uuid4().hex}/run"


def state_of(step):
    return {"w": {"t": torch.full((100,), float(step))}, "n": step, "own": PerRank({"a": [step]})}


def save(url, *steps):
    with Checkpointer(url, config()) as ckpt:
        return [ckpt.save(step, state_of(step)).result(timeout_s=30) for step in steps]


def restored(url, read):
    """What ``read`` puts into a fresh state."""
    state = {"w": {"t": torch.zeros(100)}, "n": -1, "own": PerRank({})}
    info = read(url, state)
    step = state["n"]
    assert torch.equal(state["w"]["t"], torch.full((100,), float(step)))
    assert state["own"].value == {"a": [step]}
    return info.step, step


def resumed(url, state):
    with Checkpointer(url, config()) as ckpt:
        return ckpt.resume(state)


@pytest.mark.parametrize("read", [resumed, load])
def test_a_state_comes_back_from_a_store(url, read):
    """The newest, whole: by a resume, and by a load, which takes nothing."""
    save(url, 1, 2)
    assert restored(url, read) == (2, 2)
    assert restored(url, read) == (2, 2)


def test_a_checkpoint_of_which_an_object_is_gone_that_nobody_reads_is_passed_over(url, caplog):
    """It is good as a whole or not at all: rank 0 looks whether all is there."""
    gone = save(url, 1, 2)[1].path / "w.safetensors"
    gone.bucket.delete([gone.key])
    state = {"n": -1}
    assert load(url, state).step == state["n"] == 1
    assert "w.safetensors): is missing" in caplog.text


@pytest.mark.parametrize("read", [resumed, load])
@pytest.mark.parametrize("harm", ["damaged", "missing"])
def test_what_is_damaged_in_a_store_is_passed_over(url, read, harm, caplog):
    """One object has other bytes, or is gone: the one before it is taken, and the reason is said."""
    bad = save(url, 1, 2)[1].path / "w.safetensors"
    data = bad.bucket.read(bad.key)[0]
    if harm == "missing":
        bad.bucket.delete([bad.key])
    else:
        bad.bucket.overwrite(bad.key, data[:-1] + bytes([data[-1] ^ 1]))
    with caplog.at_level(logging.WARNING):
        assert restored(url, read) == (1, 1)
    assert [one for one in caplog.messages if "w.safetensors" in one]


def test_where_all_of_a_store_is_damaged_it_is_said(url):
    """No fresh start, and the reason for each."""
    for info in save(url, 1, 2):
        bad = info.path / "w.safetensors"
        bad.bucket.overwrite(bad.key, b"nonsense")
    with pytest.raises(NoValidCheckpointError) as caught:
        resumed(url, state_of(0))
    assert len(caught.value.rejected) == 2


def test_a_mirror_is_resumed_from_where_the_disk_is_empty(url, tmp_path):
    """What was uploaded comes back to another machine, whole, but for what is marked, which is not even fetched."""
    settings, spoilt = config(mirror=Mirror(url=url)), {**state_of(2), "w": {"t": torch.full((100,), float("nan"))}}
    with inline():  # the store is that of this process
        with Checkpointer(tmp_path / "one", settings) as ckpt:
            ckpt.save(1, state_of(1)).result(timeout_s=30)
            ckpt.save(2, spoilt).result(timeout_s=30)
            wait_for_mirror(ckpt)
        with Checkpointer(tmp_path / "two", settings) as ckpt:
            assert restored(ckpt, lambda ckpt, state: ckpt.resume(state)) == (1, 1)
    assert [path.name for path in (tmp_path / "two").glob("step-*")] == ["step-00000001"]


@pytest.mark.parametrize("verify", [False, True])
def test_the_newest_is_verified_where_that_is_asked_for(tmp_path, verify):
    """``newest`` passes over what is damaged; without ``verify`` it reads no payload."""
    save(tmp_path, 1, 2)
    damaged = tmp_path / "step-00000002/w.safetensors"
    damaged.chmod(0o644)
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    assert newest(tmp_path, verify=verify).step == (1 if verify else 2)
