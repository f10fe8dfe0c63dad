"""A torch that is newer than this package: what it has besides stops no save and no resume."""

import dataclasses
import enum

import torch
import torch.distributed.checkpoint.filesystem
import torch.distributed.checkpoint.planner_helpers
from torch.distributed.checkpoint import default_planner, metadata, planner, planner_helpers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from kit.limits import QUICK
from kit.ranks import spawn_ranks, values
from safe_ckpt import CheckpointConfig, Checkpointer
from safe_ckpt.core.sharding import dcp_read
from safe_ckpt.tools.inspection.dcp_reader import read_directory

CONFIG = CheckpointConfig(timeouts=QUICK)


class Order(enum.Enum):
    """A further enumeration."""

    ROWS = 1


@dataclasses.dataclass
class Properties(metadata.TensorProperties):
    """Further fields: one that can be told to other ranks, one that cannot."""

    order: tuple[int, ...] | None = None
    kind: Order | None = None

    def __getstate__(self):
        return (*super().__getstate__(), self.order, self.kind)

    def __setstate__(self, state):
        super().__setstate__(state[:-2])
        self.order, self.kind = state[-2:]

    @staticmethod
    def create_from_tensor(tensor):
        return Properties(dtype=tensor.dtype, order=(2, 1), kind=Order.ROWS)


def be_newer():
    """What a further release might have changed, in this process."""
    for kind, name in ((Properties, "TensorProperties"), (Order, "Order")):
        kind.__module__, kind.__qualname__, kind.__name__ = metadata.__name__, name, name
        setattr(metadata, name, kind)
    for module in (planner, planner_helpers, default_planner):
        if hasattr(module, "TensorProperties"):
            module.TensorProperties = Properties


def state_of(world, fill):
    mesh = init_device_mesh("cpu", (world,))
    model = torch.nn.Linear(4, 4)
    torch.nn.init.constant_(model.weight, fill)
    fully_shard(model, mesh=mesh)
    row = {"model": model}
    types = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
    for dtype in types:
        bits = torch.full((4 * dtype.itemsize,), fill, dtype=torch.uint8)
        try:
            torch._utils._element_size(dtype)  # DCP's planner asks that
            whole = bits.view(dtype)
            row[str(dtype)] = {"t": distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)}
        except (RuntimeError, NotImplementedError, TypeError):
            continue  # torch itself cannot make or spread one
    return row


def _save_and_resume(rank, world, folder):
    be_newer()
    with Checkpointer(folder, CONFIG) as ckpt:
        ckpt.save(1, state_of(world, 1)).result()
        saved = state_of(world, 1)
        ckpt.save(2, saved).result()
        state = state_of(world, 0)
        assert ckpt.resume(state).step == 2
    for name, item in saved.items():
        if name != "model":
            one, other = item["t"].to_local(), state[name]["t"].to_local()
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8)), name
    return isinstance(state["model"].weight, DTensor), state["model"].weight.full_tensor().sum().item()


def test_fields_classes_and_types_that_are_not_known_here_are_saved_and_resumed(tmp_path, monkeypatch):
    """Two ranks of FSDP2 and a tensor of every type: it is saved, the field is in ``.metadata``, and it is resumed."""
    assert values(spawn_ranks(_save_and_resume, 2, 2, str(tmp_path))) == [(True, 16.0)] * 2
    for kind, name in ((Properties, "TensorProperties"), (Order, "Order")):
        monkeypatch.setattr(kind, "__module__", metadata.__name__)
        monkeypatch.setattr(metadata, name, kind, raising=False)
    folder = tmp_path / "step-00000002"
    found = dcp_read.read_metadata(folder).state_dict_metadata["model.weight"].properties
    assert (type(found), found.order) == (Properties, (2, 1))
    assert read_directory(folder).tensors["model.weight"].dtype == "float32"
