"""Whole weights from every rank's parts: as other tools read them, atomically, and without a second copy of the model."""

import json
import os
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from kit.limits import QUICK
from kit.ranks import spawn_ranks, values
from safe_ckpt import CheckpointConfig, Checkpointer, Retention
from safe_ckpt.core.coordination import process_groups
from safe_ckpt.core.formats.manifest import read_manifest
from safe_ckpt.core.formats.verify import verify_files
from safe_ckpt.core.sharding import gather
from safe_ckpt.errors import (
    ConfigError,
    DesyncError,
    DirectoryError,
    NotEnoughSpaceError,
    SafeCheckpointError,
    StateError,
)
from support import needs_root, small_disk

CONFIG = CheckpointConfig(timeouts=QUICK)


class Tied(torch.nn.Module):
    """A model whose last layer is its first."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(50, 16)
        self.inner = torch.nn.Linear(16, 16)
        self.head = torch.nn.Linear(16, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x):
        return self.head(self.inner(self.embedding(x))) * self.scale


def tied(shard=True):
    torch.manual_seed(0)
    model = Tied()
    if shard:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def _export(rank, folder, shard):
    model = tied(shard)
    before = [seconds for _, seconds in process_groups.backend_timeouts(None)]
    with Checkpointer(folder / "ckpt", CONFIG) as ckpt:
        info = ckpt.export(model, folder / "whole").result()
        assert info.path == folder / "whole"
        ckpt.export(model, folder / "half", max_shard_size="2KB", dtype=torch.bfloat16).result()
        with torch.no_grad():
            (model.inner.weight.to_local() if shard else model.inner.weight).zero_()
        handle = ckpt.export(model, folder / "whole", max_shard_size=2000)
        handle.result()
    assert [seconds for _, seconds in process_groups.backend_timeouts(None)] == before
    expected = tied(shard=False).state_dict()
    return {name: value for name, value in expected.items() if name != "head.weight"}


@pytest.mark.parametrize(("world", "shard"), [(1, False), (2, True), (3, True)])
def test_an_export_of_sharded_weights_equals_the_model(tmp_path, world, shard):
    """One file or shards with an index, tied weights once, converted where asked, replaced as a whole; verified by manifest."""
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "config.json").write_text("{}")
    expected = values(spawn_ranks(_export, world, tmp_path, shard))[0]
    assert (tmp_path / "whole" / "config.json").exists()
    assert not (tmp_path / "whole" / "model.safetensors").exists()  # replaced by shards
    index = json.loads((tmp_path / "whole" / "model.safetensors.index.json").read_text())
    found = {}
    for file in set(index["weight_map"].values()):
        found.update(load_file(tmp_path / "whole" / file))
    assert found.keys() == expected.keys() == index["weight_map"].keys()
    for name, value in expected.items():
        assert torch.equal(found[name], torch.zeros_like(value) if name == "inner.weight" else value), name
    half = {}
    for file in (tmp_path / "half").glob("*.safetensors"):
        half.update(load_file(file))
    for name, value in expected.items():
        assert torch.equal(half[name], value.to(torch.bfloat16)), name
    verify_files(tmp_path / "half", read_manifest(tmp_path / "half"))


def _pretrained(rank, folder):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 99}
    config = LlamaConfig(**shape, num_attention_heads=4, num_key_value_heads=2)
    model = LlamaForCausalLM(config)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with Checkpointer(folder / "ckpt", CONFIG) as ckpt:
        ckpt.export(model, folder / "llama", max_shard_size="20KB").result()
    if rank == 0:
        config.save_pretrained(folder / "llama")
        loaded = LlamaForCausalLM.from_pretrained(folder / "llama").state_dict()
        assert loaded.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(loaded[name], value), name


def test_transformers_loads_what_was_exported(tmp_path):
    """``from_pretrained`` of a sharded Llama, every weight bit for bit."""
    pytest.importorskip("transformers")
    values(spawn_ranks(_pretrained, 2, tmp_path))


def _resident():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) << 10


def _large(rank, folder, tensors, size_bytes):
    mesh = init_device_mesh("cpu", (2,))
    rows = size_bytes // 4 // 1024
    state = {}
    for number in range(tensors):
        kind = Shard(number % 2)
        shape = (rows // 2, 1024) if number % 2 == 0 else (rows, 512)
        state[f"t{number}"] = DTensor.from_local(torch.full(shape, float(number + rank)), mesh, [kind])
    with Checkpointer(folder / "ckpt", CONFIG) as ckpt:
        ckpt.export({"warm": distribute_tensor(torch.ones(64, 1024), mesh, [Shard(0)])}, folder / "warm").result()
        base, peak, over = _resident(), 0, threading.Event()

        def watch():
            nonlocal peak
            while not over.wait(0.002):
                peak = max(peak, _resident())

        watcher = threading.Thread(target=watch)
        watcher.start()
        ckpt.export(state, folder / "large").result()
        over.set()
        watcher.join()
    return peak - base


@pytest.mark.timeout(180)
def test_an_export_takes_memory_for_one_tensor(tmp_path):
    """2 GiB on two ranks: less than 1.2 times the largest tensor and the buffers beyond what was there, on either rank."""
    largest = 256 << 20
    found = values(spawn_ranks(_large, 2, tmp_path, 8, largest, timeout_s=150))
    allowed = 1.2 * (largest + 2 * gather.STAGING_BYTES)
    print(f"{[extra >> 20 for extra in found]} MiB, allowed {int(allowed) >> 20}")
    assert max(found) < allowed
    loaded = load_file(tmp_path / "large" / "model.safetensors")
    assert torch.equal(loaded["t1"][:, 512:], torch.full((65536, 512), 2.0))
    assert torch.equal(loaded["t2"][32768:], torch.full((32768, 1024), 3.0))
    os.remove(tmp_path / "large" / "model.safetensors")


def _full_disk(rank, folder):
    mesh = init_device_mesh("cpu", (2,))
    state = {f"t{number}": distribute_tensor(torch.ones(1 << 20), mesh, [Shard(0)]) for number in range(12)}
    with Checkpointer(folder / "ckpt", CONFIG) as ckpt:
        filler = folder / "filler"
        original = gather._Gather._exchange

        def fill_first(self, number, flow, timeout_s):
            if rank == 0 and number == 3:
                with filler.open("wb") as stream:
                    stream.write(bytes(40 << 20))
            original(self, number, flow, timeout_s)

        gather._Gather._exchange = fill_first
        gather.STAGING_BYTES = 1 << 20
        try:
            ckpt.export(state, folder / "out").result()
        except SafeCheckpointError as error:
            problem = type(error), str(error)
        gather._Gather._exchange = original
        dist.barrier()  # the group is as good as before
        if rank == 0:
            filler.unlink()
        ckpt.export(dict(list(state.items())[:2]), folder / "out").result()
    return problem


@needs_root
def test_a_disk_that_fills_up_in_the_middle_is_named_on_every_rank(tmp_path):
    """Nothing appears under the name, every rank raises the space that is missing, and the next export works."""
    with small_disk(tmp_path / "disk", 64 << 20) as folder:
        for kind, text in values(spawn_ranks(_full_disk, 2, folder)):
            assert kind is NotEnoughSpaceError
            assert "not enough space" in text
        assert sorted(load_file(folder / "out" / "model.safetensors")) == ["t0", "t1"]


def _refused(rank, folder, what):
    mesh = init_device_mesh("cpu", (2,))
    part = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    problem = None
    with Checkpointer(folder / "ckpt", CONFIG) as ckpt:
        ckpt.save(1, {"w": {"a": torch.ones(2)}}).result()
        arguments = {
            "format": ({"a": part}, folder / "out", "pickle"),
            "size": ({"a": part}, folder / "out", "safetensors", "many"),
            "object": ({"a": part, "b": "text" if rank else torch.ones(1)}, folder / "out"),
            "keys": ({"a": part, 1: torch.ones(2), "1": torch.zeros(2)}, folder / "out"),
            "dots": ({"b": {"c": part}, "b.c": torch.ones(4)}, folder / "out"),
            "complex": ({"a": torch.ones(2, dtype=torch.complex128)}, folder / "out"),
            "checkpoints": ({"a": part}, folder / "ckpt"),
            "step": ({"a": part}, folder / "ckpt" / "step-00000001"),
            "paths": ({"a": part}, folder / f"out{rank}"),
        }[what]
        try:
            ckpt.export(*arguments).result()
        except SafeCheckpointError as error:
            problem = type(error), str(error)
        ckpt.export({"a": part}, folder / "fine").result()
    return problem


@pytest.mark.parametrize(
    ("what", "kind", "match"),
    [
        ("format", ConfigError, "safetensors"),
        ("size", ConfigError, "max_shard_size"),
        ("object", StateError, "expected a tensor, got str"),
        ("keys", StateError, "cannot save 1: two tensors have this name"),
        ("dots", StateError, "cannot save b.c: two tensors have this name"),
        ("complex", StateError, "does not fit safetensors"),
        ("checkpoints", DirectoryError, "checkpoints are kept in it"),
        ("step", DirectoryError, "no weights directory"),
        ("paths", DesyncError, "path"),
    ],
)
def test_what_cannot_be_exported_is_refused_on_every_rank(tmp_path, what, kind, match):
    """With what to do, and the next export works."""
    for found, text in values(spawn_ranks(_refused, 2, tmp_path, what)):
        assert found is kind
        assert match in text


def _beside(rank, folder):
    mesh = init_device_mesh("cpu", (2,))
    model = {"a": distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])}
    with Checkpointer(folder, CheckpointConfig(timeouts=QUICK, retention=Retention(keep_last=1))) as ckpt:
        ckpt.save(1, {"m": model}).result()
        ckpt.export(model, folder / "weights").result()
    with Checkpointer(folder, CheckpointConfig(timeouts=QUICK, retention=Retention(keep_last=1))) as ckpt:
        assert ckpt.resume({"m": model}).step == 1
        ckpt.save(2, {"m": model}).result()
    dist.barrier()
    return sorted(path.name for path in folder.iterdir())


def test_weights_beside_checkpoints_are_no_checkpoint(tmp_path):
    """An export into the run's own directory is neither resumed from nor deleted by retention."""
    assert values(spawn_ranks(_beside, 2, tmp_path)) == [[".safe_ckpt", "step-00000002", "weights"]] * 2


def _late(rank, folder):
    mesh = init_device_mesh("cpu", (2,))
    state = {f"t{number}": distribute_tensor(torch.ones(1 << 18), mesh, [Shard(0)]) for number in range(8)}
    gather.STAGING_BYTES = 1 << 18
    original = gather._Gather._exchange

    def leave(self, number, *rest):
        if rank == 1 and number == 3:
            raise KeyError("a bug on this rank")
        original(self, number, *rest)

    gather._Gather._exchange = leave
    with Checkpointer(folder / "ckpt", CONFIG) as ckpt:
        try:
            ckpt.export(state, folder / "out").result()
        except SafeCheckpointError as error:
            return str(error)


def test_what_goes_wrong_in_the_gather_is_not_taken_for_the_disk(tmp_path):
    """An error of rank 1 within the gather is what every rank raises from the handle, and nothing was committed."""
    for text in values(spawn_ranks(_late, 2, tmp_path)):
        assert "a bug on this rank" in text
    assert not (tmp_path / "out").exists()
