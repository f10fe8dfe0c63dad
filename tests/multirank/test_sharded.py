"""Sharded items: DCP's layout, written by us, read by stock tools, and resumed on any world size and mesh."""

import io
import os
import pickle
import signal

import pytest
import torch
import torch.distributed as dist
import xxhash
from fsdp_runs import CONFIG, build, same, train, train_and_save, whole
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from kit.inside import store_keys
from kit.manifests import rewrite
from kit.ranks import spawn_ranks, values
from safe_ckpt import Checkpointer, PerRank
from safe_ckpt.core.coordination import store
from safe_ckpt.core.formats.manifest import read_manifest
from safe_ckpt.core.sharding import dcp_entries as distcp
from safe_ckpt.core.sharding import dcp_plan, dcp_read
from safe_ckpt.errors import CorruptCheckpointError, DesyncError, RestoreError, SafeCheckpointError, StateError
from support import flip_bit, placements, spreads_empty_shards

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn]


def raw(tensor):
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def some(shape, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-50, 50, shape, generator=generator).float().to(dtype)


def spread(tensors, world, sizes, *, empty=False, shift=0):
    """The tensors as DTensors of this world, in another mesh and placement for every ``shift``."""
    meshes = [init_device_mesh("cpu", (world,)), init_device_mesh("cpu", sizes)]
    found = {}
    for number, (shape, dtype, mesh, choice) in enumerate(tensors):
        whole = torch.zeros(shape, dtype=DTYPES[dtype]) if empty else some(shape, DTYPES[dtype], number)
        on = meshes[(mesh + shift) % 2]
        if shape:  # every rank has the whole: nothing is sent, for gloo does not know all types
            whole = distribute_tensor(whole, on, placements(on, choice + shift, len(shape)), src_data_rank=None)
        found[f"t{number}"] = whole
    return found


TENSORS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 6), max_size=3).map(tuple),
        st.integers(0, len(DTYPES) - 1),
        st.integers(0, 1),
        st.integers(0, 15),
    ),
    min_size=1,
    max_size=5,
)


def part(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _save_random(rank, folder, cases):
    with Checkpointer(folder, CONFIG) as ckpt:
        for step, tensors in enumerate(cases):
            ckpt.save(step, {"w": {**spread(tensors, 4, (2, 2)), "n": step}})
        ckpt.wait()
        dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)


def _resume_random(rank, folder, cases, world, sizes):
    with Checkpointer(folder, CONFIG) as ckpt:
        for step, tensors in enumerate(cases):
            state = {"w": {**spread(tensors, world, sizes, empty=True, shift=step + world), "n": -1}}
            ckpt.resume(state, step=step)
            assert state["w"]["n"] == step
            for name, expected in spread(tensors, world, sizes, shift=step + world).items():
                found, wanted = map(part, (state["w"][name], expected))
                assert torch.equal(raw(found), raw(wanted)), (step, name, tensors)


