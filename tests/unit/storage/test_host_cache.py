"""The folders on a host's own disk into which checkpoints of a store are fetched."""

import os
import subprocess
import sys

from safe_ckpt.core.resuming import host_cache
from safe_ckpt.core.storage.objects.options import StorageOptions
from safe_ckpt.core.storage.objects.place import open_place

_SWEEP = (
    "import sys, pathlib; from safe_ckpt.core.resuming import host_cache; host_cache._sweep(pathlib.Path(sys.argv[1]))"
)


def test_a_folder_in_use_is_not_swept_and_one_of_a_job_that_is_over_is(tmp_path):
    """Another job of the user's that begins on the host deletes what killed jobs left, and nothing that is being read."""
    folder = tmp_path / f"{host_cache._START}{os.getuid()}-1"
    used = host_cache._make(folder)
    also = host_cache._make(folder)  # another rank
    for left in (used, also):
        subprocess.run([sys.executable, "-c", _SWEEP, str(tmp_path)], check=True, timeout=60)
        assert folder.is_dir()
        os.close(left)
    subprocess.run([sys.executable, "-c", _SWEEP, str(tmp_path)], check=True, timeout=60)
    assert not folder.exists()


def test_two_kernels_are_two_hosts_whatever_numbers_their_folders_have(tmp_path, monkeypatch):
    """Ranks fetch a share each only where they share the folder: memory and disks of two hosts may have equal numbers."""

    def on(kernel, folder):
        monkeypatch.setattr(host_cache, "kernel_id", lambda: kernel, raising=False)
        return host_cache.HostCache(str(folder), part_bytes=1 << 20, at_a_time=1).host_id(10)

    (tmp_path / "other").mkdir()
    one = on("one", tmp_path)
    assert on("one", tmp_path) == one
    assert on("two", tmp_path) != one
    assert on("one", tmp_path / "other") != one


def test_the_directory_that_a_setting_names_is_made_with_those_above_it(tmp_path):
    """A host's own disk is empty when a job comes to it."""
    host_cache.HostCache(str(tmp_path / "not/there/yet"), part_bytes=1 << 20, at_a_time=1).host_id(10)
    assert (tmp_path / "not/there/yet").is_dir()


def test_a_folder_that_somebody_has_removed_is_no_error(tmp_path):
    """What was fetched is deleted at the end, if it is still there: a system that cleans up may have come first."""
    for removed in (False, True):
        cache = host_cache.HostCache(str(tmp_path), part_bytes=1 << 20, at_a_time=1)
        cache.host_id(0)
        place = open_place("s3://bucket/run", StorageOptions())
        folder = cache.fetch(place, [], "token", host_cache.Host(ranks=(0,), place=0))
        if removed:
            folder.rmdir()
        cache.clear()
        assert [*tmp_path.iterdir()] == []
