"""Several ranks and a directory in an object store: sharded, replicated and per-rank items, and one rank that cannot upload."""

import dataclasses
import os
import signal

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from kit.fault_proxy import FaultProxy
from kit.ranks import spawn_ranks, values
from safe_ckpt import CheckpointConfig, Checkpointer, PerRank, Retention, StorageConfig, Timeouts
from safe_ckpt.errors import CheckpointNotFoundError, SafeCheckpointError

QUICK = Timeouts(lengthy_s=30, barrier_s=20, writer_stall_s=10, fsync_stall_s=20, peer_stall_s=5, shutdown_s=10)
CONFIG = CheckpointConfig(
    timeouts=QUICK, retention=Retention(keep_last=2), storage=StorageConfig(part_bytes=5 << 20, request_timeout_s=5)
)
WHOLE = 3_000_000
ROWS = 30_000


def content(seed, *shape):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def state_of(step, rank, world, *, blank=False):
    """A sharded tensor, one that all ranks have, and one of each rank's own."""
    fill = torch.zeros_like if blank else torch.clone
    sharded = distribute_tensor(fill(content(step, ROWS, 20)), init_device_mesh("cpu", (world,)), [Shard(0)])
    return {
        "model": {"w": sharded},
        "same": {"t": fill(content(step + 100, WHOLE))},
        "own": PerRank({"rank": -1 if blank else rank}),
        "n": -1 if blank else step,
    }


def check(state, step, rank, own=True):
    assert isinstance(state["model"]["w"], DTensor)
    assert torch.equal(state["model"]["w"].full_tensor(), content(step, ROWS, 20))
    assert torch.equal(state["same"]["t"], content(step + 100, WHOLE))
    assert state["n"] == step
    assert not own or state["own"].value["rank"] == rank


def _save_and_die(rank, world, url):
    ckpt = Checkpointer(url, CONFIG)
    for step in (1, 2, 3):
        ckpt.save(step, state_of(step, rank, world))
    ckpt.wait()
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def _resume(rank, world, url, own):
    with Checkpointer(url, CONFIG) as ckpt:
        state = state_of(0, rank, world, blank=True)
        if not own:
            del state["own"]
        assert ckpt.resume(state).step == 3
        check(state, 3, rank, own)
        ckpt.resume(state, step=2)
        check(state, 2, rank, own)


def test_four_ranks_save_and_die_and_any_number_goes_on(bucket):
    """SIGKILL after the third commit; 4 and 3 ranks resume bit for bit, and two checkpoints are there."""
    outcomes = spawn_ranks(_save_and_die, 4, 4, bucket.url(), timeout_s=60)
    assert [outcome.exit_code for outcome in outcomes] == [-signal.SIGKILL] * 4, [outcome.error for outcome in outcomes]
    for world in (4, 3):
        values(spawn_ranks(_resume, world, world, bucket.url(), world == 4, timeout_s=60))
    steps = {key.split("/")[1].split(".")[0] for key in bucket.keys("run/") if "/step-" in key}
    assert steps == {"step-00000002", "step-00000003"}


def test_a_host_of_four_ranks_reads_each_byte_of_a_store_once(bucket, monkeypatch):
    """Four ranks on one host resume what all of them need: the store sends it once, not four times."""
    values(spawn_ranks(_save_some, 2, 2, bucket.url(), timeout_s=60))
    size = sum(bucket.keys("run/").values())
    with FaultProxy(bucket.endpoint) as proxy:
        for name, value in bucket.environment(proxy.endpoint).items():
            monkeypatch.setenv(name, value)
        values(spawn_ranks(_resume_some, 4, 4, bucket.url(), timeout_s=60))
        asked = [record for record in proxy.seen if record.method == "GET" and "same" in record.path]
        sent = sum(_range_of(record) for record in asked)
    assert WHOLE * 4 <= sent <= 1.1 * size, (sent, size)


def _range_of(record):
    first, last = record.headers["range"].removeprefix("bytes=").split("-")
    return int(last) - int(first) + 1


def _save_some(rank, world, url):
    with Checkpointer(url, CONFIG) as ckpt:
        ckpt.save(1, {"same": {"t": content(101, WHOLE)}}).result()


def _resume_some(rank, world, url):
    state = {"same": {"t": torch.zeros(WHOLE)}}
    with Checkpointer(url, CONFIG) as ckpt:
        assert ckpt.resume(state).step == 1
    assert torch.equal(state["same"]["t"], content(101, WHOLE))


def _one_cannot_upload(rank, world, url, environment):
    """Only rank 1 meets the broken address; rank 0, which talks to the head, does not."""
    with Checkpointer(url, CONFIG) as ckpt:
        ckpt.save(1, state_of(1, rank, world)).result()
    if rank == 1:
        os.environ.update(environment)
    impatient = dataclasses.replace(CONFIG, timeouts=dataclasses.replace(QUICK, lengthy_s=12))
    with Checkpointer(url, impatient) as ckpt, pytest.raises(SafeCheckpointError) as caught:
        ckpt.save(2, state_of(2, rank, world)).result()
    return str(caught.value)


def test_one_rank_that_cannot_upload_fails_the_save_on_all(bucket):
    """Both ranks get an error that names rank 1; nothing is committed, and the next job resumes the one before."""
    with FaultProxy(bucket.endpoint) as proxy:
        proxy.down = True
        broken = bucket.environment(proxy.endpoint)
        told = values(spawn_ranks(_one_cannot_upload, 2, 2, bucket.url(), broken, timeout_s=60))
    for message in told:
        assert "(rank 1)" in message, told
    values(spawn_ranks(_goes_on, 2, 2, bucket.url(), timeout_s=60))
    left = [key for key in bucket.keys("run/") if "step-00000002" in key]
    assert all(key.endswith("/manifest.json") for key in left)  # where it would be committed, a tombstone


def _goes_on(rank, world, url):
    state = state_of(0, rank, world, blank=True)
    with Checkpointer(url, CONFIG) as ckpt:
        assert ckpt.resume(state).step == 1
        check(state, 1, rank)
        with pytest.raises(CheckpointNotFoundError):
            ckpt.resume(state, step=2)
