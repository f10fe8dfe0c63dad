"""Frozen parameters of which every rank has a part: written once, shared by all checkpoints, on every rank for itself."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import fully_shard

from kit.limits import PATIENT
from kit.ranks import spawn_ranks, values
from safe_ckpt import CheckpointConfig, Checkpointer, PerRank, Retention, Unchanged
from safe_ckpt.core.formats.manifest import read_manifest

WIDTH = 800


def made(seed=0):
    torch.manual_seed(seed)
    net = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, 8))
    net[0].requires_grad_(requires_grad=False)
    fully_shard(net)
    return net, torch.optim.AdamW([p for p in net.parameters() if p.requires_grad])


def step(net, optimizer):
    net(torch.randn(4, WIDTH)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def whole(net):
    return {name: tensor.full_tensor().clone() for name, tensor in net.state_dict().items()}


def _save(rank, folder):
    net, optimizer = made()
    state = {"net": net, "optimizer": optimizer, "own": PerRank({"t": torch.full((3,), float(rank))})}
    config = CheckpointConfig(timeouts=PATIENT, retention=Retention(keep_last=3))
    with Checkpointer(folder, config) as ckpt:
        for number in (1, 2, 3, 4):
            step(net, optimizer)
            ckpt.save(number, state).result()
    return whole(net)


def _resume(rank, folder):
    net, optimizer = made(seed=5)
    state = {"net": net, "optimizer": optimizer}
    with Checkpointer(folder, CheckpointConfig(timeouts=PATIENT)) as ckpt:
        info = ckpt.resume(state)
        now = whole(net)
        step(net, optimizer)
        ckpt.save(5, state).result()
    return info.step, now


def links(folder, name):
    return {path.relative_to(folder).as_posix(): path.stat().st_nlink for path in Path(folder).glob(name)}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_each_rank_shares_its_frozen_parts(tmp_path):
    """Three checkpoints are kept and each frozen part is on the disk once; what is trained is in files of its own."""
    told = values(spawn_ranks(_save, 2, str(tmp_path), timeout_s=100))
    frozen = links(tmp_path, "step-*/net/__*_1.distcp")
    assert frozen == {f"step-{step:08d}/net/__{rank}_1.distcp": 3 for step in (2, 3, 4) for rank in (0, 1)}
    assert set(links(tmp_path, "step-*/net/__*_0.distcp").values()) == {1}
    size = {entry.path: entry.size_bytes for entry in read_manifest(tmp_path / "step-00000004").files}
    assert size["net/__0_1.distcp"] > 50 * size["net/__0_0.distcp"] > 0
    # torch's own reader needs nothing of ours
    read = {name: torch.zeros_like(tensor) for name, tensor in told[0].items()}
    dcp.load({"net": read}, checkpoint_id=tmp_path / "step-00000004", no_dist=True)
    assert all(torch.equal(read[name], tensor) for name, tensor in told[0].items())


def test_sharing_goes_on_after_a_resume_on_another_number_of_ranks(tmp_path):
    """The parts of other ranks are other files: they are written once, and exact."""
    before = values(spawn_ranks(_save, 2, str(tmp_path), timeout_s=100))[0]
    for size, expected in ((2, {4}), (3, {1})):
        told = values(spawn_ranks(_resume, size, str(tmp_path), timeout_s=100))
        assert [number for number, _ in told] == [4 if size == 2 else 5] * size
        if size == 2:
            assert all(torch.equal(told[0][1][name], tensor) for name, tensor in before.items())
        newest = links(tmp_path, "step-00000005/net/__*_1.distcp")
        assert len(newest) == size
        assert set(newest.values()) == expected


def _switch(rank, folder, share):
    net, optimizer = made()
    state = {"net": net, "optimizer": optimizer}
    seen = []
    with Checkpointer(folder, CheckpointConfig(timeouts=PATIENT, unchanged=Unchanged(share=share))) as ckpt:
        for number in range(1, 7):
            if number == 3:
                net[0].weight.data.to_local().view(-1)[0] += rank  # of rank 1 alone, and not noted anywhere
            if number == 5:
                net[0].requires_grad_(requires_grad=True)
            seen.append(whole(net))
            ckpt.save(number, state).result()
            mine = Path(folder, f"step-{number:08d}/net/__{rank}_1.distcp")
            seen[-1]["links"] = os.stat(mine).st_nlink if mine.exists() else 0
    back = []
    for number in range(1, 7):
        other, _ = made(seed=9)
        with Checkpointer(folder, CheckpointConfig(timeouts=PATIENT)) as ckpt:
            ckpt.resume({"net": other}, step=number)
            now = whole(other)
        back.append(all(torch.equal(now[name], tensor) for name, tensor in seen[number - 1].items() if name != "links"))
    return [one["links"] for one in seen], back


def test_a_part_that_changes_on_one_rank_is_written_there(tmp_path):
    """Changed through ``.data`` on one rank, then unfrozen: each checkpoint has what was there at its save."""
    told = values(spawn_ranks(_switch, 2, str(tmp_path / "on"), True, timeout_s=150))
    assert told == [([1, 2, 3, 4, 0, 0], [True] * 6), ([1, 2, 1, 1, 0, 0], [True] * 6)]
    told = values(spawn_ranks(_switch, 2, str(tmp_path / "off"), False, timeout_s=150))
    assert told == [([0] * 6, [True] * 6)] * 2
