"""F1: eight real ranks set up one directory."""

import ctypes
import os
import subprocess
import time

import pytest
import torch
import torch.distributed as dist

from kit.ranks import spawn_ranks, values
from safe_ckpt import set_up_directory
from safe_ckpt.errors import (
    ConfigError,
    DesyncError,
    DirectoryError,
    DirectoryInUseError,
    DirectoryNotSharedError,
    NoValidCheckpointError,
    RendezvousTimeout,
)
from support import needs_root


def _overwrite_again_and_again(rank, path):
    for attempt in range(50):
        if rank == 0:
            os.makedirs(path / "old" / "deeper", exist_ok=True)
            (path / "old" / "deeper" / "file").write_text("x")
            (path / "stale.ckpt").write_text("x")
        dist.barrier()
        if rank % 3 == attempt % 3:
            time.sleep(0.002)  # skew: the ranks come at different moments
        set_up_directory(path, mode="overwrite", timeout_s=60)
        (path / f"mine-{rank}").write_text(str(attempt))
        dist.barrier()
        assert sorted(os.listdir(path)) == [f"mine-{r}" for r in range(8)]
        dist.barrier()


def test_fifty_overwrites_by_eight_ranks(tmp_path):
    """F1: 50 attempts on a populated directory, with skew: no error on any rank, and what a rank writes afterwards stays."""
    values(spawn_ranks(_overwrite_again_and_again, 8, tmp_path / "exp", timeout_s=100))


def _every_mode(rank, path):
    found = []
    for mode in ("resume", "fresh", "overwrite"):
        try:
            set_up_directory(path, mode=mode, timeout_s=30)
            found.append(None)
        except Exception as error:
            found.append(error)
    return found


def _as_nobody(rank, path):
    os.setuid(65534)
    begun = time.monotonic()
    try:
        set_up_directory(path / "exp", mode="fresh", timeout_s=30)
    except Exception as error:
        return error, time.monotonic() - begun
    return None, 0.0


def test_a_file_in_the_way_raises_the_same_error_everywhere(tmp_path):
    """A parent that is a file: the same typed error, naming path and rank 0, on all eight ranks."""
    (tmp_path / "file").write_text("x")
    outcomes = values(spawn_ranks(_every_mode, 8, tmp_path / "file" / "exp"))
    for resumed, fresh, overwritten in outcomes:
        assert isinstance(resumed, NoValidCheckpointError)
        for error in (fresh, overwritten):
            assert isinstance(error, DirectoryError)
            assert error.rank == 0
            assert str(tmp_path / "file") in str(error)
    assert len({str(outcome) for outcome in outcomes}) == 1


@needs_root
def test_missing_permission_raises_the_same_error_everywhere(tmp_path_factory):
    """Permission denied on rank 0: the same typed error with path and rank on all eight ranks, within five seconds."""
    path = tmp_path_factory.mktemp("locked")
    outcomes = values(spawn_ranks(_as_nobody, 8, path))
    for error, seconds in outcomes:
        assert isinstance(error, DirectoryError)
        assert error.errno == 13
        assert error.rank == 0
        assert str(path) in str(error)
        assert seconds < 5


def test_resume_mode_without_a_checkpoint_raises_on_every_rank(tmp_path):
    """Missing, empty, or holding nothing but a half-written file: resume raises on every rank and changes nothing."""
    cases = {
        "missing": None,
        "empty": [],
        "hidden": [".safe_ckpt/pending/x"],
        "half": ["epoch=0.ckpt"],
        "text": ["notes.txt"],
    }
    for name, files in cases.items():
        if files is not None:
            (tmp_path / name).mkdir()
            for file in files:
                (tmp_path / name / file).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / name / file).write_bytes(b"PK\3\4 cut off")
    before = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))
    for results in values(spawn_ranks(_resume_each, 3, tmp_path, list(cases))):
        assert results == ["NoValidCheckpointError"] * len(cases)
    assert sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*")) == before


def _resume_each(rank, path, names):
    found = []
    for name in names:
        try:
            set_up_directory(path / name, mode="resume", timeout_s=30)
            found.append("ok")
        except Exception as error:
            found.append(type(error).__name__)
    return found


def test_fresh_resume_and_overwrite_do_as_they_say(tmp_path):
    """fresh on nothing, refused on something; resume finds what torch.save wrote; overwrite empties it."""
    values(spawn_ranks(_life, 2, tmp_path / "exp"))


