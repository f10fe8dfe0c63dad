"""``safe_ckpt.dcp``: real ranks save and load as with ``torch.distributed.checkpoint``; what fails is seen by all."""

import os
import resource
import signal
import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock
from torch import nn
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from kit import limits
from kit.ranks import free_port, spawn_ranks, values
from safe_ckpt import CheckpointConfig, Retention, Timeouts, dcp
from safe_ckpt.core.formats.manifest import read_manifest
from safe_ckpt.errors import (
    ConfigError,
    DesyncError,
    DirectoryError,
    NoValidCheckpointError,
    PeerLostError,
    RendezvousTimeout,
    RestoreError,
    SafeCheckpointError,
    StateError,
)
from support import flip_bit

# DCP's own, in a process without a process group.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
QUICK = CheckpointConfig(timeouts=limits.QUICK)


class Run:
    """A model of FSDP2 and its optimizer as one Stateful, as DCP's tutorial has it."""

    def __init__(self, seed, steps=0):
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(16, 33), nn.ReLU(), nn.Linear(33, 4))
        fully_shard(self.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.train(steps)

    def train(self, steps):
        for _ in range(steps):
            self.model(torch.ones(2, 16)).sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state):
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    def whole(self):
        """All of it as whole tensors."""
        found = {name: value.full_tensor() for name, value in self.model.state_dict().items()}
        for number, kept in self.optimizer.state_dict()["state"].items():
            for name, value in kept.items():
                found[f"{number}.{name}"] = value.full_tensor() if hasattr(value, "full_tensor") else value
        return found


def _save(rank, path, module, steps):
    run = Run(1, steps)
    (stock if module == "stock" else dcp).save({"run": run, "step": steps, "list": [1, "two"]}, checkpoint_id=path)
    return run.whole()


def _load(rank, path, module):
    run, state = Run(7), {"step": 0, "list": [0, ""]}
    (stock if module == "stock" else dcp).load({"run": run} | {"step": 0}, checkpoint_id=path)
    (stock if module == "stock" else dcp).load(state, checkpoint_id=path)
    return run.whole(), state


def _same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("saves", "loads"), [("ours", "stock"), ("stock", "ours"), ("ours", "ours")])
def test_stock_dcp_and_ours_load_each_others_checkpoints(tmp_path, saves, loads):
    """FSDP2's model and optimizer of 2 ranks, bit for bit on 3 and on 1, whichever of the two saves and whichever loads."""
    saved = values(spawn_ranks(_save, 2, tmp_path / "one", saves, 3))[0]
    for size in (3, 1):
        for found, state in values(spawn_ranks(_load, size, tmp_path / "one", loads)):
            assert _same(found, saved)
            assert state == {"step": 3, "list": [1, "two"]}
    if saves == "ours":
        listed = {entry.path for entry in read_manifest(tmp_path / "one").files}
        assert listed == {".metadata", "__0_0.distcp", "__1_0.distcp"}


def _in_the_background(rank, path):
    dcp.configure(retention=Retention(keep_last=2))
    run, uploads, expected = Run(1, 1), [], []
    for step in (1, 2, 3, 4):
        run.train(1)
        uploads.append(dcp.async_save({"run": run, "step": step}, checkpoint_id=path / f"step-{step}"))
        expected.append(run.whole())
        with torch.no_grad():  # at once, while it is written
            for parameter in run.model.parameters():
                parameter.zero_()
    names = [sorted(upload.result(60).state_dict_metadata) for upload in uploads]
    assert all(upload.done() and upload.exception() is None for upload in uploads)
    dcp.async_save({"step": 5, "large": torch.ones(4 << 20)}, checkpoint_id=path / "other-5")
    large = {"large": torch.zeros(4 << 20)}
    dcp.load(large, checkpoint_id=path / "other-5")  # waits for what is on its way
    assert large["large"].all()
    again, state = Run(9), {"step": 0}
    dcp.load({"run": again, **state}, checkpoint_id=path / "step-4")
    dcp.load(state, checkpoint_id=path / "latest")
    return names[0] == names[3], state["step"], _same(again.whole(), expected[3])


