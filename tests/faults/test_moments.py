"""What a moment must not do: a file that cannot be seen or read for a while makes no checkpoint a damaged one."""

import errno
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from entries import ENTRIES, entered

from kit.ranks import spawn_ranks, values
from safe_ckpt import CheckpointConfig, Checkpointer, Timeouts
from safe_ckpt.core.formats.manifest import FileEntry
from safe_ckpt.core.home.candidates import looks_like_checkpoint
from safe_ckpt.core.home.file_home import FilePublication
from safe_ckpt.core.home.home import NewCheckpoint
from safe_ckpt.core.home.visibility import Patience
from safe_ckpt.core.storage import presence
from safe_ckpt.errors import NoValidCheckpointError, SafeCheckpointError, SaveError
from support import flip_bit, names_in, program_path

AWAY_S = 1.5
REFUSED = "resumes_or_is_refused"
PATIENT = CheckpointConfig(timeouts=Timeouts(lengthy_s=60, barrier_s=40, peer_stall_s=5, shutdown_s=10))
HASTY = CheckpointConfig(timeouts=Timeouts(lengthy_s=60, barrier_s=2, peer_stall_s=5, shutdown_s=10))


class Away:
    """Renames a file away, and back after a while: the way a server's cache shows and hides it."""

    def __init__(self, file, seconds=AWAY_S):
        self._file, self._aside = Path(file), Path(f"{file}.away")
        os.rename(self._file, self._aside)
        self._timer = threading.Timer(seconds, lambda: os.rename(self._aside, self._file))
        self._timer.start()

    def join(self):
        self._timer.join()


def saved(folder, count=2):
    with Checkpointer(folder, PATIENT) as ckpt:
        for step in range(1, count + 1):
            ckpt.save(step, {"a": step, "b": list(range(step))}).result(timeout_s=30)
    return folder / f"step-{count:08d}"


def in_quarantine(folder):
    return sorted(names_in(folder / ".safe_ckpt/quarantine"))


@pytest.mark.parametrize("name", ["manifest.json", "a.json"])
def test_a_file_that_is_away_for_a_moment_is_waited_for(tmp_path, name):
    """1.5 s without the manifest, or a payload: the newest is resumed from all the same, and nothing is set aside."""
    newest = saved(tmp_path)
    with Checkpointer(tmp_path, PATIENT) as ckpt:
        away = Away(newest / name)
        state = {"a": 0, "b": []}
        assert ckpt.resume(state).step == 2
        assert state == {"a": 2, "b": [0, 1]}
        away.join()
    assert in_quarantine(tmp_path) == []


@pytest.mark.parametrize("name", ENTRIES)
def test_every_way_of_resuming_waits_for_a_manifest(tmp_path, name):
    """Also where what has no manifest may be another tool's: one with a higher number than ours is waited for."""
    with entered(name, tmp_path, PATIENT) as entry:
        for number in (1, 2):
            entry.save(number).result(timeout_s=30)
        away = Away(entry.path(2) / "manifest.json")
        assert entry.load() == 2
        away.join()


def _resume_while_away(rank, folder):
    with Checkpointer(folder, PATIENT) as ckpt:
        away = Away(Path(folder, "step-00000002/b.json")) if rank == 1 else None
        found = ckpt.resume({"a": 0, "b": []}).step
        if away is not None:
            away.join()
        return found


def test_ranks_wait_together_for_a_file_that_is_away(tmp_path):
    """The file goes when rank 1 calls, whoever looks first: both ranks resume from the newest."""
    saved(tmp_path)
    assert values(spawn_ranks(_resume_while_away, 2, str(tmp_path), timeout_s=90)) == [2, 2]
    assert in_quarantine(tmp_path) == []


