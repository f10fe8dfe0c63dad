"""An Accelerator whose model FSDP2 shards, on two gloo ranks.

Accelerate offers FSDP2 on accelerators only; here the state is told by hand that this is one of FSDP. All else is real: its
``prepare``, its optimizer wrapper, its own ``save_state`` and ``load_state`` for comparison.
"""

import os
import shutil
import signal

import pytest
import torch
import torch.distributed as dist
from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from safetensors.torch import load_file

from accelerate_runs import CONFIG, forget, make, seed, train
from host_runs import config as per_host
from host_runs import move_to_host, why_no_mounts
from kit.ranks import spawn_ranks, values
from safe_ckpt.accelerate import register
from safe_ckpt.core.formats.manifest import read_manifest
from safe_ckpt.core.formats.verify import verify_files
from safe_ckpt.errors import ConfigError, DesyncError, NoValidCheckpointError, SafeCheckpointError
from support import flip_bit


def plugin(kind="SHARDED_STATE_DICT", version=2):
    return FullyShardedDataParallelPlugin(
        fsdp_version=version,
        state_dict_type=kind,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Linear"],
        cpu_ram_efficient_loading=False,
    )


def accelerator(rank, folder, kind="SHARDED_STATE_DICT", version=2, **more):
    forget()
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=os.environ["WORLD_SIZE"], ACCELERATE_USE_FSDP="true")
    made = make(folder, **more)
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    made.state.distributed_type = DistributedType.FSDP
    made.state.fsdp_plugin = plugin(kind, version)
    return made


