"""An Accelerator whose model FSDP 1 shards, on two gloo ranks; see ``fsdp1_runs``."""

import os
import signal

import pytest
import torch
import torch.distributed as dist
from fsdp1_runs import accelerator, equal, everything, local_state, training
from safetensors.torch import load_file
from torch.distributed.fsdp import FullyShardedDataParallel

from accelerate_runs import CONFIG, train
from kit.ranks import spawn_ranks, values
from safe_ckpt.accelerate import register
from safe_ckpt.core.formats.manifest import read_manifest
from safe_ckpt.core.formats.verify import verify_files
from safe_ckpt.errors import ConfigError, PeerLostError, SafeCheckpointError
from support import flip_bit

WAYS = [("SHARDED_STATE_DICT", True), ("SHARDED_STATE_DICT", False), ("FULL_STATE_DICT", False)]
pytestmark = pytest.mark.timeout(120)


def whole(model):
    with FullyShardedDataParallel.summon_full_params(model):
        return {
            name.replace("_fsdp_wrapped_module.", ""): one.detach().clone() for name, one in model.named_parameters()
        }


def _go(rank, folder, kind, orig):
    made = accelerator(rank, folder / "straight", kind, orig=orig)
    parts = training(made)
    train(made, parts, 5)
    expected = local_state(parts)

    made = accelerator(rank, folder / "exp", kind, orig=orig)
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
        assert equal(local_state(parts), expected), "went on from memory"
        saved = handle.save_model(parts[0], folder / "weights")
        made.save_model(parts[0], folder, safe_serialization=False)  # where checkpoints are
    weights = whole(parts[0]) if orig else {}
    if rank == 0 and orig:
        for found in (load_file(saved / "model.safetensors"), torch.load(folder / "pytorch_model.bin")):
            assert found.keys() == weights.keys()
            assert all(torch.equal(found[name], weights[name]) for name in weights)

    made = accelerator(rank, folder / "exp", kind, orig=orig)
    parts = training(made, number=7)
    with register(made, CONFIG):
        made.load_state(path)
        train(made, parts, 3)
        assert equal(local_state(parts), expected), "a fresh process, from the older one"
    made.load_state(str(folder / "exp/checkpoints/checkpoint_1"))  # stock Accelerate reads what we wrote
    train(made, parts, 2)
    assert equal(local_state(parts), expected), "stock load"

    made = accelerator(rank, folder / "theirs", kind, orig=orig)
    parts = training(made)
    train(made, parts, 3)
    made.save_state()  # stock
    with register(made, CONFIG):
        train(made, parts, 4)
        made.load_state()
        train(made, parts, 2)
        assert equal(local_state(parts), expected), "ours reads theirs"
    dist.barrier()


def names(folder):
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    return {name for name in found if name != "manifest.json"}


def _goes_on_without_parts(rank, folder):
    made = accelerator(rank, folder / "straight", strategy="NO_SHARD")
    parts = training(made)
    train(made, parts, 4)
    expected = local_state(parts)
    made = accelerator(rank, folder / "exp", strategy="NO_SHARD")
    parts = training(made)
    with register(made, CONFIG):
        train(made, parts, 2)
        made.save_state(step=2)
    made = accelerator(rank, folder / "exp", strategy="NO_SHARD")
    parts = training(made, number=7)
    with register(made, CONFIG):
        made.load_state()
    train(made, parts, 2)
    assert equal(local_state(parts), expected), "NO_SHARD"


def _goes_in_each_way(rank, folder):
    _goes_on_without_parts(rank, folder / "NO_SHARD")
    for kind, orig in WAYS:
        _go(rank, folder / f"{kind}-{orig}", kind, orig)


def test_fsdp1_goes_on_bit_for_bit_and_stock_accelerate_reads_it(tmp_path):
    """Save, resume in place and afresh, weights alone; stock ``load_state`` reads ours, ours reads stock's. The same files.

    In parts and as whole files, with the parameters as they are written and in one flat one; and where nothing is sharded.
    """
    values(spawn_ranks(_goes_in_each_way, 2, tmp_path, init=False, timeout_s=90))
    for kind, orig in WAYS:
        ours, theirs = (tmp_path / f"{kind}-{orig}" / name / "checkpoints" for name in ("exp", "theirs"))
        assert names(ours / "checkpoint_1") == names(theirs / "checkpoint_0")
        for folder in ours.iterdir():
            verify_files(folder, read_manifest(folder))