@pytest.mark.parametrize("name", ["manifest.json", "a.json"])
def test_a_checkpoint_whose_file_stays_missing_is_passed_over_and_kept(tmp_path, caplog, name):
    """After the bounded time: the older one, a warning that names the file, no quarantine; back again, it is the newest."""
    newest = saved(tmp_path)
    os.rename(newest / name, tmp_path / "kept")
    with Checkpointer(tmp_path, HASTY) as ckpt:
        assert ckpt.resume({"a": 0, "b": []}).step == 1
    said = [record.getMessage() for record in caplog.records if "is passed over" in record.getMessage()]
    assert len(said) == 1
    assert name in said[0]
    assert "damaged" not in said[0]
    assert in_quarantine(tmp_path) == []
    os.rename(tmp_path / "kept", newest / name)
    with Checkpointer(tmp_path, HASTY) as ckpt:
        assert ckpt.resume({"a": 0, "b": []}).step == 2


def test_a_directory_of_incomplete_checkpoints_alone_is_no_fresh_start(tmp_path):
    """The only checkpoint lost its manifest: an error that names the file; nothing is started afresh over it."""
    os.unlink(saved(tmp_path, 1) / "manifest.json")
    with (
        Checkpointer(tmp_path, HASTY) as ckpt,
        pytest.raises(NoValidCheckpointError, match=r"manifest\.json is missing"),
    ):
        ckpt.resume({"a": 0})