@pytest.mark.timeout(300)
def test_background_saves_hold_the_state_at_the_call_and_two_stay(tmp_path):
    """Each holds what was there when it was called; two stay; the newest is loaded by the directory and by ``latest``."""
    assert values(spawn_ranks(_in_the_background, 2, tmp_path / "run")) == [(True, 5, True)] * 2
    assert sorted(os.listdir(tmp_path / "run")) == [".safe_ckpt", "other-5", "step-3", "step-4"]


class Raises:
    """A Stateful of which one rank has no state."""

    def __init__(self, here):
        self.here = here

    def state_dict(self):
        if self.here:
            raise ZeroDivisionError("mine alone")
        return {"a": torch.ones(2)}

    def load_state_dict(self, state):
        pass


def _failing(rank, path, kind):
    dcp.configure(QUICK)
    dcp.save({"a": torch.ones(2)}, checkpoint_id=path / "step-1")
    begun, error = time.monotonic(), None
    try:
        if kind == "state":
            dcp.save({"a": Raises(rank == 1)}, checkpoint_id=path / "step-2")
        elif kind == "argument":
            dcp.save({"a": 1}, checkpoint_id=path / "step-2", planner=object() if rank == 1 else None)
        elif kind == "path":
            dcp.save({"a": 1}, checkpoint_id=path / f"step-{rank + 2}")
        elif kind == "shape":
            dcp.save({"a": torch.ones(2 + rank)}, checkpoint_id=path / "step-2")
        elif kind == "load":
            dcp.load({"b" if rank == 1 else "a": torch.ones(2)}, checkpoint_id=path / "step-1")
        elif kind == "path to load":
            dcp.load({"a": torch.ones(2)}, checkpoint_id=path / f"step-{rank}")
    except Exception as raised:
        error = raised, time.monotonic() - begun
    dcp.save({"a": torch.full((2,), 3.0)}, checkpoint_id=path / "step-3")  # and the ranks are together again
    return error


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("kind", "others", "own"),
    [
        ("state", SafeCheckpointError, ZeroDivisionError),
        ("argument", ConfigError, ConfigError),
        ("path", DesyncError, DesyncError),
        ("shape", DesyncError, DesyncError),
        ("load", RestoreError, RestoreError),
        ("path to load", DesyncError, DesyncError),
    ],
)
def test_a_rank_that_fails_or_differs_fails_the_save_on_all(tmp_path, kind, others, own):
    """All ranks raise, within seconds; nothing appears; the next save works."""
    outcomes = values(spawn_ranks(_failing, 3, tmp_path / "run", kind))
    for rank, (error, seconds) in enumerate(outcomes):
        assert isinstance(error, own if rank == 1 else others), error
        assert seconds < 15
    if kind in ("state", "argument", "load"):
        assert "rank 1" in str(outcomes[0][0])
    assert sorted(os.listdir(tmp_path / "run")) == [".safe_ckpt", "step-1", "step-3"]


def _one_stays_away(rank, path):
    short = CheckpointConfig(timeouts=Timeouts(barrier_s=4, lengthy_s=6, peer_stall_s=3))
    dcp.configure(short)
    dcp.save({"a": 1}, checkpoint_id=path / "step-1")
    if rank == 1:
        os._exit(3)
    begun = time.monotonic()
    try:
        dcp.save({"a": 2}, checkpoint_id=path / "step-2")
    except Exception as error:
        return error, time.monotonic() - begun


