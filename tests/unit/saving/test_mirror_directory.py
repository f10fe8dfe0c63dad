"""A directory as the mirror of another one: what differs from an object store in its place."""

import dataclasses
import errno
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from small_runs import steps, trained, uploads_of, wait_for_mirror

from kit.far import damage
from kit.limits import PATIENT
from kit.patience import wait_until
from safe_ckpt import CheckpointConfig, Checkpointer, Mirror, Retention
from safe_ckpt.core.formats.manifest import read_manifest
from safe_ckpt.errors import ConfigError, DirectoryInUseError, MirrorBehindError
from safe_ckpt.events import Fetched
from safe_ckpt.extensions.mirror import fetching, mirror
from safe_ckpt.extensions.mirror.mirror import MirrorUploads
from safe_ckpt.testing import inline_saves


@pytest.fixture(autouse=True)
def without_a_writer():
    with inline_saves():
        yield


def config(far, keep_last=None, **mirror):
    made = Mirror(url=str(far), **mirror)
    return CheckpointConfig(timeouts=PATIENT, mirror=made, retention=Retention(keep_last=keep_last))


def state(value):
    return {"model": {"w": torch.full((500,), float(value))}, "step": value}


def save(near, settings, *numbers):
    with Checkpointer(near, settings) as ckpt:
        for step in numbers:
            ckpt.save(step, state(step)).result(timeout_s=60)
            if settings is not None:
                wait_for_mirror(ckpt)


def resumed(near, settings=None, **more):
    target = state(-1)
    with Checkpointer(near, settings) as ckpt:
        ckpt.resume(target, **more)
    assert torch.equal(target["model"]["w"], state(target["step"])["model"]["w"])
    return target["step"]


def bytes_of(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name != "manifest.json"}


def test_the_copies_are_a_directory_of_checkpoints_like_any_other(tmp_path):
    """The same names and bytes; a run may go on there, with the optimizer and the generators, and save."""
    near, far = tmp_path / "near", tmp_path / "over" / "far"
    with Checkpointer(near, config(far, keep_last=2)) as ckpt:
        for step in (9, 10, 11):
            ckpt.save(step, trained()).result(timeout_s=60)
            wait_for_mirror(ckpt)
    assert steps(near) == ["step-00000010", "step-00000011"]
    assert steps(far) == ["step-00000009", "step-00000010", "step-00000011"]
    for name in steps(near):
        assert bytes_of(far / name) == bytes_of(near / name)
        assert read_manifest(far / name).files == read_manifest(near / name).files
    assert not (far / ".safe_ckpt").exists()  # given back
    expected, target = trained(), trained()
    torch.nn.init.zeros_(target["model"][0].weight)
    with Checkpointer(far) as ckpt:
        assert ckpt.resume(target).step == 11
        assert torch.equal(target["model"][0].weight, expected["model"][0].weight)
        ckpt.save(12, target).result(timeout_s=60)
    with Checkpointer(near, config(far)) as ckpt:
        assert ckpt.resume(target).step == 12


@pytest.mark.parametrize("wrong", [1, 3])
def test_a_file_that_is_read_wrongly_is_read_again(tmp_path, monkeypatch, wrong):
    """Twice: a network file system may answer wrongly once. What is wrong three times is damaged, and the older one serves."""
    near, far = tmp_path / "near", tmp_path / "far"
    save(near, config(far), 1, 2)
    shutil.rmtree(near)
    copy, left = fetching.copy_files, [wrong]

    def copy_files(copies, *more):
        done = copy(copies, *more)
        if left[0]:
            left[0] -= 1
            damage(Path(done[0].path))
            done[0] = type(done[0])(path=done[0].path, size_bytes=done[0].size_bytes, xxh3_128="0" * 32)
        return done

    monkeypatch.setattr(fetching, "copy_files", copy_files)
    assert resumed(near, config(far)) == (2 if wrong < 3 else 1)