class Odd(torch.nn.Module):
    """A parameter of one element, one that is frozen, and one that never gets a gradient, so that it has no state."""

    def __init__(self):
        super().__init__()
        self.first, self.frozen, self.unused = torch.nn.Linear(4, 5), torch.nn.Linear(5, 5), torch.nn.Linear(5, 5)
        self.scale = torch.nn.Parameter(torch.ones(1))
        self.frozen.requires_grad_(requires_grad=False)

    def forward(self, x):
        return self.frozen(self.first(x)) * self.scale


def odd(made, number=0):
    torch.manual_seed(number)
    model = made.prepare(Odd())
    optimizer = made.prepare(torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=0.05))
    return model, optimizer, made.prepare(torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 2, gamma=0.5))


def _saves_and_dies(rank, folder):
    made = accelerator(rank, folder)
    parts = odd(made)
    handle = register(made, CONFIG)
    for step in range(3):
        train(made, parts, 1)
        if step < 2:
            found = everything(parts[0], parts[1].optimizer)
        made.save_state(step=step)
    handle.wait()
    if rank == 0:
        torch.save(found, folder / "want.pt")
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def _loads(rank, folder):
    made = accelerator(rank, folder)
    parts = odd(made, number=3)
    with register(made, CONFIG):
        made.load_state()
        found = everything(parts[0], parts[1].optimizer)
        wanted = torch.load(folder / "want.pt")
        assert found.keys() == wanted.keys(), (found.keys(), wanted.keys())
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
        train(made, parts, 1)


def test_a_killed_job_goes_on_from_the_newest_whole_checkpoint_also_on_more_ranks(tmp_path):
    """After a SIGKILL, with a bit flipped in rank 1's optimizer shard, two ranks or three take the checkpoint before.

    A parameter of one element, a frozen one and one without state come back as they were.
    """
    dead = spawn_ranks(_saves_and_dies, 2, tmp_path, init=False)
    assert [outcome.exit_code for outcome in dead] == [-9, -9]
    shard = tmp_path / "checkpoints/checkpoint_2/optimizer_0/__1_0.distcp"
    flip_bit(shard, shard.stat().st_size // 2)
    for count in (2, 3):
        values(spawn_ranks(_loads, count, tmp_path, init=False))


def _refused(rank, folder):
    made = accelerator(rank, folder, "LOCAL_STATE_DICT")
    with pytest.raises(ConfigError, match="cannot load since torch"):
        register(made, CONFIG)
    made = accelerator(rank, folder, strategy="HYBRID_SHARD")
    with pytest.raises(ConfigError, match="HYBRID_SHARD"):
        register(made, CONFIG)
    made = accelerator(rank, folder)
    parts = training(made)
    train(made, parts, 1)

    def hook(*_):
        if rank == 1:
            raise RuntimeError("mine")

    made.register_save_state_pre_hook(hook)
    with register(made, CONFIG), pytest.raises((RuntimeError, SafeCheckpointError), match="mine"):
        made.save_state()


def test_what_goes_wrong_on_one_rank_reaches_the_others_before_they_gather(tmp_path):
    """FSDP 1 asks all ranks for each state dict. LOCAL_STATE_DICT is refused, with the reason, and parts with HYBRID_SHARD."""
    outcomes = spawn_ranks(_refused, 2, tmp_path, init=False, timeout_s=60)
    values(outcomes)
    assert max(outcome.seconds for outcome in outcomes) < 40, "a rank waited in a collective"


def _dies_within_a_state_dict(rank, folder):
    made = accelerator(rank, folder)
    parts = training(made)
    with register(made, CONFIG) as handle:
        train(made, parts, 1)
        made.save_state(step=1)
        handle.wait()
        train(made, parts, 1)
        if rank == 1:
            linears = [one for one in parts[0].modules() if type(one) is torch.nn.Linear]
            linears[-1].register_state_dict_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        with pytest.raises(PeerLostError) as caught:
            made.save_state(step=2)
    return str(caught.value), repr(caught.value.__cause__)


def test_a_rank_that_dies_within_a_state_dict_is_named_by_the_other(tmp_path):
    """Where torch puts a unit together on all ranks: the error names phase and rank, and the older checkpoint stays."""
    first, second = spawn_ranks(_dies_within_a_state_dict, 2, tmp_path, init=False, timeout_s=60)
    assert second.exit_code == -9
    ((said, cause),) = values([first])
    assert said.startswith("planning shards: lost ranks [1]: "), said
    assert "RuntimeError" in cause, cause
    assert first.seconds < 40
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["checkpoint_0"]
    folder = tmp_path / "checkpoints/checkpoint_0"
    verify_files(folder, read_manifest(folder))