@pytest.mark.timeout(120)
def test_a_killed_rank_is_named_by_the_others(tmp_path):
    """The others do not wait for ever in a collective: they raise, with its number."""
    outcomes = spawn_ranks(_one_stays_away, 3, tmp_path / "run")
    for rank in (0, 2):
        error, seconds = outcomes[rank].value
        assert isinstance(error, PeerLostError | RendezvousTimeout), error
        assert "1" in str(error)
        assert seconds < 30
    assert [name for name in os.listdir(tmp_path / "run") if name != ".safe_ckpt"] == ["step-1"]


def _full_on_one(rank, path):
    dcp.configure(QUICK)
    mesh = init_device_mesh("cpu", (2,))
    state = {"w": distribute_tensor(torch.ones(2 << 20), mesh, [Shard(0)])}
    dcp.save(state, checkpoint_id=path / "step-1")
    if rank == 1:  # of this rank no file gets larger, as on a disk that is full
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    upload = dcp.async_save(state, checkpoint_id=path / "step-2")
    error = upload.exception(60)
    unseen = dcp.async_save(state, checkpoint_id=path / "step-3")
    unseen.handle.wait_until_over()  # nobody looks at its error
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    try:
        dcp.save(state, checkpoint_id=path / "step-4")
    except SafeCheckpointError as raised:
        dcp.save(state, checkpoint_id=path / "step-5")
        return error, raised
    return error, None


@pytest.mark.timeout(120)
def test_a_failure_in_the_background_is_known_to_every_rank(tmp_path):
    """Every rank's future raises what one rank's disk has said; an error that nobody looked at is raised by the next save."""
    for error, raised in values(spawn_ranks(_full_on_one, 2, tmp_path / "run")):
        assert isinstance(error, SafeCheckpointError)
        assert "rank 1" in str(error)
        assert isinstance(raised, SafeCheckpointError)
        assert "step-3" in str(raised)
    assert sorted(os.listdir(tmp_path / "run")) == [".safe_ckpt", "step-1", "step-5"]


def _newest(rank, path):
    state = {"a": torch.zeros(1000), "step": 0}
    dcp.load(state, checkpoint_id=path)
    return state["step"], state["a"].unique().tolist()


@pytest.mark.timeout(120)
def test_a_damaged_newest_is_passed_over_by_all(tmp_path):
    """2 ranks load the older one, whole; a checkpoint that is named is not replaced by another one."""
    for step in (1, 2):
        dcp.save({"a": torch.full((1000,), float(step)), "step": step}, checkpoint_id=tmp_path / "run" / f"step-{step}")
    flip_bit(tmp_path / "run/step-2/__0_0.distcp", 3000)
    assert values(spawn_ranks(_newest, 2, tmp_path / "run")) == [(1, [1.0])] * 2
    state = {"a": torch.zeros(1000)}
    with pytest.raises(NoValidCheckpointError, match="not those that were written"):
        dcp.load(state, checkpoint_id=tmp_path / "run/step-2")
    assert not state["a"].any()


@pytest.mark.quick
def test_ours_come_before_stocks_in_one_directory(tmp_path):
    """Ours come first in the order of their commits, then stock's by number; a torn one of stock's is none."""
    for step in (7, 20):
        stock.save({"step": step}, checkpoint_id=tmp_path / f"step-{step}", no_dist=True)
    (tmp_path / "step-20/.metadata").unlink()
    state = {"step": 0}
    dcp.load(state, checkpoint_id=tmp_path)
    assert state == {"step": 7}
    dcp.save({"step": 5}, checkpoint_id=tmp_path / "step-5")
    dcp.load(state, checkpoint_id=tmp_path)
    assert state == {"step": 5}
    with pytest.raises(NoValidCheckpointError, match="there is no checkpoint"):
        dcp.load(state, checkpoint_id=tmp_path / "step-20")
    (tmp_path / "step-5/.metadata").unlink()
    with pytest.raises(NoValidCheckpointError, match=r"step-5.*\n.*\.metadata"):
        dcp.load(state, checkpoint_id=tmp_path / "step-5")
    os.symlink("step-7", tmp_path / "latest")  # a name that is there is that
    dcp.load(state, checkpoint_id=tmp_path / "latest")
    assert state == {"step": 7}


