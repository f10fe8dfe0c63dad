"""``mirror.near: per-host``: a directory on each host's own disk."""

import json
import os
import shutil
import subprocess

import pytest
import torch

from host_runs import config, empty, move_to_host, same, same_shards, shards_of, state_of, why_no_mounts
from kit.ranks import spawn_ranks, values
from safe_ckpt import Checkpointer
from safe_ckpt.errors import NotEnoughSpaceError

pytestmark = pytest.mark.skipif(bool(why_no_mounts()), reason=f"mounts of one's own: {why_no_mounts()}")
HOSTS = (0, 0, 1, 1)  # of the ranks


def _save(rank, folder, steps, hosts=HOSTS):
    near = move_to_host(hosts[rank], folder)
    with Checkpointer(near, config(folder)) as ckpt:
        for step in steps:
            ckpt.save(step, state_of(rank, step)).result()


def _steps(folder):
    return [sorted(path.name for path in (folder / f"host{host}").glob("step-*")) for host in (0, 1)]


def _resume(rank, folder, hosts=HOSTS):
    near = move_to_host(hosts[rank], folder)
    state = empty()
    with Checkpointer(near, config(folder)) as ckpt:
        info = ckpt.resume(state)
    return None if info is None else (info.step, same(state, rank, info.step))


def test_each_host_has_what_its_ranks_wrote_and_a_resume_reads_it_there(tmp_path):
    """Two hosts of two ranks: each directory has its ranks' files and the manifest of all; a resume gives all of it back."""
    values(spawn_ranks(_save, 4, tmp_path, (10, 20, 30)))
    assert _steps(tmp_path) == [["step-00000020", "step-00000030"]] * 2
    for host, ranks in ((0, (0, 1)), (1, (2, 3))):
        folder = tmp_path / f"host{host}" / "step-00000030"
        files = {entry["path"]: entry["rank"] for entry in json.loads((folder / "manifest.json").read_text())["files"]}
        assert set(files.values()) == {0, 1, 2, 3}
        assert {name for name in files if (folder / name).exists()} == {n for n, rank in files.items() if rank in ranks}
    assert values(spawn_ranks(_resume, 4, tmp_path)) == [(30, [])] * 4
    assert (
        values(spawn_ranks(_resume, 4, tmp_path, (1, 1, 0, 0))) == [(30, [])] * 4
    )  # the hosts have changed their places
    values(spawn_ranks(_save, 4, tmp_path, (40,)))
    assert _steps(tmp_path) == [["step-00000030", "step-00000040"]] * 2


def _lose(folder, host, what):
    """The disk of a host is new, or a bit of its part of the newest has flipped."""
    disk = folder / f"host{host}"
    if what == "disk":
        shutil.rmtree(disk)
        return
    own = min(disk.glob("step-00000030/own.*"))
    data = bytearray(own.read_bytes())
    data[-1] ^= 1
    own.write_bytes(data)


@pytest.mark.parametrize(("host", "what"), [(0, "disk"), (1, "disk"), (1, "bit")])
def test_what_a_host_has_lost_comes_from_the_far_copy(tmp_path, host, what):
    """The disk of one host is new, or a bit there has flipped: the newest comes back from the far copy, right on all ranks."""
    values(spawn_ranks(_save, 4, tmp_path, (10, 20, 30)))
    assert (tmp_path / "far/step-00000030/own.rank00003.safetensors").exists()
    _lose(tmp_path, host, what)
    assert values(spawn_ranks(_resume, 4, tmp_path)) == [(30, [])] * 4
    values(spawn_ranks(_save, 4, tmp_path, (40,)))
    assert _steps(tmp_path) == [["step-00000030", "step-00000040"]] * 2


def _save_sharded(rank, folder, steps):
    near = move_to_host(HOSTS[rank], folder)
    with Checkpointer(near, config(folder)) as ckpt:
        for step in steps:
            ckpt.save(step, shards_of(step, (4,), 0)).result()


def _resume_sharded(rank, folder, hosts, mesh_shape, dimension):
    near = move_to_host(hosts[rank], folder)
    state = shards_of(0, mesh_shape, dimension)
    with Checkpointer(near, config(folder)) as ckpt:
        info = ckpt.resume(state)
        right = same_shards(state, info.step)
        ckpt.save(info.step + 10, shards_of(info.step + 10, mesh_shape, dimension)).result()
    return info.step, right


OTHERWISE = {
    "as before": (HOSTS, (4,), 0),
    "along another dimension": (HOSTS, (4,), 1),
    "over a mesh of two dimensions": (HOSTS, (2, 2), 0),
    "the ranks lie elsewhere": ((0, 1, 0, 1), (4,), 0),
    "fewer ranks on a host": ((0, 0, 1), (3,), 0),
    "one host alone": ((1, 1), (2,), 0),
    "a host more": ((0, 1, 2, 2), (4,), 0),
    "two hosts more": ((0, 1, 2, 2, 3, 3), (6,), 0),
}
RARELY = ("as before", "along another dimension", "the ranks lie elsewhere", "two hosts more")
SOME = [pytest.param(how, marks=[pytest.mark.thorough] if how in RARELY else []) for how in OTHERWISE]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("how", SOME)
def test_shards_come_to_the_ranks_that_need_them(tmp_path, how):
    """The newest is resumed whatever host a shard lies on, and however the next run cuts; it saves there, too."""
    hosts, mesh_shape, dimension = OTHERWISE[how]
    values(spawn_ranks(_save_sharded, 4, tmp_path, (10, 20, 30)))
    resumed = spawn_ranks(_resume_sharded, len(hosts), tmp_path, hosts, mesh_shape, dimension)
    assert values(resumed) == [(30, True)] * len(hosts)
    again = spawn_ranks(_resume_sharded, len(hosts), tmp_path, hosts, mesh_shape, dimension)
    assert values(again) == [(40, True)] * len(hosts)


def _resumes_with_little_room(rank, folder):
    near = move_to_host(rank, folder)
    if rank == 1:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", near], check=True)
    state = {"weights": torch.zeros(200_000)}
    with Checkpointer(near, config(folder)) as ckpt:
        with pytest.raises(NotEnoughSpaceError) as caught:
            ckpt.resume(state)
        return caught.value.needed_bytes > 800_000 > caught.value.free_bytes, os.listdir(near)


def _saves_much(rank, folder):
    with Checkpointer(move_to_host(rank, folder), config(folder)) as ckpt:
        ckpt.save(1, {"weights": torch.zeros(200_000)}).result()


@pytest.mark.timeout(120)
def test_files_of_other_hosts_that_do_not_fit_are_refused_before_one_comes(tmp_path):
    """A new host whose near directory, a small tmpfs, has no room for what it lacks: an error on all ranks."""
    values(spawn_ranks(_saves_much, 2, tmp_path))
    told = values(spawn_ranks(_resumes_with_little_room, 2, tmp_path))
    assert [one[0] for one in told] == [True, True]
    assert "step-00000001" not in told[1][1]
