"""What a resume writes to where every rank has a part: memory is needed for it, and what lies beside it is restored, too."""

import torch
import torch.distributed.checkpoint as stock
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from kit.limits import QUICK
from kit.ranks import spawn_ranks, values
from safe_ckpt import CheckpointConfig, Checkpointer, dcp
from safe_ckpt.errors import RestoreError

CONFIG = CheckpointConfig(timeouts=QUICK)


def _sharded(device="cpu"):
    with torch.device(device):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return model


def _refused(ckpt, target):
    state = {"n": 0, "model": target}
    try:
        ckpt.resume(state)
    except RestoreError as error:
        return error.key, "to_empty" in str(error), state["n"]


def _into_meta(rank, path):
    model = _sharded()
    with torch.device("meta"):
        plain = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    found = {}
    for kind, state in {"shards": model, "whole": nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))}.items():
        with Checkpointer(path / kind, CONFIG) as ckpt:
            ckpt.save(1, {"n": 1, "model": state}).result()
            targets = {"fsdp": _sharded("meta"), "plain": plain, "dict": _sharded("meta").state_dict()}
            found |= {(kind, name): _refused(ckpt, target) for name, target in targets.items()}
    with Checkpointer(path / "shards", CONFIG) as ckpt:
        other = _sharded("meta").to_empty(device="cpu")
        ckpt.resume({"model": other})
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return found, all(torch.equal(one.full_tensor(), now.full_tensor()) for one, now in pairs)


def test_a_sharded_model_without_memory_is_refused_on_every_rank(tmp_path):
    """From shards and from whole weights: nothing is restored on any rank, and what the error says works."""
    for found, works in values(spawn_ranks(_into_meta, 2, tmp_path)):
        for case, told in found.items():
            assert told == ("state['model']['0.weight']", True, 0), case
        assert works


def _load(rank, path):
    model = _sharded()
    stock.save({"model": model.state_dict()}, checkpoint_id=path)
    found = []
    for library in (stock, dcp):
        state = {"model": _sharded("meta").state_dict()}
        library.load(state, checkpoint_id=path)
        found.append({name: tensor.full_tensor() for name, tensor in state["model"].items()})
    return found


def test_dcp_load_gives_memory_as_stock_does(tmp_path):
    """A state dict of a model on the meta device gets tensors with the values."""
    for theirs, ours in values(spawn_ranks(_load, 2, str(tmp_path / "stock"))):
        assert theirs.keys() == ours.keys()
        assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


def _beside(rank, path):
    model, row = _sharded(), torch.zeros(3)
    with torch.inference_mode():
        made = torch.zeros(4)
    model.register_buffer("places", torch.arange(3.0).expand(2, 3))
    state = {"model": model, "d": {**model.state_dict(), "row": torch.arange(3.0).expand(2, 3), "made": torch.ones(4)}}
    other = _sharded()
    other.register_buffer("places", torch.zeros(3).expand(2, 3))
    target = {"model": other, "d": {**_sharded().state_dict(), "row": row.expand(2, 3), "made": made}}
    with Checkpointer(path, CONFIG) as ckpt:
        ckpt.save(1, state).result()
        ckpt.resume(target)
    same = torch.equal(other[0].weight.full_tensor(), target["d"]["0.weight"].full_tensor())
    return same, row.tolist(), made.tolist(), other.places.tolist()


def test_what_lies_beside_shards_is_restored_in_place(tmp_path):
    """Expanded tensors and those of inference mode, which DCP's reader cannot write to."""
    for found in values(spawn_ranks(_beside, 2, tmp_path)):
        assert found == (True, [0, 1, 2], [1] * 4, [[0, 1, 2]] * 2)
