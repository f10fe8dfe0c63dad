"""The folders on a host's own disk into which checkpoints of a store are fetched."""

import os
import subprocess
import sys

import pytest
import torch

from safe_ckpt import Checkpointer, PerRank
from safe_ckpt.core.formats.manifest import FileEntry, read_manifest
from safe_ckpt.core.resuming import host_cache
from safe_ckpt.core.resuming.items import StoredItems
from safe_ckpt.core.storage.objects import bucket as buckets
from safe_ckpt.core.storage.objects.options import StorageOptions
from safe_ckpt.core.storage.objects.place import open_place
from safe_ckpt.errors import IncompleteCheckpointError

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


def test_a_host_fetches_what_several_of_its_ranks_read_and_no_more(tmp_path):
    """What one rank needs alone goes straight into its memory."""
    state = {"w": {"t": torch.ones(3)}, "own": PerRank({"t": torch.ones(3)}), "other": {"t": torch.ones(3)}}
    with Checkpointer(tmp_path) as ckpt:
        manifest = read_manifest(ckpt.save(1, state).result(timeout_s=30).path)
    items = StoredItems({name: state[name] for name in ("w", "own")}, 0, 2)
    for ranks, files in (((0,), []), ((0, 1), ["w.safetensors"])):
        assert [one.path for one in items.wanted(manifest, host_cache.Host(ranks=ranks, place=0))] == files


def test_a_file_that_is_gone_from_the_store_is_named(tmp_path, monkeypatch):
    """The checkpoint is passed over for it, and people look for it."""
    store = pytest.importorskip("obstore.store").MemoryStore()
    monkeypatch.setattr(buckets, "connect", lambda *_: store)
    cache = host_cache.HostCache(str(tmp_path), part_bytes=1 << 20, at_a_time=1)
    cache.host_id(0)
    entry = FileEntry(path="w.safetensors", size_bytes=3, xxh3_128="0" * 32, rank=0)
    with pytest.raises(IncompleteCheckpointError, match="missing") as caught:
        cache.fetch(
            open_place("s3://bucket/run", StorageOptions()), [entry], "token", host_cache.Host(ranks=(0,), place=0)
        )
    assert caught.value.file == "w.safetensors"
    cache.clear()


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