def _overwriting(rank, path, module):
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    state = {"w": distribute_tensor(torch.arange(12.0) + world, mesh, [Shard(0)])}
    (stock if module == "stock" else dcp).save(state, checkpoint_id=path)


@pytest.mark.timeout(120)
def test_a_folder_that_is_saved_again_by_fewer_ranks_has_nothing_of_before(tmp_path):
    """Stock DCP leaves the files of ranks 2 and 3 there; ours replaces the folder in one step, and keeps what is the user's."""
    for module in ("stock", "ours"):
        values(spawn_ranks(_overwriting, 4, tmp_path / module, module))
        (tmp_path / module / "notes").mkdir()
        (tmp_path / module / "notes" / "mine.txt").write_text("mine")
        values(spawn_ranks(_overwriting, 2, tmp_path / module, module))
    assert (tmp_path / "stock/__3_0.distcp").exists()
    assert sorted(os.listdir(tmp_path / "ours")) == [
        ".metadata",
        "__0_0.distcp",
        "__1_0.distcp",
        "manifest.json",
        "notes",
    ]
    values(spawn_ranks(_overwriting, 2, tmp_path / "stock", "ours"))  # and what stock has left goes, too
    assert sorted(os.listdir(tmp_path / "stock")) == sorted(os.listdir(tmp_path / "ours"))
    assert (tmp_path / "stock/notes/mine.txt").read_text() == "mine"


def _sharded_tensors(rank, path):
    few = ChunkShardingSpec(dim=0, placements=["rank:0/cpu", "rank:1/cpu"])
    many = ChunkShardingSpec(dim=1, placements=["rank:1/cpu", "rank:0/cpu", "rank:0/cpu", "rank:1/cpu"])
    found = []
    for saves, loads in ((few, many), (many, few)):
        saved = sharded_tensor.rand(saves, 10, 20)
        dcp.save({"t": saved}, checkpoint_id=path / "one")
        for module in (dcp, stock):
            state = {"t": sharded_tensor.zeros(loads, 10, 20)}
            module.load(state, checkpoint_id=path / "one")
            whole = [torch.zeros(10, 20) if rank == 0 else None for _ in range(2)]
            saved.gather(out=whole[0])
            state["t"].gather(out=whole[1])
            found.append(rank != 0 or torch.equal(*whole))
    return found


@pytest.mark.timeout(120)
@pytest.mark.filterwarnings("ignore")
def test_the_older_sharded_tensor_is_loaded_in_another_sharding(tmp_path):
    """Several shards on one rank, saved in one way and loaded in another."""
    assert values(spawn_ranks(_sharded_tensors, 2, tmp_path)) == [[True] * 4] * 2


def _alone(rank, path):
    dcp.save({"rank": rank, "t": torch.full((3,), float(rank))}, checkpoint_id=path / f"rank-{rank}", no_dist=True)
    dist.barrier()  # of the test: it reads what the other one saves
    state = {"rank": -1, "t": torch.zeros(3)}
    dcp.load(state, checkpoint_id=path / f"rank-{1 - rank}", no_dist=True)
    return state["rank"], state["t"].tolist()


