"""What a listing has and tells, and which checkpoint of another tool is newer than the one of ours that a resume takes."""

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest

from kit.limits import QUICK
from kit.patience import scaled
from safe_ckpt import Checkpointer
from safe_ckpt.adapters.one_shot import save_archive
from safe_ckpt.core.formats.manifest import FileEntry, Manifest
from safe_ckpt.core.home.candidates import list_directories, list_files, stamp_of
from safe_ckpt.core.home.home import Candidate
from safe_ckpt.core.home.standing import passed_over, standing_of
from safe_ckpt.core.home.visibility import await_visible, list_patiently


def ours(path, step, sequence=1):
    facts = {"name": path.name, "sequence": sequence, "step": step, "op_id": "x", "world_size": 1, "metrics": {}}
    return Candidate(path=path, manifest=Manifest(**facts), stamp=stamp_of(path))


def stock(path, step=-1, problem=""):
    return Candidate(path=path, foreign=True, step=step, problem=problem)


def named(taken, *others):
    """The name of what is passed over; None for nothing."""
    order = standing_of([taken, *others]).order
    found = passed_over(order, taken)
    return None if found is None else found[0].name


def test_the_newest_by_step_is_named():
    """The step decides, or the number in the name. Of several the highest is named."""
    taken = ours(Path("run/epoch=2-step=66.ckpt"), 66)
    later = [stock(Path(f"run/{name}.ckpt"), step) for name, step in (("a", 88), ("last", 132), ("b", 110))]
    assert named(taken, *later) == "last.ckpt"
    assert named(ours(Path("run/checkpoint_3"), 400), stock(Path("run/checkpoint_7"), 7)) is None
    numbered = Candidate(path=Path("run/checkpoint_3"), manifest=ours(Path("run/checkpoint_3"), 400).manifest, step=3)
    assert named(numbered, stock(Path("run/checkpoint_7"), 7)) == "checkpoint_7"


@pytest.mark.parametrize(
    ("why", "other"),
    [
        ("the same step under a name of its own", stock(Path("run/epoch=2-step=66-v1.ckpt"), 66)),
        ("older", stock(Path("run/epoch=1-step=44.ckpt"), 44)),
        ("not whole, or being written", stock(Path("run/epoch=5-step=132.ckpt"), 132, "is no checkpoint")),
        ("of another run, in a folder below", stock(Path("run/version_1/epoch=5-step=132.ckpt"), 132)),
        ("of another tool that counts in its own way", stock(Path("run/checkpoint-132"), 132)),
        ("a copy of ours", ours(Path("run/last.ckpt"), 132, sequence=0)),
        ("of an unknown step", stock(Path("run/gone.ckpt"))),
    ],
)
def test_what_is_not_newer_is_not_named(why, other):
    """No word of what is no newer, no checkpoint to go on from, or none of this run."""
    assert named(ours(Path("run/epoch=2-step=66.ckpt"), 66), other) is None, why


def test_nothing_is_said_where_another_tools_is_taken():
    """They come in the order of their steps: nothing newer is passed over."""
    first, second = stock(Path("run/checkpoint-4"), 4), stock(Path("run/checkpoint-6"), 6)
    assert passed_over(standing_of([first, second]).order, first) is None


def test_what_was_deleted_since_it_was_listed_can_be_told_of(tmp_path):
    """A listing holds its size by the manifest: nothing is asked of a directory that a job has deleted meanwhile."""
    one = ours(tmp_path / "step-1", 1)
    files = tuple(
        FileEntry(path=name, size_bytes=size, xxh3_128="0" * 32, rank=0) for name, size in (("a", 3), ("b", 4))
    )
    one = replace(one, manifest=replace(one.manifest, files=files))
    assert (one.summary.name, one.summary.size_bytes) == ("step-1", 7)


def test_a_step_whose_manifest_is_not_seen_yet_is_listed_again(tmp_path):
    """The cache of a network file system shows a folder before what is in it: what another host has committed counts."""
    with Checkpointer(tmp_path) as ckpt:
        manifest = ckpt.save(1, {"x": 1}).result(timeout_s=30).path / "manifest.json"
    data, found = manifest.read_bytes(), []
    manifest.unlink()

    def look():
        found.append(list_directories(tmp_path))
        manifest.write_bytes(data)
        return found[-1]

    (whole,) = list_patiently(look, QUICK)
    ((lacking,), _) = found
    assert (lacking.missing, lacking.problem) == (manifest, "manifest.json is missing")
    assert (whole.missing, whole.problem, whole.manifest.step) == (None, "", 1)


def test_a_wait_for_a_file_has_a_network_file_system_look_again(tmp_path, monkeypatch):
    """Its cache is as old as the last listing: the folder is listed, and the one that the folder lies in."""
    file, real, asked = tmp_path / "folder/file", os.listdir, set()

    def listing(folder):
        asked.add(Path(folder))
        if asked >= {file.parent, tmp_path} and not file.exists():
            file.parent.mkdir()
            file.touch()
        return real(folder)

    monkeypatch.setattr(os, "listdir", listing)
    assert await_visible(file, scaled(10))


def test_checkpoints_with_an_ending_are_files_and_directories_and_nothing_else(tmp_path):
    """A directory with a manifest and a file are listed, a pipe, a link and a folder without a manifest are not."""
    save_archive({"x": 1}, tmp_path / "file.ckpt", sequence=1)
    with Checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(1, {"x": 1}).result(timeout_s=30)
    (tmp_path / "run/step-00000001").rename(tmp_path / "directory.ckpt")
    (tmp_path / "folder.ckpt").mkdir()
    os.mkfifo(tmp_path / "pipe.ckpt")
    (tmp_path / "link.ckpt").symlink_to("file.ckpt")
    found = list_files(tmp_path, ".ckpt")
    assert sorted((one.path.name, one.foreign) for one in found) == [("directory.ckpt", False), ("file.ckpt", False)]


@pytest.mark.parametrize("where", ["below", "top"])
@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.ENOENT, errno.EIO, errno.ESTALE])
def test_a_folder_that_may_not_be_listed_is_skipped_with_a_warning(tmp_path, monkeypatch, caplog, where, number):
    """Below the directory, where it denies it; one that has gone without a word. An error of the disk is raised, and so is
    each one of the directory itself: what is seen must not be taken for all.
    """
    run = tmp_path / "run"
    for folder in (run, run / "other", run / "third"):
        folder.mkdir()
        save_archive({"x": 1}, folder / "file.ckpt", sequence=1)
    scandir, broken = os.scandir, os.fspath(run if where == "top" else run / "other")

    def deny(folder):
        if os.fspath(folder) == broken:
            raise OSError(number, os.strerror(number), broken)
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", deny)
    denied, gone = number in (errno.EACCES, errno.EPERM), number == errno.ENOENT
    if where == "top" or not (denied or gone):
        with pytest.raises(OSError, match=os.strerror(number)):
            list_files(run, ".ckpt")
        return
    assert [one.path for one in list_files(run, ".ckpt")] == [run / "file.ckpt", run / "third/file.ckpt"]
    assert caplog.text.count(f"{broken} is passed over, with all that may be in it") == denied
