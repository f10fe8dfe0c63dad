"""The mirror behind a ``Checkpointer``: what is uploaded, kept and deleted, and what a resume makes of it."""

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid

import pytest
import torch
from small_runs import uploads_of, wait_for_mirror

from kit.far import FarDirectory, damage, listed
from kit.fault_proxy import FaultProxy
from kit.inside import home_of
from kit.patience import scaled, wait_until
from safe_ckpt import CheckpointConfig, Checkpointer, Mirror, Retention, StorageConfig, Timeouts, events
from safe_ckpt.core.formats.manifest import CheckpointInfo, read_manifest
from safe_ckpt.core.home.candidates import WEIGHTS
from safe_ckpt.core.home.file_home import FileHome
from safe_ckpt.core.storage.objects import bucket as buckets
from safe_ckpt.core.writer.inline import inline
from safe_ckpt.errors import CheckpointNotFoundError, DirectoryError
from safe_ckpt.extensions.mirror.mirror import MirrorUploads as Uploads
from support import flip_bit, program_path

TIMES = Timeouts(lengthy_s=60, barrier_s=6, shutdown_s=10, peer_stall_s=5)


class InMemory:
    """A bucket in this process, as far as tests ask for more than its address."""

    def __init__(self):
        self._url = f"s3://{uuid.uuid4().hex}"

    def url(self):
        return self._url


@pytest.fixture(params=["memory", "directory", pytest.param("server", marks=pytest.mark.server)])
def store(request, monkeypatch, tmp_path_factory):
    """In this process, which writes there without a writer, in a directory, and in one that a server has."""
    if request.param == "server":
        yield request.getfixturevalue("bucket")
        return
    if request.param == "directory":
        with inline():
            yield FarDirectory(tmp_path_factory.mktemp("far") / "run")
        return
    memory = pytest.importorskip("obstore.store").MemoryStore()
    monkeypatch.setattr(buckets, "connect", lambda *_: memory)
    with inline():
        yield InMemory()


def config(bucket, keep_last=None, **mirror):
    return CheckpointConfig(
        timeouts=TIMES,
        retention=Retention(keep_last=keep_last),
        mirror=Mirror(url=bucket.url(), **mirror),
        storage=StorageConfig(request_timeout_s=2),
    )


def there(bucket):
    return sorted(one.manifest.step for one in listed(bucket) if one.manifest is not None)


def state(value):
    return {"model": {"w": torch.full((1 << 16,), float(value))}, "step": value}


def run(folder, settings, steps, hooks=()):
    with Checkpointer(folder, settings, hooks=hooks) as ckpt:
        for step in steps:
            ckpt.save(step, state(step)).result()
            wait_for_mirror(ckpt)


def resumed(folder, settings, **more):
    target = state(-1)
    with Checkpointer(folder, settings) as ckpt:
        info = ckpt.resume(target, **more)
    assert info is not None
    assert torch.equal(target["model"]["w"], state(target["step"])["model"]["w"])
    return target["step"]


def test_each_tier_has_its_own_retention(tmp_path, store):
    """The newest, and every tenth step, stay in the mirror; the directory keeps what it is told."""
    run(tmp_path, config(store, keep_last=1, keep_every_steps=10), [9, 10, 11, 12])
    assert (there(store), steps(tmp_path)) == ([10, 12], [12])


def test_a_metric_that_none_has_keeps_all_in_both_places(tmp_path, store):
    """Also where the mirror has rules of its own: it chooses the best by the same metric."""
    rules = Retention(keep_last=1, keep_best=1, metric="los")
    run(tmp_path, dataclasses.replace(config(store, keep_last=1), retention=rules), [1, 2, 3])
    assert (there(store), steps(tmp_path)) == ([1, 2, 3], [1, 2, 3])


def steps(folder):
    return sorted(int(path.name[5:]) for path in folder.glob("step-*"))


def test_follow_deletes_in_both_places(tmp_path, store):
    """What retention deletes in the directory goes in the mirror, also what waited for its upload."""
    run(tmp_path, config(store, keep_last=2, follow=True, required=True), [1, 2, 3, 4])
    assert (there(store), steps(tmp_path)) == ([3, 4], [3, 4])


def test_a_lost_disk_is_made_up_for(tmp_path, store):
    """An empty directory, a damaged newest, and a step that is asked for: each comes from the mirror."""
    settings = config(store)
    run(tmp_path / "a", settings, [1, 2, 3])
    shutil.rmtree(tmp_path / "a")
    assert resumed(tmp_path / "a", settings) == 3
    assert steps(tmp_path / "a") == [3]
    flip_bit(tmp_path / "a/step-00000003/model.safetensors", 5000)
    assert resumed(tmp_path / "a", settings) == 3
    assert len(list((tmp_path / "a/.safe_ckpt/quarantine").iterdir())) == 1
    assert resumed(tmp_path / "a", settings, step=1) == 1
    with pytest.raises(CheckpointNotFoundError):
        resumed(tmp_path / "a", settings, step=7)