def _groups(rank, path):
    """The second group's first rank is not WORLD's: torch's own save once broke there."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = rank % 2
    dcp.save(
        {"mine": mine, "t": torch.full((4,), float(mine))}, checkpoint_id=path / f"{mine}", process_group=groups[mine]
    )
    state = {"mine": -1, "t": torch.zeros(4)}
    dcp.load(state, checkpoint_id=path / f"{mine}", process_group=groups[mine])
    dist.barrier()  # of all: rank 0 hosts the store of the process group
    return state["mine"], state["t"].tolist()


@pytest.mark.timeout(120)
def test_no_dist_and_two_groups_save_without_the_other_ranks(tmp_path):
    """``no_dist`` waits for nobody, and two groups save and load each its own."""
    assert values(spawn_ranks(_alone, 2, tmp_path / "alone")) == [(1, [1.0] * 3), (0, [0.0] * 3)]
    found = values(spawn_ranks(_groups, 4, tmp_path / "groups"))
    assert found == [(rank % 2, [float(rank % 2)] * 4) for rank in range(4)]


def _again(rank, path, ports):
    for step, port in enumerate(ports):
        dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"tcp://127.0.0.1:{port}")
        upload = dcp.async_save({"step": step}, checkpoint_id=path / "one")
        dist.destroy_process_group()
        upload.result(30)
    state = {"step": -1}
    dcp.load(state, checkpoint_id=path / "one")
    return state["step"]


@pytest.mark.timeout(120)
def test_a_new_process_group_saves_under_the_name_of_the_one_before(tmp_path):
    """What is in flight is finished, and the next group saves under the same name."""
    ports = [free_port(), free_port()]
    assert values(spawn_ranks(_again, 2, tmp_path, ports, init=False)) == [1, 1]


@pytest.mark.quick
def test_dcp_saves_and_loads_in_one_process_without_a_group(tmp_path):
    """All of it works in a plain script, and a failure in the background is told by the future, or by the next save."""
    model, optimizer = nn.Linear(4, 2), None
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    metadata = dcp.save({"model": model, "optimizer": optimizer, "n": 3}, checkpoint_id=tmp_path / "one")
    assert (
        metadata.state_dict_metadata.keys()
        == stock.FileSystemReader(tmp_path / "one").read_metadata().state_dict_metadata.keys()
    )
    again = nn.Linear(4, 2)
    state = {"model": again, "n": 0}
    dcp.load(state, checkpoint_id=tmp_path / "one")
    assert state["n"] == 3
    assert torch.equal(again.weight, model.weight)
    assert state["model"] is again
    stager = stock.staging.DefaultStager(stock.staging.StagingOptions(False, False, True, False))
    response = dcp.async_save({"n": 4}, checkpoint_id=tmp_path / "two", async_stager=stager)
    stager.close()
    response.staging_completion.result(0)
    assert response.upload_completion.result(30).state_dict_metadata.keys() == {"n"}
    response = dcp.async_save(
        {"n": 4}, checkpoint_id=tmp_path / "two", async_stager=stock.staging.BlockingAsyncStager()
    )
    assert response.result(30) is not None


def test_a_list_with_an_empty_dict_beside_values_is_loaded_as_it_was_saved(tmp_path):
    """A list of a number and an empty dict, which torch's own load does not take, comes back by ``dcp.load``."""
    dcp.save({"a": [1, {}], "t": torch.ones(2)}, checkpoint_id=tmp_path / "x", no_dist=True)
    into = {"a": [2, {}], "t": torch.zeros(2)}
    dcp.load(into, checkpoint_id=tmp_path / "x", no_dist=True)
    assert into["a"] == [1, {}]
    assert torch.equal(into["t"], torch.ones(2))


