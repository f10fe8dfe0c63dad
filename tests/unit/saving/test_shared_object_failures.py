"""What goes wrong when an object store copies what did not change: the save is whole or fails by name; the next one works."""

import contextlib
import dataclasses
import os
import time
from pathlib import Path

import pytest
import torch
from frozen_jobs import FROZEN, SIZE, Job, delete, digest, is_copy, store_config, stored
from small_runs import wait_for_mirror

from kit.fault_proxy import FaultProxy
from safe_ckpt import Checkpointer, Mirror, Timeouts, events
from safe_ckpt.core.formats.manifest import read_manifest
from safe_ckpt.core.storage.objects.options import StorageOptions
from safe_ckpt.core.storage.objects.place import open_place
from safe_ckpt.errors import SafeCheckpointError
from safe_ckpt.extensions import unchanged
from support import run_program

WHOLE = 4 * SIZE * SIZE
HERE = str(Path(__file__).parent)


@pytest.fixture
def proxy(bucket, monkeypatch):
    with FaultProxy(bucket.endpoint) as made:
        for name, value in bucket.environment(made.endpoint).items():
            monkeypatch.setenv(name, value)
        yield made


def sent(proxy):
    """How many bytes went to the store since this was asked last."""
    proxy.settle()
    size = sum(record.size for record in proxy.seen if record.method == "PUT")
    proxy.reset()
    return size


def change(bucket, key, data):
    """Put other bytes into an object, as nobody should."""
    place = open_place(bucket.url(), StorageOptions(give_up_after_s=10))
    place.bucket.overwrite(key, data)


def frozen_key(bucket, step):
    (key,) = [key for key in bucket.keys(f"run/step-{step:08d}") if key.endswith(FROZEN)]
    return key


def run_against(bucket, proxy, name):
    """Run a program that reaches the bucket through the proxy."""
    environment = {**os.environ, **bucket.environment(proxy.endpoint)}
    return run_program(name, bucket.url(), HERE, env=environment, finalize=True)


def test_a_copy_in_the_store_is_made_while_the_interpreter_shuts_down(bucket):
    """The copy is made while the interpreter shuts down, when it starts no threads of ``concurrent.futures`` any more."""
    with FaultProxy(bucket.endpoint) as proxy:
        proxy.slow_s = 0.1
        done = run_against(bucket, proxy, "ends_while_a_copy_is_made")
    assert done.returncode == 0, done.stderr
    assert list(stored(bucket)) == ["step-00000001", "step-00000002"], done.stderr


@pytest.mark.parametrize("in_flight", [1, 2, 3])
def test_an_item_saved_every_second_time_relies_on_no_deleted_object(bucket, in_flight):
    """In every second save, with one checkpoint kept: no save relies on one that is being deleted."""
    job, teacher = Job(), torch.nn.Linear(SIZE, SIZE).requires_grad_(requires_grad=False)
    with Checkpointer(bucket.url(), store_config(keep=1, in_flight=in_flight)) as ckpt:
        for number in range(1, 11):
            ckpt.save(number, {**job.state, "teacher": teacher} if number % 2 else job.state)
        ckpt.wait()
    assert list(stored(bucket)) == ["step-00000010"]


def test_saves_that_overlap_share_too(proxy, bucket):
    """Two in flight all the time: the second and later ones are copied to memory, and not sent."""
    proxy.slow_s, job = 0.02, Job()
    with Checkpointer(bucket.url(), store_config(keep=2, in_flight=2)) as ckpt:
        for number in range(1, 9):
            ckpt.save(number, job.state)
        ckpt.wait()
    assert WHOLE < sent(proxy) < 2 * WHOLE
    assert list(stored(bucket)) == ["step-00000007", "step-00000008"]


@pytest.mark.parametrize("fault", ["timeout", "503"])
def test_copies_that_do_not_come_cost_one_save_at_most(proxy, bucket, fault):
    """They hang or are throttled, each of many: patience is for all together, and the next save does not try."""
    proxy.hold_s = 60.0
    layers = [torch.nn.Linear(SIZE, SIZE).requires_grad_(requires_grad=False) for _ in range(12)]
    state = {f"part{number}": layer for number, layer in enumerate(layers)}
    times = Timeouts(lengthy_s=40, barrier_s=20, fsync_stall_s=15, writer_stall_s=10, peer_stall_s=5, shutdown_s=5)
    config = store_config(request_timeout_s=1.5, timeouts=times)
    for nth in range(1, 200):
        proxy.plan(nth, fault, match=is_copy)
    took = []
    with Checkpointer(bucket.url(), config) as ckpt:
        for number in (1, 2, 3):
            begun = time.monotonic()
            ckpt.save(number, state).result(timeout_s=60)
            took.append(time.monotonic() - begun)
    assert took[2] < took[1] < 30, took
    assert len(stored(bucket)) == 3