@spreads_empty_shards
def test_four_ranks_save_and_die_and_any_number_goes_on(tmp_path):
    """30 states of random shapes, types, meshes and placements, SIGKILL, then 1, 2 and 3 ranks: equal bit for bit."""
    cases = []

    @settings(max_examples=30, database=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    @given(TENSORS)
    def collect(tensors):
        cases.append(tensors)

    collect()
    outcomes = spawn_ranks(_save_random, 4, str(tmp_path), cases, timeout_s=100)
    assert [outcome.exit_code for outcome in outcomes] == [-signal.SIGKILL] * 4, [outcome.error for outcome in outcomes]
    for world, sizes in ((1, (1, 1)), (2, (2, 1)), (3, (1, 3))):
        values(spawn_ranks(_resume_random, world, str(tmp_path), cases, world, sizes, timeout_s=100))


# ---------------------------------------------------------------- FSDP2


def _go_on(rank, world, folder, shape, shard):
    model, optimizer = build(world, shape=shape, shard=shard)
    with Checkpointer(folder, CONFIG) as ckpt:
        state = {"model": model, "optimizer": optimizer, "x": {"a": 0}}
        assert ckpt.resume(state).step == 2
        assert state["x"] == {"a": 3}
        found = whole(model, optimizer)
        train(model, optimizer, 1, rank)
    return found


@pytest.mark.parametrize(
    ("saves", "resumes", "snapshot"),
    [
        pytest.param((4, None, True), [(1, None, True), (2, None, True)], "eager", marks=pytest.mark.thorough),
        ((4, (2, 2), True), [(1, None, False), (3, None, True)], "overlapped"),
        pytest.param((2, None, True), [(4, (2, 2), True)], "overlapped", marks=pytest.mark.thorough),
        ((1, None, False), [(2, None, True), (4, (2, 2), True)], "eager"),
    ],
)
def test_a_model_and_its_optimizer_go_on_in_another_mesh(tmp_path, saves, resumes, snapshot):
    """1 to 4 ranks, 1-D and 2-D meshes, unsharded on one rank, in either direction: weights and optimizer bit for bit."""
    world, shape, shard = saves
    taken = values(spawn_ranks(train_and_save, world, world, str(tmp_path), shape, snapshot, shard))[0]
    for world, shape, shard in resumes:
        for found in values(spawn_ranks(_go_on, world, world, str(tmp_path), shape, shard)):
            same(found, taken)


def test_replicated_tensors_are_written_once_and_spread(tmp_path):
    """Every chunk has one place, equal files sizes within reason, and each rank's bytes are in the manifest."""
    values(spawn_ranks(_replicated, 4, str(tmp_path)))
    folder = tmp_path / "step-00000000"
    sizes = [entry.size_bytes for entry in read_manifest(folder).files if entry.path.endswith(".distcp")]
    assert len(sizes) == 4
    assert max(sizes) < 1.2 * min(sizes)
    assert sum(sizes) < 1.1 * 40 * 4 * 10_000
    metadata = dcp_read.read_metadata(folder)
    chunks = sum(
        len(known.chunks) for known in metadata.state_dict_metadata.values() if isinstance(known, TensorStorageMetadata)
    )
    assert len(metadata.storage_data) == chunks == 40


def _replicated(rank, folder):
    mesh = init_device_mesh("cpu", (4,))
    state = {f"t{number}": distribute_tensor(torch.ones(10_000), mesh, [Replicate()]) for number in range(40)}
    with Checkpointer(folder, CONFIG) as ckpt:
        ckpt.save(0, {"w": state}).result()


def _change_of_plans(rank, folder):
    mesh = init_device_mesh("cpu", (2,))
    sent = []
    original = dcp_plan.ShardPlanner._say

    def say(self, name, item):
        told = original(self, name, item)
        sent.append(told["plan"] is not None)
        return told

    dcp_plan.ShardPlanner._say = say
    with Checkpointer(folder, CONFIG) as ckpt:
        for step, size in enumerate([5, 5, 5, 8, 8]):
            text = "x" * step  # of another length each time
            state = {"w": {"t": distribute_tensor(torch.full((size,), float(step)), mesh, [Shard(0)]), "text": text}}
            ckpt.save(step, state).result()
        for step, size in enumerate([5, 5, 5, 8, 8]):
            state = {"w": {"t": distribute_tensor(torch.zeros(size), mesh, [Shard(0)]), "text": ""}}
            ckpt.resume(state, step=step)
            assert state["w"]["text"] == "x" * step
            assert torch.equal(state["w"]["t"].full_tensor(), torch.full((size,), float(step)))
    return sent


def test_a_plan_is_sent_only_when_it_has_changed(tmp_path):
    """Five saves with one change of shape: two plans travel; objects may change their length all the same."""
    assert values(spawn_ranks(_change_of_plans, 2, str(tmp_path))) == [[True, False, False, True, False]] * 2


class Partly(torch.nn.Module):
    """One layer is frozen and one is not used, so neither has state in the optimizer."""

    def __init__(self):
        super().__init__()
        self.used, self.unused, self.frozen = (torch.nn.Linear(6, 6) for _ in range(3))
        self.norm = torch.nn.BatchNorm1d(6)
        self.frozen.requires_grad_(False)

    def forward(self, x):
        return self.norm(self.frozen(self.used(x)))


def partly(shard, kind):
    torch.manual_seed(5)
    model = Partly()
    if shard:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [{"params": trained[:2], "lr": 0.3}, {"params": trained[2:], "lr": 0.1}]
    return model, torch.optim.SGD(groups, momentum=0.9) if kind == "SGD" else torch.optim.AdamW(groups)


def steps_of(model, optimizer, count, rank):
    for step in range(count):
        torch.manual_seed(step)
        model(torch.randn(8, 6)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    if rank and hasattr(model, "norm"):
        model.norm.running_mean.fill_(7.0)  # what is no DTensor is rank 0's to say


def _partly(rank, folder, kind, shard, first):
    model, optimizer = partly(shard, kind)
    reference, other = partly(shard, kind)
    with Checkpointer(folder, CONFIG) as ckpt:
        state = {"optimizer": optimizer, "model": model}  # the optimizer first
        if not first:
            assert ckpt.resume(state).step == 3
            assert float(model.norm.running_mean.sum()) < 1
            assert [group["lr"] for group in optimizer.param_groups] == [0.3, 0.1]
            return {
                key: [bool(optimizer.state.get(p)) for p in g["params"]] for key, g in enumerate(optimizer.param_groups)
            }
        ckpt.save(0, state).result()  # there is no state yet; that changes nothing
        steps_of(model, optimizer, 3, rank)
        with torch.no_grad():
            model(torch.randn(8, 6))  # after such a forward FSDP2 shows other parameters
        ckpt.save(3, state).result()
        steps_of(reference, other, 3, rank)
    return [torch.equal(a, b) for a, b in zip(_values(model), _values(reference), strict=True)]


def _values(model):
    return [value.full_tensor() if isinstance(value, DTensor) else value for value in model.parameters()]


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_saving_changes_nothing_and_state_that_is_not_there_is_not_needed(tmp_path, kind):
    """A save before the first step takes none; frozen and unused layers have no state; rank 0 says what is no DTensor.

    From sharded to sharded, to one rank, and from one rank to sharded; two groups, the optimizer named before the model.
    """
    for name, saves, resumes in (("a", (2, True), [(2, True), (1, False)]), ("b", (1, False), [(2, True)])):
        folder = str(tmp_path / name)
        for found in values(spawn_ranks(_partly, saves[0], folder, kind, saves[1], True)):
            assert all(found)
        for world, shard in resumes:
            for groups in values(spawn_ranks(_partly, world, folder, kind, shard, False)):
                assert groups == {0: [True, True], 1: [False, False, True, True]}


def _other_target(rank, folder, what):
    mesh = init_device_mesh("cpu", (2,))
    layers = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)]
    two, one = torch.nn.Sequential(*layers), torch.nn.Sequential(layers[0])
    part = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
    for module in (two, one):
        for layer in module:
            if not isinstance(layer.weight, DTensor):
                fully_shard(layer, mesh=mesh)
    conjugate = torch.tensor([1 + 2j, 3 - 4j]).conj()
    with Checkpointer(folder, CONFIG) as ckpt:
        ckpt.save(
            1, {"m": two, "w": {"a": part, "more": {"x": 3}, "l": [part, torch.ones(2)], "c": conjugate}}
        ).result()
        target = {
            "module": {"m": one},
            "dtype": {"w": {"a": distribute_tensor(torch.zeros(4).half(), mesh, [Shard(0)])}},
            "partial": {"w": {"a": DTensor.from_local(torch.zeros(4), mesh, [Partial()])}},
            "more": {"w": {"a": distribute_tensor(torch.zeros(4), mesh, [Shard(0)])}},
        }[what]
        try:
            ckpt.resume(target)
        except RestoreError as error:
            return str(error)
    assert target["w"]["more"] == {"x": 3}
    assert torch.equal(target["w"]["l"][1], torch.ones(2))
    assert torch.equal(target["w"]["c"], torch.tensor([1 - 2j, 3 + 4j]))
    return torch.equal(target["w"]["a"].full_tensor(), torch.arange(4.0))