@pytest.mark.quick
def test_arguments_of_dcp_that_cannot_be_honoured_are_refused_by_name(tmp_path):
    """Each with the argument's name and what to do instead; nothing is written."""
    path = tmp_path / "one"
    refused = [
        ({"storage_writer": stock.FileSystemWriter(tmp_path / "x")}, ConfigError, "storage_writer"),
        ({"planner": type("Mine", (stock.DefaultSavePlanner,), {})()}, ConfigError, "planner"),
        ({"planner": stock.DefaultSavePlanner(flatten_state_dict=False)}, ConfigError, "flatten_state_dict"),
        ({"use_collectives": False}, ConfigError, "use_collectives"),
        ({"checkpoint_id": None}, ConfigError, "checkpoint_id"),
        ({"checkpoint_id": "s3://bucket/run"}, ConfigError, "checkpoint_id"),
        ({"checkpoint_id": os.getcwd()}, DirectoryError, "works in it"),
    ]
    for arguments, kind, text in refused:
        with pytest.raises(kind, match=text):
            dcp.save({"a": 1}, **{"checkpoint_id": path, **arguments})
    with pytest.raises(StateError, match="expected a dict"):
        dcp.save([1], checkpoint_id=path)
    with pytest.raises(ConfigError, match="storage_reader"):
        dcp.load({"a": 1}, checkpoint_id=path, storage_reader=stock.FileSystemReader(path))
    with pytest.raises(ConfigError, match="there is no such setting"):
        dcp.configure(retain=3)
    with pytest.raises(StateError, match="loss"):
        dcp.save({"a": 1}, checkpoint_id=path, metrics={"loss": "low"})
    with pytest.raises(AttributeError, match="use save"):
        dcp.save_state_dict  # noqa: B018
    assert dcp.FileSystemReader is stock.FileSystemReader
    assert os.listdir(tmp_path) == []


@pytest.mark.quick
def test_the_best_is_kept_by_the_metrics_of_a_save(tmp_path):
    """``metrics=`` of ``save`` and ``async_save`` is in the manifest, and ``keep_best`` goes by it."""
    dcp.configure(retention=Retention(keep_last=1, keep_best=1, metric="loss"))
    try:
        for step, loss in enumerate((3.0, 1.0, 2.0, 2.5), start=1):
            metrics = {"loss": torch.tensor(loss)}
            if step % 2:
                dcp.async_save({"n": step}, checkpoint_id=tmp_path / f"step-{step}", metrics=metrics).result()
            else:
                dcp.save({"n": step}, checkpoint_id=tmp_path / f"step-{step}", metrics=metrics)
        assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-2", "step-4"]
        assert read_manifest(tmp_path / "step-4").metrics == {"loss": 2.5}
    finally:
        dcp.configure(CheckpointConfig())


@pytest.mark.quick
def test_loads_honour_allow_partial_load_and_derived_planners(tmp_path):
    """``allow_partial_load`` is honoured, and so is a planner of one's own that derives from torch's."""

    class Doubles(stock.DefaultLoadPlanner):
        def load_bytes(self, read_item, value):
            super().load_bytes(read_item, value)
            self.original_state_dict["n"] *= 2

    dcp.save({"n": 3, "t": torch.ones(2)}, checkpoint_id=tmp_path / "one")
    state = {"n": 0, "more": torch.full((2,), 5.0)}
    with pytest.raises(RestoreError, match="more"):
        dcp.load(state, checkpoint_id=tmp_path / "one")
    dcp.load(state, checkpoint_id=tmp_path / "one", planner=stock.DefaultLoadPlanner(allow_partial_load=True))
    assert (state["n"], state["more"].tolist()) == (3, [5.0, 5.0])
    state = {"n": 0}
    dcp.load(state, checkpoint_id=tmp_path / "one", planner=Doubles())
    assert state == {"n": 6}


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.quick
def test_a_load_of_an_object_that_would_run_code_is_refused(tmp_path):
    """An object that would run code is refused, by its name, before a tensor is touched; what is not asked for is let be."""
    stock.save({"t": torch.ones(2), "evil": Evil(tmp_path / "made")}, checkpoint_id=tmp_path / "one", no_dist=True)
    state = {"t": torch.zeros(2), "evil": None}
    with pytest.raises(SafeCheckpointError, match="evil cannot be read without running code"):
        dcp.load(state, checkpoint_id=tmp_path / "one")
    assert not state["t"].any()
    assert not (tmp_path / "made").exists()
    state = {"t": torch.zeros(2)}
    dcp.load(state, checkpoint_id=tmp_path / "one")
    assert state["t"].all()