def test_an_object_that_the_store_never_copies_is_tried_less_and_less(proxy, bucket):
    """The others are: that does not count as a success."""
    state = {"a": torch.nn.Linear(SIZE, SIZE), "b": torch.nn.Linear(SIZE, SIZE)}
    for one in state.values():
        one.requires_grad_(requires_grad=False)
    for nth in range(1, 50):
        proxy.plan(nth, "501", match=lambda record: is_copy(record) and "b.safetensors" in record.path)
    with Checkpointer(bucket.url(), store_config()) as ckpt:
        for number in range(1, 13):
            ckpt.save(number, state).result(timeout_s=30)
    tried = {record.path.split("step-")[1][:8] for record in proxy.hits}
    assert sorted(map(int, tried)) == [2, 4, 8]
    assert len(stored(bucket)) == 12


def test_an_interrupted_look_leaves_nothing_under_way(bucket, monkeypatch):
    """Ctrl-C within the call: later saves share as before, and need no copy in memory for it."""
    job, taken = Job(), []

    def hook(event):
        if isinstance(event, events.Snapshotted):
            taken.append(event.size_bytes)

    def interrupted(plan):
        raise KeyboardInterrupt

    with Checkpointer(bucket.url(), store_config(), hooks=[hook]) as ckpt:
        for number in (1, 2):
            ckpt.save(number, job.state).result(timeout_s=30)
        with monkeypatch.context() as patched:
            patched.setattr(unchanged, "digest_of_plan", interrupted)
            with pytest.raises((KeyboardInterrupt, SafeCheckpointError)):
                ckpt.save(3, job.state).result(timeout_s=30)
        with contextlib.suppress(SafeCheckpointError):
            ckpt.wait()
        ckpt.save(4, job.state).result(timeout_s=30)
    assert taken[-1] == taken[1] < WHOLE / 10


@pytest.mark.parametrize("every", [3, None])
def test_a_mirror_sends_everything_now_and_then(proxy, bucket, tmp_path, every):
    """Each n-th upload, however many checkpoints were passed over, which may be those that were written anew."""
    job, sizes = Job(), []
    settings = dataclasses.replace(store_config(full_every=every), mirror=Mirror(url=bucket.url()))
    with Checkpointer(tmp_path / "one", settings) as ckpt:
        sent(proxy)
        for number in range(1, 8):
            ckpt.save(number, job.state).result(timeout_s=30)
            wait_for_mirror(ckpt)
            sizes.append(sent(proxy) > WHOLE)
    assert sizes == ([True, False, False] * 3)[:7] if every else [True, *[False] * 6]
    assert len(stored(bucket)) == 7


def test_a_copy_that_hangs_does_not_hold_up_the_end(bucket):
    """``close`` has given up, and the interpreter does not wait for the request."""
    with FaultProxy(bucket.endpoint) as proxy:
        proxy.hold_s = 50.0
        proxy.plan(1, "timeout", match=is_copy)
        begun = time.monotonic()
        done = run_against(bucket, proxy, "closes_while_a_copy_hangs")
        took = time.monotonic() - begun
    assert "Error" in done.stdout, done.stderr
    assert took < 25, took
    assert list(stored(bucket)) == ["step-00000001"]


@pytest.mark.parametrize("length", [-100, 0])
def test_a_source_of_another_length_fails_one_save(proxy, bucket, length):
    """Somebody wrote to it: the save fails and says so, and the next one sends everything."""
    job = Job()
    with Checkpointer(bucket.url(), store_config()) as ckpt:
        ckpt.save(1, job.state).result(timeout_s=30)
        key = frozen_key(bucket, 1)
        data = bucket.read(key)
        change(bucket, key, b"" if not length else data[:length] if length < 0 else data + bytes(length))
        with pytest.raises(SafeCheckpointError, match=r"bytes|range is not satisfiable"):
            ckpt.save(2, job.state).result(timeout_s=60)
        ckpt.save(3, job.state).result(timeout_s=30)
    delete(bucket, "run/step-00000001")
    assert list(stored(bucket)) == ["step-00000003"]


def test_after_a_commit_of_unknown_outcome_the_next_save_sends_all(proxy, bucket):
    """No answer to a commit, nor to the question about it: the next save sends all, for what was the newest may be gone."""
    frozen = torch.nn.Linear(SIZE, SIZE).requires_grad_(requires_grad=False)
    first = frozen.weight.detach().clone()
    times = Timeouts(lengthy_s=6, barrier_s=5, peer_stall_s=3, shutdown_s=3)
    config = dataclasses.replace(store_config(keep=1, request_timeout_s=1, timeouts=times), lease_s=3.0)
    with Checkpointer(bucket.url(), config) as ckpt:
        ckpt.save(1, {"teacher": frozen}).result(timeout_s=30)
        frozen.weight.data.zero_()
        proxy.reset()
        proxy.hold_s = 30.0

        def of_the_manifest(record):
            return "step-00000002" in record.path and "manifest.json" in record.path

        for nth in range(1, 60):
            proxy.plan(nth, "timeout", "after", match=of_the_manifest)
        with pytest.raises(SafeCheckpointError):
            ckpt.save(2, {"teacher": frozen}).result(timeout_s=60)
        proxy.reset()
        delete(bucket, "run/step-00000001")  # as retention does after a commit
        frozen.weight.data.copy_(first)
        ckpt.save(3, {"teacher": frozen}).result(timeout_s=30)
    assert "step-00000003" in stored(bucket)