@pytest.mark.parametrize(
    ("what", "match"), [("module", "no place for"), ("dtype", "float16"), ("partial", "redistribute"), ("more", None)]
)
def test_nothing_of_a_checkpoint_is_dropped_or_converted_in_silence(tmp_path, what, match):
    """A module with fewer layers, another type, a sum: refused on all ranks. What a dict lacks is added, whole."""
    for found in values(spawn_ranks(_other_target, 2, str(tmp_path), what)):
        assert found is True if match is None else match in found


# ---------------------------------------------------------------- refusals and damage


class _Fails:
    """A Stateful that fails on one rank."""

    def __init__(self, fails, state):
        self.fails, self.state = fails, state

    def state_dict(self):
        if self.fails:
            raise RuntimeError("mine")
        return self.state

    def load_state_dict(self, state):
        pass


def _refused(rank, folder, what):
    mesh = init_device_mesh("cpu", (2,))
    model, optimizer = build(2)
    part = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    state = {
        "alone": {"optimizer": optimizer},
        "partial": {"w": {"a": part, "b": DTensor.from_local(torch.ones(2), mesh, [Partial()])}},
        "object": {"w": {"a": part, "b": object() if rank else 1}},
        "items": {"w": {"a": part}, **({"v": {"a": part}} if rank else {"v": {"a": 1}})},
        "own": {"w": PerRank({"a": part})},
        "meta": {"w": {"a": part, "b": torch.ones(2, device="meta")}},
        "keys": {"w": {"a": part, "b": {1: 2}}},
        "dots": {"w": {"a": part, "b": {"c": {"d": 1}, "c.d": 2}}},
        "both": {"w": {"b.c": part}, "w.b": {"c": part}},
        "file": {"x": 1, "X.json": {"a": part}},
        "manifest": {"manifest.json": {"a": part}},
        "fails": {"w": _Fails(rank == 1, {"a": part})},
        "layout": {"w": {"a": part}},
    }[what]
    original = dcp_plan._lay_out

    def fail_once(*_):
        dcp_plan._lay_out = original
        raise MemoryError("mine")

    if what == "layout" and rank == 1:
        dcp_plan._lay_out = fail_once
    with Checkpointer(folder, CONFIG) as ckpt:
        try:
            ckpt.save(0, state).result()
        except (SafeCheckpointError, RuntimeError, MemoryError) as error:
            problem = type(error), str(error)
        ckpt.save(1, {"model": model}).result()
    return problem


