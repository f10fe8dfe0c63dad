"""What the user keeps in a checkpoint directory is kept when that is saved again."""

import errno
import os

import pytest

import safe_ckpt
from safe_ckpt.core.home import extra_files
from safe_ckpt.core.home.candidates import list_directories
from safe_ckpt.errors import DirectoryError, SourceChangedError


def test_links_and_empty_folders_are_kept(tmp_path):
    """Links to files and to directories, relative ones too, files in folders, and empty folders; with the modes of all."""
    old, staged, elsewhere = tmp_path / "old", tmp_path / "staged", tmp_path / "elsewhere"
    (old / "notes/deep").mkdir(parents=True)
    (old / "empty/within").mkdir(parents=True)
    staged.mkdir()
    elsewhere.mkdir()
    (elsewhere / "big").touch()
    (old / "notes/deep/a.txt").write_text("a")
    os.symlink(elsewhere, old / "data")
    os.symlink("../elsewhere", old / "notes/relative")
    os.symlink("nowhere", old / "dangling")
    modes = {"notes": 0o700, "notes/deep": 0o750, "empty": 0o2700, "empty/within": 0o500}
    for name, mode in modes.items():
        (old / name).chmod(mode)
    extra_files.keep_foreign(old, staged, lambda _: True)
    assert (staged / "notes/deep/a.txt").read_text() == "a"
    assert (staged / "empty/within").is_dir()
    assert [os.readlink(staged / name) for name in ("data", "notes/relative", "dangling")] == [
        str(elsewhere),
        "../elsewhere",
        "nowhere",
    ]
    assert {name: (staged / name).stat().st_mode & 0o7777 for name in modes} == modes
    assert os.listdir(elsewhere) == ["big"]
    assert extra_files.adopt(staged, {"notes/deep/a.txt"}) == []


def test_without_hard_links_what_is_copied_is_named(tmp_path, monkeypatch, caplog):
    """Once for each save: whoever has such a file open goes on writing to the old one."""

    def refused(*_, **__):
        raise OSError(errno.EPERM, "Operation not permitted")

    old, staged = tmp_path / "old", tmp_path / "staged"
    for folder in (old, staged):
        folder.mkdir()
    (old / "b.log").write_text("b")
    (old / "a.log").write_text("a")
    monkeypatch.setattr(os, "link", refused)
    extra_files.keep_foreign(old, staged, lambda _: True)
    assert (staged / "b.log").read_text() == "b"
    (said,) = [record.getMessage() for record in caplog.records]
    assert "no hard links here, so a.log, b.log was copied" in said


def test_a_folder_with_other_digits_is_no_step(tmp_path):
    """A name that looks like a number to Python and is none of ours keeps no job from starting."""
    for name in (
        "step-\u00b2\u00b2\u00b2\u00b2\u00b2\u00b2\u00b2\u00b2",
        "step-\u0663\u0663\u0663\u0663\u0663\u0663\u0663\u0663",
    ):
        (tmp_path / name).mkdir()
    assert list_directories(tmp_path) == []


@pytest.mark.timeout(60)
def test_a_pipe_in_a_folder_is_refused_and_not_waited_for(tmp_path):
    """A pipe that a program of the user's made in a folder that is published, or in one that hooks fill: named at once."""
    with pytest.raises(DirectoryError, match=r"deep/pipe: is no file \(a pipe"):  # noqa: SIM117 - the block has ended
        with safe_ckpt.publishing(tmp_path / "run", step=1) as folder:
            (folder / "deep").mkdir()
            (folder / "weights").write_text("w")
            os.mkfifo(folder / "deep/pipe")
    assert not (tmp_path / "run").exists()
    staged = tmp_path / "staged"
    staged.mkdir()
    os.mkfifo(staged / "pipe")
    with pytest.raises(OSError, match="is no file"):
        extra_files.adopt(staged, ())


@pytest.mark.parametrize(
    ("change", "what"), [("removed", "it was removed"), ("new", "was written"), ("changed", "was written")]
)
def test_a_folder_that_changes_between_its_hashing_and_the_commit_is_refused(tmp_path, change, what):
    """A file that vanishes is missed as well as one that is new or was written to."""
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(b"1")
    stamps = extra_files.stamps_in(tmp_path)
    extra_files.refuse_changed(tmp_path, stamps, name="step-1")
    if change == "removed":
        (tmp_path / "b").unlink()
    else:
        (tmp_path / ("c" if change == "new" else "b")).write_bytes(b"22")
    with pytest.raises(SourceChangedError, match=what):
        extra_files.refuse_changed(tmp_path, stamps, name="step-1")