def _life(rank, path):
    assert set_up_directory(path, mode="fresh", timeout_s=30) == path
    assert os.listdir(path) == []
    dist.barrier()
    if rank == 0:
        torch.save({"a": 1}, path / "step1.pt")
    dist.barrier()
    assert set_up_directory(path, mode="resume", timeout_s=30) == path
    assert (os.listdir(path), torch.load(path / "step1.pt")) == (["step1.pt"], {"a": 1})
    with pytest.raises(DirectoryError, match="overwrite"):
        set_up_directory(path, mode="fresh", timeout_s=30)
    assert (os.listdir(path), torch.load(path / "step1.pt")) == (["step1.pt"], {"a": 1})
    dist.barrier()  # whoever was refused looks before another one empties it
    set_up_directory(path, mode="overwrite", timeout_s=30)
    assert os.listdir(path) == []


def test_ranks_with_another_mode_or_path_are_told(tmp_path):
    """Another mode or another path on one rank: DesyncError on all, naming who wants what."""
    for error in values(spawn_ranks(_disagree, 3, tmp_path)):
        assert isinstance(error, DesyncError)
        assert error.values == {"0": "fresh", "1": "overwrite", "2": "fresh"}


def _disagree(rank, path):
    try:
        set_up_directory(path / "x", mode="overwrite" if rank == 1 else "fresh", timeout_s=30)
    except Exception as error:
        return error


def test_a_rank_that_does_not_come_is_named(tmp_path):
    """Two of three ranks call: both get a timeout that names the third, after the time that they gave."""
    for error in values(spawn_ranks(_stay_away, 3, tmp_path))[:2]:
        assert isinstance(error, RendezvousTimeout)
        assert error.missing == (2,)


def _stay_away(rank, path):
    if rank == 2:
        time.sleep(4)
        return None
    try:
        set_up_directory(path / "x", mode="fresh", timeout_s=2)
    except Exception as error:
        return error


@needs_root
def test_a_directory_that_is_not_shared_is_refused(tmp_path):
    """One rank sees another file system under the same path: every rank is told that the directory is not shared."""
    outcomes = values(spawn_ranks(_on_own_disk, 2, tmp_path, timeout_s=110))
    for error in outcomes:
        assert isinstance(error, DirectoryNotSharedError)
        assert error.ranks == (1,)


def _on_own_disk(rank, path):
    if rank == 1:
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.unshare(0x00020000) == 0  # CLONE_NEWNS
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(path)], check=True)
    dist.barrier()
    try:
        set_up_directory(path / "exp", mode="fresh", timeout_s=5)
    except Exception as error:
        return error


@pytest.mark.quick
def test_set_up_directory_works_in_one_process_without_a_group(tmp_path):
    """The same function serves a program with a single process. It takes away what an overwriting that was killed left."""
    path = tmp_path / "x"
    assert set_up_directory(path, mode="fresh") == path
    with pytest.raises(NoValidCheckpointError, match="it holds no complete checkpoint"):
        set_up_directory(path, mode="resume")
    torch.save({"a": 1}, path / "step1.pt")
    assert set_up_directory(path, mode="resume") == path
    with pytest.raises(DirectoryError, match='is not empty: use mode="resume"'):
        set_up_directory(path, mode="fresh")
    (tmp_path / ".x.safe_ckpt-trash-1/old").mkdir(parents=True)
    set_up_directory(path, mode="overwrite")
    assert os.listdir(path) == []
    assert os.listdir(tmp_path) == ["x"]
    with pytest.raises(ConfigError, match="mode"):
        set_up_directory(path, mode="replace")


@pytest.mark.quick
@pytest.mark.parametrize("path", ["/", os.path.expanduser("~"), ".", "..", "../.."])
def test_dangerous_paths_are_not_emptied(tmp_path, monkeypatch, path):
    """overwrite never deletes the root, the home or the working directory, nor one above it."""
    (tmp_path / "a/b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a/b")
    with pytest.raises(DirectoryError, match="refusing"):
        set_up_directory(path, mode="overwrite")
    assert (tmp_path / "a/b").is_dir()


@pytest.mark.quick
def test_a_running_job_is_not_overwritten(tmp_path):
    """overwrite refuses a directory that a live job holds."""
    from safe_ckpt import Checkpointer

    with Checkpointer(tmp_path / "exp"), pytest.raises(DirectoryInUseError):
        set_up_directory(tmp_path / "exp", mode="overwrite")


def test_a_mount_point_is_emptied_in_place(tmp_path):
    """A directory that cannot be renamed is emptied instead."""
    if os.geteuid() != 0:
        pytest.skip("mounts a file system")
    from support import small_disk

    with small_disk(tmp_path / "disk", "1m") as disk:
        (disk / "old").mkdir()
        set_up_directory(disk, mode="overwrite")
        assert os.listdir(disk) == []