@pytest.mark.parametrize(
    ("what", "kind", "match"),
    [
        ("alone", StateError, "give the module"),
        ("partial", StateError, "redistribute"),
        ("object", StateError, "builtins.object"),
        ("items", DesyncError, "sharded items"),
        ("own", StateError, "DTensor"),
        ("meta", StateError, "meta"),
        ("keys", StateError, "keys must be text"),
        ("dots", StateError, "joins keys by dots: duplicated flatten key w.b.c.d"),
        ("both", StateError, "two items come to this name"),
        ("file", StateError, "a file of state['x']"),
        ("manifest", StateError, "the manifest's name"),
        ("fails", RuntimeError, "mine"),
        ("layout", (RuntimeError, MemoryError), "mine"),
    ],
)
def test_a_sharded_state_that_cannot_be_saved_is_refused_on_every_rank(tmp_path, what, kind, match):
    """With its name and what to do; the next save works."""
    for found, text in values(spawn_ranks(_refused, 2, str(tmp_path), what)):
        assert issubclass(found, kind)
        assert match in text


def _resume_only(rank, folder, shape=(9, 17)):
    mesh = init_device_mesh("cpu", (2,))
    with Checkpointer(folder, CONFIG) as ckpt:
        state = {"w": {"a": distribute_tensor(torch.zeros(shape), mesh, [Shard(0)])}}
        try:
            return ckpt.resume(state).step, float(state["w"]["a"].full_tensor().sum())
        except SafeCheckpointError as error:
            return type(error), str(error)


def _save_two(rank, folder):
    mesh = init_device_mesh("cpu", (2,))
    with Checkpointer(folder, CONFIG) as ckpt:
        for step in (1, 2):
            ckpt.save(
                step, {"w": {"a": distribute_tensor(torch.full((9, 17), float(step)), mesh, [Shard(0)])}}
            ).result()