def test_an_item_that_a_resume_did_not_read_is_sent_and_not_copied(bucket):
    """An item that was not asked for has other bytes in the store: the next save sends those in memory."""
    first, second = (torch.nn.Linear(SIZE, SIZE).requires_grad_(requires_grad=False) for _ in range(2))
    with Checkpointer(bucket.url(), store_config()) as ckpt:
        ckpt.save(1, {"a": first, "b": second}).result(timeout_s=30)
    (key,) = [key for key in bucket.keys("run/") if key.endswith("b.safetensors")]
    data = bytearray(bucket.read(key))
    data[-1] ^= 1
    change(bucket, key, bytes(data))
    with Checkpointer(bucket.url(), store_config()) as ckpt:
        assert ckpt.resume({"a": first}).step == 1
        ckpt.save(2, {"a": first, "b": second}).result(timeout_s=30)
    delete(bucket, "run/step-00000001")
    (manifest,) = stored(bucket).values()
    assert {entry.path: entry.age for entry in manifest.files} == {"a.safetensors": 1, "b.safetensors": 0}


def test_a_copy_that_comes_late_is_swept_at_the_next_start(proxy, bucket):
    """The save has failed and was dropped when the store makes the copy: the next start finds it."""
    job = Job()
    with Checkpointer(bucket.url(), store_config()) as ckpt:
        ckpt.save(1, job.state).result(timeout_s=30)
        proxy.reset()
        (source,) = [frozen_key(bucket, 1)]
        seen = []
        proxy.on_request = lambda record: seen.append(record.path) if is_copy(record) else None
        for nth in range(1, 100):  # an upload is begun anew, and its requests are sent again
            proxy.plan(nth, "400", match=lambda record: "optimizer" in record.path and record.method == "PUT")
        with pytest.raises(SafeCheckpointError):
            ckpt.save(2, job.state).result(timeout_s=30)
        proxy.on_request = None
        proxy.reset()
        ckpt.save(3, job.state).result(timeout_s=30)
        late = "run/" + seen[0].split("/run/")[1].split("?")[0]
        change(bucket, late, bucket.read(source))
    assert late in bucket.keys("run/")
    with Checkpointer(bucket.url(), store_config()):
        assert late not in bucket.keys("run/")


def test_a_mirror_copies_nothing_from_what_is_damaged(bucket, tmp_path):
    """The newest there was found damaged, the run goes on from the one before: what comes next is sent, and good."""
    job = Job()
    settings = dataclasses.replace(store_config(keep=2), mirror=Mirror(url=bucket.url(), keep_last=2))
    with Checkpointer(tmp_path / "one", settings) as ckpt:
        for number in (1, 2):
            job.step()
            ckpt.save(number, job.state).result(timeout_s=30)
            wait_for_mirror(ckpt)
    key = frozen_key(bucket, 2)
    data = bytearray(bucket.read(key))
    data[-1] ^= 1
    change(bucket, key, bytes(data))
    with Checkpointer(tmp_path / "two", settings) as ckpt:
        other = Job()
        assert ckpt.resume(other.state).step == 1
        for number in (3, 4):
            ckpt.save(number, other.state).result(timeout_s=30)
    found = stored(bucket)
    assert list(found) == ["step-00000003", "step-00000004"]
    with Checkpointer(tmp_path / "three", settings) as ckpt:
        third = Job()
        assert ckpt.resume(third.state).step == 4
    assert digest(third.model) == digest(other.model)


def test_a_mirror_sends_what_has_another_length(proxy, bucket, tmp_path):
    """The object that was to be copied is shorter by now: the local file is sent."""
    job = Job()
    settings = dataclasses.replace(store_config(), mirror=Mirror(url=bucket.url()))
    with Checkpointer(tmp_path / "one", settings) as ckpt:
        for number in (1, 2):
            ckpt.save(number, job.state).result(timeout_s=30)
            wait_for_mirror(ckpt)
            if number == 1:
                key = frozen_key(bucket, 1)
                change(bucket, key, bucket.read(key)[:-100])
    assert sent(proxy) > 2 * WHOLE
    place = open_place(bucket.url(), StorageOptions(give_up_after_s=10))
    folder = place / frozen_key(bucket, 2).split("/")[1]
    (entry,) = [entry for entry in read_manifest(folder).files if entry.path == FROZEN]
    assert bucket.keys(f"run/{folder.name}/")[frozen_key(bucket, 2)] == entry.size_bytes