def training(made, number=0):
    seed(number)
    model = torch.nn.Sequential(torch.nn.Linear(4, 33), torch.nn.LayerNorm(33), torch.nn.Linear(33, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    model, optimizer = made.prepare(model, optimizer)
    scheduler = made.prepare(torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 2, gamma=0.5))
    return model, optimizer, scheduler


def whole(model):
    return {name: value.full_tensor().clone() for name, value in model.state_dict().items()}


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def _go(rank, folder, kind):
    made = accelerator(rank, folder / "straight", kind)
    parts = training(made)
    train(made, parts, 5)
    expected = whole(parts[0])

    made = accelerator(rank, folder / "exp", kind)
    parts = training(made)
    with register(made, CONFIG) as handle:
        train(made, parts, 2)
        path = made.save_state(step=2)
        train(made, parts, 1)  # while it is written
        made.save_state(step=3)
        train(made, parts, 9)
        handle.wait()
        made.load_state()
        train(made, parts, 2)
        assert equal(whole(parts[0]), expected), "went on from memory"
        saved = handle.save_model(parts[0], folder / "weights")
        made.save_model(parts[0], folder, safe_serialization=False)  # where checkpoints are
    if rank == 0:
        assert equal(load_file(saved / "model.safetensors"), expected)
        assert equal(torch.load(folder / "pytorch_model.bin"), expected)

    made = accelerator(rank, folder / "exp", kind)
    parts = training(made, number=7)
    with register(made, CONFIG):
        made.load_state(path)
        train(made, parts, 3)
        assert equal(whole(parts[0]), expected), "a fresh process, from the older one"
    made.load_state(str(folder / "exp/checkpoints/checkpoint_1"))  # stock Accelerate reads what we wrote
    train(made, parts, 2)
    assert equal(whole(parts[0]), expected), "stock load"

    made = accelerator(rank, folder / "theirs", kind)
    parts = training(made)
    train(made, parts, 3)
    made.save_state()  # stock
    with register(made, CONFIG):
        train(made, parts, 4)
        made.load_state()
        train(made, parts, 2)
        assert equal(whole(parts[0]), expected), "ours reads theirs"
    dist.barrier()


@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_training_goes_on_bit_for_bit_and_stock_accelerate_reads_it(tmp_path, kind):
    """Save, resume in place and afresh, weights alone; stock ``load_state`` reads ours, ours reads stock's. The same files."""
    values(spawn_ranks(_go, 2, tmp_path, kind, init=False, timeout_s=90))
    ours, theirs = (tmp_path / name / "checkpoints" for name in ("exp", "theirs"))

    def names(folder):
        found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
        return {name for name in found if name != "manifest.json"}

    # Stock Accelerate writes the sampler-free state in the same files.
    assert names(ours / "checkpoint_1") == names(theirs / "checkpoint_0")
    for folder in ours.iterdir():
        verify_files(folder, read_manifest(folder))


def _saves_and_dies(rank, folder):
    made = accelerator(rank, folder)
    parts = training(made)
    handle = register(made, CONFIG)
    for step in range(3):
        train(made, parts, 1)
        made.save_state(step=step)
    handle.wait()
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def _loads(rank, folder):
    made = accelerator(rank, folder)
    parts = training(made, number=3)
    with register(made, CONFIG):
        try:
            made.load_state()
        except SafeCheckpointError as error:
            return type(error).__name__
    count = parts[1].optimizer.state[next(iter(parts[0].parameters()))]["step"]
    return int(count)


def test_a_damaged_shard_is_passed_over_by_all_ranks(tmp_path):
    """After a SIGKILL, with a bit flipped in rank 1's optimizer shard: both ranks take the checkpoint before."""
    spawn_ranks(_saves_and_dies, 2, tmp_path, init=False)
    shard = tmp_path / "checkpoints/checkpoint_2/optimizer_0/__1_0.distcp"
    flip_bit(shard, shard.stat().st_size // 2)
    assert values(spawn_ranks(_loads, 2, tmp_path, init=False)) == [2, 2]


def _scales(rank, folder):
    def scaled():
        made = accelerator(rank, folder)
        made.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)  # fp16 takes an accelerator
        return made, training(made)

    made, parts = scaled()
    with register(made, CONFIG) as handle:
        train(made, parts, 3)
        saved = made.scaler.state_dict()
        made.save_state()
        handle.wait()
        assert made.scaler.state_dict() == saved
        train(made, parts, 2)
        made.load_state()
        again = made.scaler.state_dict()
    made, parts = scaled()
    with register(made, CONFIG):
        made.load_state()
        made.scaler.scale(torch.ones(1))  # it takes what was loaded when it is used first
    return again == saved == made.scaler.state_dict()


def test_a_gradient_scaler_comes_back_as_it_was_saved(tmp_path):
    """In the process that saved, where stock raises an AssertionError, and in a new one, where stock takes a step with it."""
    assert values(spawn_ranks(_scales, 2, tmp_path, init=False, timeout_s=60)) == [True, True]


def _refused(rank, folder):
    made = accelerator(rank, folder)
    model, *_ = training(made)
    with register(made, CONFIG):
        with pytest.raises(NoValidCheckpointError):
            made.load_state()
        with pytest.raises(ConfigError, match="max_shard_size"):
            made.save_model(model, folder / "weights", max_shard_size=["5GB", "5 gigs"][rank], safe_serialization=False)
        with pytest.raises(DesyncError, match="max_shard_size"):
            made.save_model(model, folder / "weights", max_shard_size=["5GB", "5MB"][rank], safe_serialization=False)
        made.save_model(model, folder / "weights")


def test_arguments_that_are_wrong_on_one_rank_are_refused_on_all(tmp_path):
    """Before anything is gathered; and the next call is one again."""
    values(spawn_ranks(_refused, 2, tmp_path, init=False))


def links(folder, pattern):
    """How many names the files have."""
    return [path.stat().st_nlink for path in sorted(folder.glob(pattern))]


def _trains_a_part(rank, folder):
    def parts(number):
        seed(number)
        frozen = torch.nn.Linear(4, 800), torch.nn.Linear(800, 800)
        model = torch.nn.Sequential(*frozen, torch.nn.Linear(800, 2))
        for one in frozen:
            one.requires_grad_(requires_grad=False)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
        prepared = made.prepare(model, optimizer)
        return *prepared, made.prepare(torch.optim.lr_scheduler.StepLR(prepared[1].optimizer, 2, gamma=0.5))

    made = accelerator(rank, folder / "exp")
    first = parts(0)
    with register(made, CONFIG) as handle:
        for step in (1, 2, 3):
            train(made, first, 1)
            path = made.save_state(step=step)
        handle.wait()
        expected = whole(first[0])
    second = parts(7)
    made = accelerator(rank, folder / "exp")
    second = parts(7)
    with register(made, CONFIG):
        made.load_state()
        assert equal(whole(second[0]), expected), "ours"
    made = accelerator(rank, folder / "exp")
    third = parts(8)
    made.load_state(path)  # stock
    assert equal(whole(third[0]), expected), "stock"
    dist.barrier()


def test_frozen_parts_of_each_rank_are_written_once(tmp_path):
    """Each rank's frozen part has one name in each of three checkpoints; ``load_state`` reads it, ours and stock's."""
    values(spawn_ranks(_trains_a_part, 2, tmp_path, init=False, timeout_s=90))
    checkpoints = tmp_path / "exp/checkpoints"
    assert links(checkpoints, "*/pytorch_model_fsdp_0/__*_1.distcp") == [3] * 6
    assert links(checkpoints, "*/*/__*_0.distcp") == [1] * 12
    for folder in checkpoints.iterdir():
        verify_files(folder, read_manifest(folder))


def _freezes_midway(rank, folder):
    made = accelerator(rank, folder / "exp")
    seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 800), torch.nn.Linear(800, 800), torch.nn.Linear(800, 800))
    model[1].requires_grad_(requires_grad=False)
    model, optimizer = made.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.05))
    made.prepare(torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 2, gamma=0.5))
    with register(made, CONFIG):
        for step in range(1, 8):
            if step == 3:
                model[2].requires_grad_(requires_grad=False)
            if step == 5:
                model[1].requires_grad_(requires_grad=True)
            made.save_state(step=step)
    dist.barrier()