@pytest.mark.parametrize("harm", ["gone", "short", "a link", "a folder"])
def test_what_is_no_file_of_the_checkpoint_there_is_passed_over(tmp_path, harm):
    """Missing, cut off, or something else in its place: the older copy serves, and nothing of the other comes here."""
    near, far = tmp_path / "near", tmp_path / "far"
    save(near, config(far), 1, 2)
    shutil.rmtree(near)
    file = far / "step-00000002" / "model.safetensors"
    data = file.read_bytes()
    file.unlink()
    if harm == "short":
        file.write_bytes(data[:-3])
    elif harm == "a link":
        (tmp_path / "other").write_bytes(data)
        file.symlink_to(tmp_path / "other")
    elif harm == "a folder":
        file.mkdir()
    assert resumed(near, config(far)) == 1
    assert steps(near) == ["step-00000001"]


def test_a_job_is_refused_the_mirror_that_another_one_holds(tmp_path):
    """Its saves go on without copies, and say whose it is."""
    near, far = tmp_path / "near", tmp_path / "far"
    with Checkpointer(tmp_path / "first", config(far)) as first:
        first.save(1, state(1)).result(timeout_s=60)
        wait_for_mirror(first)
        with Checkpointer(near, config(far)) as second:
            second.save(2, state(2)).result(timeout_s=60)
            wait_until(lambda: uploads_of(second).error is not None, 30, "the error of the upload")
            error = uploads_of(second).error
        assert isinstance(error, DirectoryInUseError)
        assert str(far) in str(error)
        assert steps(near) == ["step-00000002"]
    assert steps(far) == ["step-00000001"]


@pytest.mark.parametrize("here", [False, True])
def test_a_mirror_that_cannot_be_listed_is_no_empty_one(tmp_path, here, caplog):
    """With nothing near, whether this run is new is not known: an error. With a checkpoint near it goes on, with a warning."""
    near, far = tmp_path / "near", tmp_path / "far"
    if here:
        save(near, None, 1)
    far.write_text("no folder")
    with Checkpointer(near, config(far)) as ckpt:
        if here:
            assert ckpt.resume(state(0)).step == 1
            assert "the mirror is not looked at" in caplog.text
        else:
            with pytest.raises(OSError, match="Not a directory"):
                ckpt.resume(state(0))


@pytest.mark.parametrize(
    ("harm", "step", "said"),
    [
        ("near", 3, "cannot be used"),
        ("near and far", 2, "fetched by mirror, cannot be used"),
        ("near, and far gives no answer", 2, "the mirror is not looked at"),
        ("near twice", 3, "cannot be used"),
        ("near twice and far once", 2, "fetched by mirror, cannot be used"),
    ],
)
def test_a_sound_copy_comes_before_an_older_checkpoint_that_is_near(tmp_path, harm, step, said, caplog, monkeypatch):
    """What is damaged near is taken from far if it is sound there; only then the one before it, and nothing else is fetched."""
    near, far = tmp_path / "near", tmp_path / "far"
    save(near, config(far), 1, 2, 3)
    for number in (3, 2) if "twice" in harm else (3,):
        damage(near / f"step-{number:08d}" / "model.safetensors")
    if "and far" in harm and "answer" not in harm:
        damage(far / "step-00000003" / "model.safetensors")
    if "answer" in harm:
        looks = []

        def looked(self, home, found=MirrorUploads.candidates):
            looks.append(home)
            if len(looks) > 1:
                raise OSError(errno.ETIMEDOUT, "no answer")
            return found(self, home)

        monkeypatch.setattr(MirrorUploads, "candidates", looked)
    fetched = []
    with Checkpointer(
        near, config(far), hooks=[lambda e: fetched.append(e) if isinstance(e, Fetched) else None]
    ) as ckpt:
        target = state(-1)
        assert ckpt.resume(target).step == step
    assert torch.equal(target["model"]["w"], state(step)["model"]["w"])
    assert said in caplog.text
    assert len(fetched) == (1 if step == 3 or "twice" in harm else 0)
    assert resumed(near) == step