@pytest.mark.parametrize("damage", ["bit", "metadata", pytest.param("missing", marks=pytest.mark.thorough)])
def test_damage_is_found_on_whichever_rank_reads_it(tmp_path, damage):
    """A flipped bit in rank 1's shard or in ``.metadata``, or a lost shard: all ranks take the checkpoint before.

    What lost a shard stays where it is: it may come back.
    """
    values(spawn_ranks(_save_two, 2, str(tmp_path)))
    folder = tmp_path / "step-00000002"
    if damage == "missing":
        (folder / "w/__1_0.distcp").unlink()
    else:
        file = folder / ("w/__1_0.distcp" if damage == "bit" else ".metadata")
        flip_bit(file, file.stat().st_size // 2)
    assert values(spawn_ranks(_resume_only, 2, str(tmp_path))) == [(1, 153.0)] * 2
    assert (tmp_path / "step-00000002").exists() is (damage == "missing")


def test_another_shape_is_refused_and_nothing_is_changed(tmp_path):
    """The error names the item, and the checkpoint is not treated as corrupt."""
    values(spawn_ranks(_save_two, 2, str(tmp_path)))
    for kind, text in values(spawn_ranks(_resume_only, 2, str(tmp_path), (9, 18))):
        assert kind is RestoreError
        assert "state['w']" in text
    assert values(spawn_ranks(_resume_only, 2, str(tmp_path))) == [(2, 306.0)] * 2


class _Hostile:
    def __reduce__(self):
        return os.system, ("touch /tmp/safe_ckpt_was_here",)


def test_a_hostile_metadata_runs_nothing(tmp_path):
    """Only DCP's own records are built from ``.metadata``."""
    (tmp_path / ".metadata").write_bytes(pickle.dumps(_Hostile()))
    with pytest.raises(CorruptCheckpointError, match="system"):
        dcp_read.read_metadata(tmp_path)


def _resumes_beside_a_hostile_object(rank, folder):
    mesh, newest = init_device_mesh("cpu", (1,)), folder / "step-00000002"
    with Checkpointer(folder, CONFIG) as ckpt:
        for step in (1, 2):
            state = {"w": {"t": distribute_tensor(torch.ones(4), mesh, [Shard(0)]), "note": str(step)}}
            ckpt.save(step, state).result()
        torch.save(_Hostile(), newest / "more.distcp")
        metadata = dcp_read.read_metadata(newest)
        (index,) = [one for one in metadata.storage_data if one.fqn == "w.note"]
        size = (newest / "more.distcp").stat().st_size
        metadata.storage_data[index] = _StorageInfo("more.distcp", 0, size)
        data = pickle.dumps(metadata)
        (newest / ".metadata").write_bytes(data)
        facts = {"size_bytes": len(data), "xxh3_128": xxhash.xxh3_128(data).hexdigest()}
        rewrite(newest, lambda manifest: [one.update(facts) for one in manifest["files"] if one["path"] == ".metadata"])
        return ckpt.resume(state).step, state["w"]["note"]


def test_a_hostile_object_beside_shards_is_passed_over(tmp_path):
    """Its digests are right, and nothing of it is run: the resume goes on with the checkpoint before it."""
    assert values(spawn_ranks(_resumes_beside_a_hostile_object, 1, tmp_path)) == [(1, "1")]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.uint16, torch.int64, torch.float16, torch.complex128])
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (130, 70)])
def test_an_entry_is_what_torch_load_reads(dtype, shape):
    """Any type and shape, with ``weights_only``; large elements begin at a page."""
    around = distcp.envelope(dtype, shape)
    tensor = some(shape, torch.int8, 1).to(dtype)
    data = around.head + bytes(raw(tensor).tolist()) + around.tail
    assert len(data) == around.length
    loaded = torch.load(io.BytesIO(data), weights_only=True)
    assert loaded.dtype == dtype
    assert loaded.shape == tensor.shape
    assert torch.equal(raw(loaded), raw(tensor))
    assert len(around.head) % around.alignment == 0


def _save_many(rank, folder, count, part_bytes):
    store._PART_BYTES, store._MOST_PARTS = part_bytes, 60_000
    mesh = init_device_mesh("cpu", (2,))
    rows = torch.arange(count, dtype=torch.float32).mul_(2).add_(rank).split(1)
    state = {
        f"layer.{number}.weight": DTensor.from_local(row.clone(), mesh, [Shard(0)], run_check=False)
        for number, row in enumerate(rows)
    }
    with Checkpointer(folder, CONFIG) as ckpt:
        ckpt.save(1, {"w": state}).result(timeout_s=60)
        keys = store_keys(ckpt)
        for value in state.values():
            value.to_local().zero_()
        assert ckpt.resume({"w": state}).step == 1
    assert all(value.to_local().equal(row) for value, row in zip(state.values(), rows, strict=True))
    return keys


@pytest.mark.parametrize(
    ("count", "part_bytes"),
    [
        (300, 64),
        pytest.param(45_000, 4 << 20, marks=[pytest.mark.thorough, pytest.mark.timeout(300)]),
    ],
)
def test_plans_above_the_limit_of_the_store_are_saved_and_leave_no_key(tmp_path, count, part_bytes):
    """A state whose plan is larger than one value of the store may be: saved and resumed, and nothing of it stays there."""
    for keys in values(spawn_ranks(_save_many, 2, tmp_path, count, part_bytes, timeout_s=250)):
        assert keys < 60