@pytest.mark.parametrize("damaged", [(3,), (3, 2)])
def test_a_damaged_checkpoint_is_fetched_before_an_older_one_is_taken(tmp_path, store, damaged):
    """Older ones are sound here, and the newest is sound in the mirror: the run goes on from the newest."""
    settings = config(store)
    run(tmp_path / "a", settings, [1, 2, 3])
    for step in damaged:
        flip_bit(tmp_path / f"a/step-0000000{step}/model.safetensors", 5000)
    assert resumed(tmp_path / "a", settings) == 3
    assert [path.name for path in (tmp_path / "a/.safe_ckpt/quarantine").iterdir()] == ["step-00000003"]


def test_an_older_one_here_is_taken_before_what_is_older_still_in_the_mirror(tmp_path, store):
    """The newest is damaged and has no copy: the next one here serves, and nothing is fetched."""
    settings = config(store)
    run(tmp_path / "a", settings, [1])
    with Checkpointer(tmp_path / "a", CheckpointConfig(timeouts=TIMES)) as ckpt:
        for step in (2, 3):
            ckpt.save(step, state(step)).result()
    flip_bit(tmp_path / "a/step-00000003/model.safetensors", 5000)
    assert resumed(tmp_path / "a", settings) == 2


def test_a_damaged_copy_is_passed_over(tmp_path, store):
    """Bytes that differ in the mirror are found while they are fetched; the one before it is taken."""
    settings = config(store)
    run(tmp_path / "a", settings, [1, 2])
    (newest,) = [one.path for one in listed(store) if one.manifest.step == 2]
    damage(newest / "model.safetensors")
    shutil.rmtree(tmp_path / "a")
    assert resumed(tmp_path / "a", settings) == 1


def test_a_checkpoint_damaged_on_the_disk_is_not_mirrored(tmp_path, store):
    """The bytes are compared on the way, and the event has the reason."""
    seen = []
    with Checkpointer(tmp_path, CheckpointConfig(timeouts=TIMES)) as ckpt:
        ckpt.save(1, state(1)).result()
    flip_bit(tmp_path / "step-00000001/model.safetensors", 5000)
    with Checkpointer(tmp_path, config(store), hooks=[seen.append]) as ckpt:
        mirror = uploads_of(ckpt)
        (one,) = [c.info for c in home_of(ckpt).look()]
        mirror.put(one, home_of(ckpt))
        wait_for_mirror(ckpt)
    (event,) = [event for event in seen if isinstance(event, events.Mirrored)]
    assert "its bytes are not those" in event.error
    assert there(store) == []


def test_a_mirror_that_does_not_answer_fails_no_save(tmp_path, object_server, bucket, monkeypatch):
    """Saves go on; what was missed is uploaded by the next job that resumes. An empty disk without an answer is an error."""
    with FaultProxy(object_server.endpoint) as proxy:
        through(bucket, monkeypatch, proxy.endpoint)
        settings = config(bucket)
        proxy.down = True
        seen = []
        quick = CheckpointConfig(
            timeouts=Timeouts(lengthy_s=2, barrier_s=4, shutdown_s=2, peer_stall_s=1),
            mirror=settings.mirror,
            storage=StorageConfig(request_timeout_s=1, cache_dir=str(tmp_path)),
        )
        with Checkpointer(tmp_path / "a", quick, hooks=[seen.append]) as ckpt:
            ckpt.save(1, state(1)).result()
            ckpt.save(2, state(2)).result()
        tries = [event.error for event in seen if isinstance(event, events.Mirrored)]
        assert tries  # of each save, or of the newest alone, and once more at the end
        assert all(tries)
        assert steps(tmp_path / "a") == [1, 2]
        with pytest.raises(DirectoryError, match="could not"), Checkpointer(tmp_path / "empty", quick) as ckpt:
            ckpt.resume(state(0))
        proxy.down = False
        assert resumed(tmp_path / "a", settings) == 2
        assert there(bucket) == [2]


def test_a_save_after_sigterm_is_in_the_mirror_at_the_end(tmp_path, bucket):
    """The save after a SIGTERM is in the mirror when the job has ended."""
    command = [sys.executable, program_path("saves_at_a_signal"), str(tmp_path / "a"), bucket.url()]
    job = subprocess.Popen(command, stdout=subprocess.PIPE, env=dict(os.environ))
    assert job.stdout.readline() == b"ready\n"
    job.send_signal(signal.SIGTERM)
    assert job.wait(40) == 0
    job.stdout.close()
    assert len(there(bucket)) == 1


def keeping_one(bucket):
    """In the mirror; here all stay."""
    return dataclasses.replace(config(bucket), mirror=Mirror(url=bucket.url(), keep_last=1))


def test_directories_do_not_mix(tmp_path, store):
    """Two directories with one last name: each has its own retention, and a resume of one never gets the other's."""
    settings = keeping_one(store)
    workspaces, seen = {}, []
    for folder in ("a", "b/ckpt", "c/ckpt"):
        workspaces[folder] = FileHome(tmp_path / folder, lease_s=60)
    mirror = Uploads(settings, seen.append, "a test")
    roots = {str(mirror.root_of(home)) for home in workspaces.values()}
    assert len(roots) == 3
    other = Uploads(settings, seen.append, "a test")  # another machine, the same layout
    there = [FileHome(tmp_path / "another" / "machine" / folder, lease_s=60) for folder in workspaces]
    assert {str(other.root_of(home)) for home in there} == roots
    for one in (mirror, other):
        one.drain()
        one.close()


