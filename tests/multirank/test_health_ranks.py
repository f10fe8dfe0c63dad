"""Numbers that go bad on one rank: all ranks know, and all go back together."""

import math

import torch
from torch.distributed.fsdp import fully_shard

from kit.limits import PATIENT
from kit.ranks import spawn_ranks, values
from safe_ckpt import CheckpointConfig, Checkpointer, Health, PerRank, Retention
from safe_ckpt.core.formats.manifest import read_manifest
from safe_ckpt.errors import UnhealthyStateError


def made():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
    net.register_buffer("mask", torch.full((4, 4), -math.inf).triu(1))
    net[1].state = torch.nn.ModuleList([torch.nn.Module()])  # a module of this name is no optimizer's state
    net[1].state[0].register_buffer("mask", torch.full((4, 4), -math.inf).triu(1))
    fully_shard(net)
    return net, torch.optim.AdamW(net.parameters())


def step(net, optimizer):
    net(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _sharded(rank, folder, what):
    net, optimizer = made()
    state = {"net": net, "optimizer": optimizer, "own": PerRank({"t": torch.zeros(3)})}
    step(net, optimizer)
    with Checkpointer(folder, CheckpointConfig(timeouts=PATIENT, retention=Retention(keep_last=1))) as ckpt:
        found = [ckpt.save(number, state).result().marked for number in (1, 2)]
        if rank == 1 and what == "shard":
            net[0].weight.data.to_local()[0, 3] = math.nan
        if rank == 1 and what == "moment":
            optimizer.state[net[0].weight]["exp_avg_sq"].to_local()[0, 3] = math.inf
        if rank == 1 and what == "own":
            state["own"].value["t"][1] = math.nan
        found += [ckpt.save(number, state).result().marked for number in (3, 4)]
        info = ckpt.resume(state)
        whole = all(bool(p.to_local().isfinite().all()) for p in net.parameters())
        step(net, optimizer)
        found.append(ckpt.save(5, state).result().marked)
    return found, info.step, whole, ckpt.directory.name


def test_one_shard_of_one_rank_marks_the_checkpoint_for_all(tmp_path):
    """Of the weights, of the optimizer's state, of what a rank has for itself."""
    for what in ("shard", "moment", "own"):
        told = values(spawn_ranks(_sharded, 2, str(tmp_path / what), what, timeout_s=100))
        assert [one[:3] for one in told] == [([False, False, True, True, False], 2, True)] * 2, what
        health = read_manifest(tmp_path / what / "step-00000004").health
        assert health["marked"]
        rows = [(path, row["name"]) for path, facts in health["files"].items() for row in facts.get("sick", ())]
        expected = {
            "shard": ("net/__1_0.distcp", "0.weight"),
            "moment": ("optimizer/__1_0.distcp", "state.0.weight.exp_avg_sq"),
            "own": ("own.rank00001.safetensors", "t"),
        }
        assert rows == [expected[what]]


def _stops(rank, folder):
    config = CheckpointConfig(timeouts=PATIENT, health=Health(action="stop"))
    with Checkpointer(folder, config) as ckpt:
        value = math.nan if rank == 2 else 1.0
        handle = ckpt.save(1, {"own": PerRank({"t": torch.tensor([value])})})
        try:
            handle.result()
        except UnhealthyStateError as error:
            return str(error)
    return "nothing"


def test_all_ranks_stop_at_one_ranks_bad_number_with_one_message(tmp_path):
    """It names the tensor and the rank's file."""
    told = values(spawn_ranks(_stops, 3, str(tmp_path), timeout_s=60))
    assert len(set(told)) == 1
    assert "own.rank00002.safetensors: t has 1 NaN among 1 numbers" in told[0]