def test_one_can_wait_until_the_newest_is_far(tmp_path):
    """``wait(mirrored=True)`` comes back when each save, or a newer one, has its copy; without a mirror it is refused."""
    with Checkpointer(tmp_path / "near", config(tmp_path / "far")) as ckpt:
        ckpt.wait(mirrored=True)  # nothing was saved
        for step in (1, 2, 3):
            ckpt.save(step, state(step))
        ckpt.wait(mirrored=True)
        assert steps(tmp_path / "far")[-1] == "step-00000003"
    with Checkpointer(tmp_path / "alone") as ckpt, pytest.raises(ConfigError, match="no mirror to wait for"):
        ckpt.wait(mirrored=True)


def test_waiting_for_a_mirror_that_cannot_be_used_ends_with_its_error(tmp_path):
    """After ``lengthy_s``, with the newest that is not there; when it can be used again, the next call succeeds."""
    far, times = tmp_path / "far", dataclasses.replace(PATIENT, lengthy_s=1)
    far.write_text("no folder")
    with Checkpointer(tmp_path / "near", dataclasses.replace(config(far), timeouts=times)) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state(step)).result()
        with pytest.raises(MirrorBehindError, match="Not a directory") as caught:
            ckpt.wait(mirrored=True)
        assert (caught.value.behind, caught.value.path) == (2, str(tmp_path / "near" / "step-00000002"))
        far.unlink()
        ckpt.wait(mirrored=True)
        assert steps(far) == ["step-00000002"]


def test_a_wait_for_a_mirror_that_cannot_be_used_tries_ever_more_seldom(tmp_path, monkeypatch):
    """Each try that fails is a warning and an event: an hour of waiting brings some hundred of them, not thousands."""
    tries, clock = [], iter(range(10**6))
    monkeypatch.setattr(mirror, "time", SimpleNamespace(monotonic=lambda: float(next(clock)), sleep=lambda _: None))
    uploads = MirrorUploads(config(tmp_path / "far"), lambda _: None, "a test")
    uploads._behind = {tmp_path / "far": {1: "step-00000001"}}
    monkeypatch.setattr(uploads._background, "put", tries.append)
    with pytest.raises(MirrorBehindError, match="took longer than 3600 s"):
        uploads.await_copies(3600)
    uploads.drain(0)
    uploads.close()
    assert 10 < len(tries) < 200


@pytest.mark.parametrize("way", ["the same", "mirror in it", "it in the mirror", "through a parent"])
def test_directories_that_lie_in_each_other_are_refused(tmp_path, way):
    """The one would list, lock and sweep the other: ConfigError before anything is made."""
    near = tmp_path / "run"
    far = {"the same": near, "mirror in it": near / "far", "through a parent": tmp_path / "x" / ".." / "run"}
    place = far.get(way, tmp_path)
    with pytest.raises(ConfigError, match="lie in each other") as caught:
        Checkpointer(near, config(place))
    assert caught.value.key == "mirror.url"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("address", ["far", "./far", "s3:/bucket", "file:///x", "ftp://x/y", "/", "//", "~", ""])
def test_an_address_that_is_no_full_path_is_refused(address):
    """A mistyped address is no folder below the working directory."""
    with pytest.raises(ConfigError, match="full path of a directory") as caught:
        Mirror(url=address)
    assert caught.value.key.endswith("url")


def test_home_and_dots_mean_what_they_mean_in_a_shell(tmp_path, monkeypatch):
    """``~`` in a settings file; the place is fixed when the job begins."""
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / "settings.yaml"
    file.write_text("mirror: {url: ~/b/../far}\n")
    monkeypatch.chdir(tmp_path)
    with Checkpointer(tmp_path / "near", CheckpointConfig.from_yaml(file)) as ckpt:
        ckpt.save(1, state(1)).result(timeout_s=60)
        os.chdir("/")
        wait_for_mirror(ckpt)
    assert steps(tmp_path / "far") == ["step-00000001"]