def test_an_upload_that_failed_is_made_up_for_at_the_end(tmp_path, bucket, monkeypatch):
    """The store was away after the save and is back before the end: the newest is there then."""
    seen = []
    with FaultProxy(bucket.endpoint) as proxy:
        through(bucket, monkeypatch, proxy.endpoint)
        proxy.down = True
        settings = dataclasses.replace(config(bucket), timeouts=dataclasses.replace(TIMES, lengthy_s=1, barrier_s=2))
        with Checkpointer(tmp_path / "run", settings, hooks=[seen.append]) as ckpt:
            ckpt.save(1, state(1)).result()
            wait_until(lambda: any(isinstance(event, events.Mirrored) and event.error for event in seen), 60)
            proxy.down = False
        assert there(bucket) == [1]
        assert [event.error == "" for event in seen if isinstance(event, events.Mirrored)] == [False, True]


def test_saves_of_a_host_whose_clock_is_behind_are_the_newest_in_the_mirror(tmp_path, bucket, monkeypatch):
    """A new run on a host whose clock is an hour behind: what it saves counts as newer than what the mirror had."""
    settings = keeping_one(bucket)
    run(tmp_path / "a", settings, [1, 2])
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() - 3600)
    run(tmp_path / "b", settings, [3, 4])
    monkeypatch.setattr(time, "time", now)
    assert there(bucket) == [4]
    assert resumed(tmp_path / "c", settings) == 4
    assert resumed(tmp_path / "b", settings) == 4


def test_a_store_that_is_away_does_not_hold_up_the_end(tmp_path, bucket, monkeypatch):
    """Every request gets no answer: the job ends soon, no thread of the mirror is left, and nothing is owned later on."""
    with FaultProxy(bucket.endpoint) as proxy:
        through(bucket, monkeypatch, proxy.endpoint)
        proxy.down = True
        settings = dataclasses.replace(config(bucket), timeouts=dataclasses.replace(TIMES, lengthy_s=600, shutdown_s=1))
        before = threads_of_ours()
        ckpt = Checkpointer(tmp_path / "run", settings)
        ckpt.save(1, state(1)).result()
        begun = time.monotonic()
        ckpt.close()
        assert time.monotonic() - begun < scaled(20)
        wait_until(lambda: not threads_of_ours() - before, 20, "the end of the mirror's threads")
        proxy.down = False
    through(bucket, monkeypatch)
    assert there(bucket) == []


def through(bucket, monkeypatch, endpoint=None):
    """Have the environment lead to the bucket, perhaps by another address."""
    for name, value in bucket.environment(endpoint).items():
        monkeypatch.setenv(name, value)


def threads_of_ours():
    return {one for one in threading.enumerate() if one.name in ("safe_ckpt-mirror", "safe_ckpt-lease")}


def test_weights_saved_alone_do_not_count_for_the_mirrors_retention(tmp_path, store):
    """With ``keep_last=1`` the last checkpoint to resume from stays beside weights that were saved after it."""
    settings = keeping_one(store)
    with Checkpointer(tmp_path / "run", settings) as ckpt:
        ckpt.save(1, state(1)).result()
        wait_for_mirror(ckpt)
        mirror, home = uploads_of(ckpt), home_of(ckpt)
        folder = tmp_path / "run" / "final"
        shutil.copytree(tmp_path / "run/step-00000001", folder)
        manifest = read_manifest(folder)
        notes = {**manifest.notes, "adapter": WEIGHTS}
        manifest = dataclasses.replace(
            manifest, name="final", op_id="0" * 32, sequence=manifest.sequence + 1, notes=notes
        )
        (folder / "manifest.json").write_bytes(manifest.to_bytes())
        mirror.put(CheckpointInfo.of(manifest, folder, 1), home)
        wait_for_mirror(ckpt)
    assert sorted(one.manifest.name for one in listed(store)) == ["final", "step-00000001"]


def test_with_follow_every_kept_checkpoint_is_in_the_mirror_at_the_end(tmp_path, bucket, monkeypatch):
    """With ``follow`` nothing is passed over: what local retention keeps is in the mirror at the end."""
    settings = dataclasses.replace(config(bucket, follow=True, required=True), retention=Retention(keep_last=3))
    with FaultProxy(bucket.endpoint) as proxy:
        through(bucket, monkeypatch, proxy.endpoint)
        proxy.slow_s = 0.1
        with Checkpointer(tmp_path / "run", settings) as ckpt:
            for step in range(1, 6):
                ckpt.save(step, state(step)).result()
        proxy.slow_s = 0.0
    through(bucket, monkeypatch)
    assert there(bucket) == steps(tmp_path / "run") == [3, 4, 5]