@pytest.mark.quick
def test_retention_counts_only_folders_that_differ_in_their_number(tmp_path):
    """Folders whose names differ in more than their number, and those of other tools, are no siblings."""
    dcp.configure(retention=Retention(keep_last=1))
    try:
        for step in (1, 2):
            dcp.save({"m": step}, checkpoint_id=tmp_path / f"model-{step}")
            dcp.save({"o": step}, checkpoint_id=tmp_path / f"optimizer-{step}")
        stock.save({"m": 1}, checkpoint_id=tmp_path / "model-0", no_dist=True)
        dcp.save({"m": 3}, checkpoint_id=tmp_path / "model-3")
    finally:
        dcp.configure(CheckpointConfig())
    assert sorted(os.listdir(tmp_path)) == [".safe_ckpt", "model-0", "model-3", "optimizer-2"]


def test_a_folder_that_holds_something_else_is_not_replaced(tmp_path):
    """Something of another tool of ours, or with checkpoints in it, is not replaced."""
    import safe_ckpt

    with safe_ckpt.publishing(tmp_path / "run", 1) as folder:
        (folder / "file").write_text("x")
    (tmp_path / "run/.safe_ckpt").mkdir(exist_ok=True)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for path, why in (
        (tmp_path / "run/step-00000001", "it is no dcp directory of safe_ckpt, so it is not replaced"),
        (tmp_path / "run", "checkpoints are kept in it, so it is not replaced"),
    ):
        for save in (dcp.save, lambda *args, **named: dcp.async_save(*args, **named).result(30)):
            with pytest.raises(DirectoryError) as caught:
                save({"a": 1}, checkpoint_id=path)
            assert caught.value.path == str(path)
            assert caught.value.message.startswith(why)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_save_to_a_link_replaces_what_it_leads_to(tmp_path):
    """As torch does: what it leads to is replaced, and the link stays; also where there is nothing behind it yet."""
    for name in ("there", "new"):
        link, target = tmp_path / f"to-{name}", tmp_path / "elsewhere" / name
        if name == "there":
            dcp.save({"a": 1}, checkpoint_id=target)
        link.symlink_to(target)
        dcp.async_save({"a": 2}, checkpoint_id=link).result(30)
        dcp.save({"a": 3}, checkpoint_id=link)
        assert link.is_symlink()
        for path in (link, target):
            state = {"a": 0}
            dcp.load(state, checkpoint_id=path)
            assert state == {"a": 3}
    assert sorted(os.listdir(tmp_path)) == ["elsewhere", "to-new", "to-there"]


def _in_a_block(rank, path):
    import safe_ckpt

    said = []
    for name in (".", "model"):
        for save in (dcp.save, dcp.async_save):
            try:
                with safe_ckpt.publishing(path, 1, config=QUICK) as folder:
                    save({"a": 1}, checkpoint_id=folder / name)
            except ConfigError as error:
                said.append(str(error))
    with safe_ckpt.publishing(path, 1, config=QUICK) as folder:
        stock.save({"a": 1}, checkpoint_id=folder / "model")
    return said, folder.exists()


@pytest.mark.timeout(180)
def test_a_save_of_ours_within_publishing_is_refused_and_torchs_works(tmp_path):
    """All ranks are told what to do instead, nothing appears; then torch's own save makes the block's folder a checkpoint."""
    for said, still in values(spawn_ranks(_in_a_block, 2, tmp_path / "run")):
        assert len(said) == 4
        assert all("torch.distributed.checkpoint's own save" in text for text in said)
        assert not still  # the folder has its name
    assert sorted(os.listdir(tmp_path / "run/step-00000001")) == ["manifest.json", "model"]
    state = {"a": 0}
    stock.load(state, checkpoint_id=tmp_path / "run/step-00000001/model", no_dist=True)
    assert state == {"a": 1}