def test_parameters_frozen_or_unfrozen_between_saves_go_to_the_other_file(tmp_path):
    """The layout follows ``requires_grad``: from the second save after a change on, what is frozen is shared again."""
    values(spawn_ranks(_freezes_midway, 2, tmp_path, init=False, timeout_s=90))
    checkpoints = sorted((tmp_path / "exp/checkpoints").iterdir(), key=lambda path: int(path.name.split("_")[1]))
    files = [path / "pytorch_model_fsdp_0/__0_1.distcp" for path in checkpoints]
    assert [path.stat().st_nlink for path in files] == [2, 2, 2, 2, 3, 3, 3]
    first, second, third = (files[number].stat().st_size for number in (0, 2, 4))
    assert second > 1.9 * first
    assert third < 1.1 * first


def _on_its_host(rank, folder, resumed):
    """Train five steps with a save behind the third, or go on from that: the weights at the end, and the files on this host."""
    near = move_to_host(rank, folder)
    made = accelerator(rank, near / "exp")
    parts = training(made, number=7 if resumed else 0)
    with register(made, per_host(folder)) as handle:
        if resumed:
            assert handle.resume().name == "checkpoint_0"
        else:
            train(made, parts, 3)
            made.save_state()
            handle.wait(mirrored=True)
        saved = near / "exp/checkpoints/checkpoint_0"
        files = sorted(one.relative_to(saved).as_posix() for one in saved.rglob("*.distcp"))
        train(made, parts, 2)
    return {name: value.tolist() for name, value in whole(parts[0]).items()}, files


@pytest.mark.timeout(180)
@pytest.mark.skipif(bool(why_no_mounts()), reason=f"mounts of one's own: {why_no_mounts()}")
@pytest.mark.parametrize("lost", [(), (1,), (0, 1)])
def test_shards_lie_on_each_host_and_go_on_when_a_disk_is_lost(tmp_path, lost):
    """``mirror.near: per-host``, a rank on each of two hosts: each disk has that rank's shards. A resume ends as a run that
    never stopped, also where one disk or both are new.
    """
    first = values(spawn_ranks(_on_its_host, 2, tmp_path, False))
    for rank, (_, files) in enumerate(first):
        assert files == [f"{part}/__{rank}_0.distcp" for part in ("optimizer_0", "pytorch_model_fsdp_0")]
    for host in lost:
        shutil.rmtree(tmp_path / f"host{host}")
    again = values(spawn_ranks(_on_its_host, 2, tmp_path, True))
    assert [end for end, _ in again] == [end for end, _ in first]
