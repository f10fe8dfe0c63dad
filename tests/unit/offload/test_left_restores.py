"""What a killed restore leaves is removed by the next one where it is known to be over, whoever has its pid or host name."""

import os
import shutil

import pytest

from kit.inside import lock_in
from safe_ckpt import consolidate_offloaded, restore_offloaded
from safe_ckpt.core.home.file_lock import LOCK_NAME
from safe_ckpt.core.home.lease import own_lease
from safe_ckpt.machine import kernel_id, pid_namespace


@pytest.fixture
def source(tmp_path):
    (tmp_path / "part").mkdir()
    (tmp_path / "part/a").write_bytes(b"1234")
    consolidate_offloaded({"x": tmp_path / "part"}, tmp_path / "made")
    return tmp_path / "made"


def left_by(target, **facts):
    """The folder of a restore, with the lock of such a process."""
    folder = target / ".safe_ckpt-restore-0123"
    (folder / "files").mkdir(parents=True)
    lease = own_lease(token="t", started_at="2026-01-01T00:00:00+00:00", lease_s=60.0)
    (folder / LOCK_NAME).write_bytes(type(lease)(**{**vars(lease), **facts}).to_bytes())
    return folder


@pytest.mark.parametrize(
    ("facts", "stays"),
    [
        ({"process_start": 1}, False),
        ({"namespace": pid_namespace() + 1, "pid": 999_999_999}, True),
        ({"kernel": f"{kernel_id()}x", "pid": 999_999_999}, True),
    ],
    ids=["a recycled pid", "another pod of this host's name", "another machine of this host's name"],
)
def test_a_killed_restore_is_known_to_be_over_by_its_lease(source, tmp_path, facts, stays):
    """A pid proves nothing without the start of its process, nor does a host's name."""
    target = tmp_path / "target"
    folder = left_by(target, **{"pid": os.getpid(), **facts})
    restore_offloaded(source, {"x": target}, timeout_s=30)
    assert (target / "a").read_bytes() == b"1234"
    assert folder.exists() is stays


def test_a_live_restore_into_the_same_folder_is_left_alone(source, tmp_path):
    """Another restore into the same folder, at the same time; then nothing but the files is there."""
    target = tmp_path / "target"
    folder = left_by(target)
    (folder / LOCK_NAME).unlink()
    lock = lock_in(folder, subject=target)
    lock.acquire()
    restore_offloaded(source, {"x": target}, timeout_s=30)
    assert (folder / "files").is_dir()
    lock.release()
    shutil.rmtree(folder)
    assert [path.name for path in target.iterdir()] == ["a"]