def traced(program, folder, syscalls, result, name):
    """Run a program under strace, which gives these system calls on one file another result."""
    command = ["strace", "-f", "-qq", "-o", "/dev/null", "-P", str(name), "-e", f"trace={syscalls}"]
    command += ["-e", f"inject={syscalls}:{result}", sys.executable, str(program_path(program)), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    return done.stdout.split(), done.stderr


@pytest.mark.parametrize(
    ("name", "syscalls", "error"),
    [
        pytest.param("manifest.json", "openat", "EIO", marks=pytest.mark.thorough),
        ("manifest.json", "newfstatat", "ESTALE"),
        ("a.json", "openat", "EACCES"),
    ],
)
def test_a_file_that_cannot_be_read_is_an_error_and_not_damage(tmp_path, name, syscalls, error):
    """EIO, ESTALE and EACCES of one file: that error with its path, nothing set aside, no older one resumed from instead."""
    exp = tmp_path / "exp"
    newest = saved(exp)
    said, stderr = traced(REFUSED, exp, syscalls, f"error={error}", newest / name)
    assert said == ["refused", str(getattr(errno, error)), str(newest / name)], stderr
    assert in_quarantine(exp) == []


def test_a_name_that_is_listed_and_cannot_be_opened_is_an_error(tmp_path):
    """ENOENT of a file that its directory names: a client's cache is stale. Nothing is treated as corrupt."""
    exp = tmp_path / "exp"
    newest = saved(exp)
    said, stderr = traced(REFUSED, exp, "openat,newfstatat,lstat,stat,statx", "error=ENOENT", newest / "manifest.json")
    assert said[:2] == ["refused", "116"], stderr  # ESTALE
    assert in_quarantine(exp) == []


def test_reads_that_end_early_are_no_damage(tmp_path):
    """Reads that return nothing in the middle of a file: an error that says so, not a checkpoint of other bytes."""
    exp = tmp_path / "exp"
    newest = saved(exp)
    for name in ("manifest.json", "a.json"):
        said, stderr = traced(REFUSED, exp, "read,pread64,preadv,preadv2", "retval=0", newest / name)
        assert said[:2] == ["refused", "5"], stderr
    assert in_quarantine(exp) == []


def test_a_manifest_that_differs_once_is_read_once_more(tmp_path, monkeypatch):
    """Only what differs twice is damage, while candidates are listed too."""
    from safe_ckpt.core.home import candidates as catalog

    newest = saved(tmp_path)
    flip_bit(newest / "manifest.json", 60)
    dropped = []

    def mended(path):
        dropped.append(path)
        flip_bit(newest / "manifest.json", 60)

    monkeypatch.setattr(catalog, "drop_cache", mended)
    with Checkpointer(tmp_path, HASTY) as ckpt:
        assert ckpt.resume({"a": 0, "b": []}).step == 2
    assert dropped[0] == newest / "manifest.json"
    assert in_quarantine(tmp_path) == []


def test_setting_up_to_resume_a_folder_that_cannot_be_listed_is_an_error(tmp_path):
    """``mode="resume"`` where a folder cannot be listed: that error, not "there is no checkpoint"."""
    exp = tmp_path / "exp"
    newest = saved(exp, 1)
    for syscalls in ("newfstatat", "openat"):
        said, stderr = traced("sets_up_to_resume", exp, syscalls, "error=EIO", newest / "manifest.json")
        assert said == ["DirectoryError", "5"], stderr


def test_archive_ends_are_told_as_zipfile_tells_them(tmp_path):
    """Whole, cut off, with a comment, none at all; and what cannot be read raises."""
    import zipfile

    whole = tmp_path / "a.zip"
    with zipfile.ZipFile(whole, "w") as archive:
        archive.writestr("x", b"1" * 100_000)
        archive.comment = b"c" * 60_000
    (tmp_path / "cut").write_bytes(whole.read_bytes()[:-70_000])
    (tmp_path / "none").write_bytes(b"")
    for name in ("a.zip", "cut", "none"):
        assert presence.ends_as_archive(tmp_path / name) == zipfile.is_zipfile(tmp_path / name)
    with pytest.raises(OSError, match="directory"):
        presence.ends_as_archive(tmp_path)


def test_a_link_to_nowhere_is_not_there(tmp_path):
    """A dangling link, a circle, and what a listing does not name are absent; a folder that is a file has nothing in it."""
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    (tmp_path / "file").touch()
    for name in ("nowhere", "circle", "none", "file/below", "none/below"):
        assert not presence.is_there(tmp_path / name)
        assert presence.is_gone(tmp_path / name), name
    assert presence.is_there(tmp_path / "file")
    assert not looks_like_checkpoint(tmp_path)


def test_the_commit_waits_for_what_another_rank_wrote(tmp_path):
    """A file that shows late, or with an old size, gets the size it should have; one that never comes is told in time."""
    file = tmp_path / "f"
    late = threading.Timer(0.3, lambda: file.write_bytes(b"12345"))
    late.start()
    patience = Patience(Timeouts(barrier_s=20))
    assert patience.until_sized(file, 5, lambda: None) == 5
    late.join()
    grown = threading.Timer(0.3, lambda: file.write_bytes(b"1234567"))
    grown.start()
    assert patience.until_sized(file, 7, lambda: None) == 7
    grown.join()
    begun = time.monotonic()
    assert Patience(Timeouts(barrier_s=1)).until_sized(tmp_path / "g", 1, lambda: None) == -1
    assert time.monotonic() - begun < 10

    def given_up():
        raise SafeCheckpointError

    with pytest.raises(SafeCheckpointError):
        patience.until_sized(file, 1, given_up)


def test_a_commit_names_the_file_that_never_shows_and_its_rank(tmp_path):
    """Of two files of rank 1 one comes late, one never: the error names the second, its rank and what was seen."""
    config = CheckpointConfig(timeouts=Timeouts(barrier_s=2))
    held = SimpleNamespace(confirm=lambda: None)
    held.pending = tmp_path
    new = NewCheckpoint(path=tmp_path / "c", manifest=SimpleNamespace(op_id="o"), kind="file")
    publication = FilePublication(new, held, tmp_path / "c", config.timeouts)
    publication.folder.mkdir()

    def check(entries):
        publication._check_written(entries, lambda: None)

    entries = tuple(FileEntry(path=name, size_bytes=3, xxh3_128="0" * 32, rank=1) for name in ("late", "never"))
    timer = threading.Timer(0.2, lambda: (publication.folder / "late").write_bytes(b"123"))
    timer.start()
    with pytest.raises(SaveError, match="never, written by rank 1 with 3 bytes, is not there") as caught:
        check(entries)
    timer.join()
    assert (caught.value.rank, caught.value.phase) == (1, "commit")
    check(entries[:1])
    with pytest.raises(SaveError, match="has 3 bytes here"):
        check((FileEntry(path="late", size_bytes=4, xxh3_128="0" * 32, rank=1),))
