"""Jobs on real DeepSpeed engines, for ranks that ``spawn_ranks`` starts. Importing this makes DeepSpeed run on the CPU."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch

from kit.inside import writer_of
from kit.ranks import spawn_ranks
from safe_ckpt import iter_full_tensors
from safe_ckpt.errors import StateError

os.environ.setdefault("DS_ACCELERATOR", "cpu")
CPU = {"device": "cpu"}


def _deepspeed():
    warnings.simplefilter("ignore")  # of DeepSpeed's own, such as torch's deprecations that it has not caught up with
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.CRITICAL)
    os.environ.setdefault("LOCAL_RANK", os.environ["RANK"])  # a launcher's part
    return deepspeed


def engine(stage, offload="none", swap="", *, width=512, **settings):
    """A small model under ZeRO, with as little randomness as a resume bit for bit needs.

    Sizes are such that every shard is a multiple of what aligned I/O takes: DeepSpeed (0.19.8) loses gradients that straddle
    two of its swap files, in the first step of a process.
    """
    deepspeed = _deepspeed()
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(64, width),
        torch.nn.ReLU(),
        torch.nn.Linear(width, width, bias=False),
        torch.nn.Linear(width, 16),
    )
    zero = {"stage": stage}
    if offload == "cpu":
        zero["offload_optimizer"] = CPU
    if offload == "nvme":
        zero["offload_optimizer"] = {"device": "nvme", "nvme_path": str(swap)}
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
        **settings,
    }
    return deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)[0]


def train(engine, rank, first, last):
    """Steps ``first`` to ``last``; the data depend on rank and step alone."""
    for step in range(first, last):
        own = torch.Generator().manual_seed(1000 * rank + step)
        output = engine(torch.randn(4, 64, generator=own))
        loss = torch.nn.functional.cross_entropy(output, torch.randint(0, 16, (4,), generator=own))
        engine.backward(loss)
        engine.step()


def weights(engine):
    """All of the model's parameters, one after the other."""
    parameters = list(engine.module.parameters())
    if engine.zero_optimization_stage() < 3:
        return torch.cat([parameter.detach().flatten().clone() for parameter in parameters])
    with _deepspeed().zero.GatheredParameters(parameters):
        return torch.cat([parameter.detach().flatten().clone() for parameter in parameters])


def own_engine(folder, stage, offload, swap):
    """The engine of the job that is killed; with NVMe each rank is on a node of its own, with swap files there."""
    if offload != "nvme":
        return engine(stage, offload, width=64)
    os.environ["LOCAL_RANK"] = "0"
    return engine(stage, offload, folder / swap, width=1024, checkpoint={"use_node_local_storage": True})


def save_and_die(rank, folder, stage, offload, tags):
    """Train to 3, save, go on to 6 and note the weights; then every rank is killed, with NVMe in the middle of a copy."""
    from safe_ckpt.deepspeed import install

    folder = Path(folder)
    run = own_engine(folder, stage, offload, "swap")
    handle = install(run)
    train(run, rank, 0, 3)
    for tag in tags:
        assert run.save_checkpoint(folder / "out", tag=tag, client_state={"epoch": 7}) is True
    handle.wait()
    train(run, rank, 3, 6)
    torch.save(weights(run), folder / f"want{rank}.pt")
    if offload == "nvme":
        die_in_a_copy(rank, folder / "out", run, handle)
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_a_copy(rank, out, run, handle):
    """Save once more; rank 1 never copies its part, and when rank 0's is there both are killed."""
    writer = writer_of(handle)
    writer.start()
    if rank == 1:
        os.kill(writer.pid, signal.SIGSTOP)

    def kill_when_copied():
        while not list((out / ".safe_ckpt" / "pending").glob("*/bad/offloaded_tensors/rank00/*.swp")):
            time.sleep(0.001)
        os.kill(writer.pid, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=kill_when_copied, daemon=True).start()
    run.save_checkpoint(out, tag="bad")


def resume(rank, folder, stage, offload, *, stock):
    """Load in a new process, train to 6, and compare with the run that was not interrupted."""
    from safe_ckpt.deepspeed import install

    folder = Path(folder)
    run = own_engine(folder, stage, offload, "swap-again")
    handle = None if stock else install(run)
    path, client = run.load_checkpoint(str(folder / "out"))
    assert client["epoch"] == 7
    assert run.global_steps == 3
    train(run, rank, 3, 6)
    same = torch.equal(weights(run), torch.load(folder / f"want{rank}.pt"))
    if stage == 3:
        with pytest.raises(StateError, match="ZeRO-3"):  # not a file of empty tensors
            list(iter_full_tensors(run.module))
    if handle is not None:
        run.save_checkpoint(folder / "out", tag="after")
        if (stage, offload) == (3, "cpu"):  # DeepSpeed itself would take the weights of what ``latest`` names
            now = weights(run)
            run.load_checkpoint(folder / "out", tag="global_step3", load_optimizer_states=False)
            assert not torch.equal(weights(run), now)
            gathers_whole_weights(run, folder / "whole")
        handle.remove()
        if rank == 0:  # which tidies up behind the verdict
            assert not list((folder / "out" / ".safe_ckpt" / "pending").glob("*"))
        assert not (folder / "out" / "bad").exists()
    return same, Path(path).parent.name


def gathers_whole_weights(run, folder):
    """With ZeRO-3 the file holds what all ranks have together; where DeepSpeed is not to gather it, there is none."""
    assert run.save_16bit_model(folder) is False
    assert not folder.exists()
    run._config.zero_config.gather_16bit_weights_on_model_save = True
    assert run.save_16bit_model(folder) is True
    found = torch.load(folder / "pytorch_model.bin", weights_only=True)
    assert torch.equal(torch.cat([tensor.flatten() for tensor in found.values()]), weights(run))


CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "steps_per_print": 10**9,
}


def save_queue():
    """Two stages, one on each of two ranks."""
    deepspeed = _deepspeed()
    deepspeed.init_distributed()
    from deepspeed.pipe import PipelineModule

    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 16)]
    net = PipelineModule(
        layers=layers, num_stages=2, loss_fn=torch.nn.CrossEntropyLoss(), partition_method="parameters"
    )
    return deepspeed.initialize(model=net, model_parameters=net.parameters(), config=CONFIG)[0]


def train_pipeline(engine, rank, first, last):
    for step in range(first, last):
        own = torch.Generator().manual_seed(step)
        engine.train_batch(iter([(torch.randn(4, 64, generator=own), torch.randint(0, 16, (4,), generator=own))]))


class Experts(torch.nn.Module):
    """A layer with one expert on each of two ranks, and one that all ranks have."""

    def __init__(self):
        from deepspeed.moe.layer import MoE

        super().__init__()
        self.experts = MoE(64, torch.nn.Linear(64, 64), num_experts=2, ep_size=2, k=1, use_rts=False)
        self.last = torch.nn.Linear(64, 16)

    def forward(self, batch):
        return self.last(self.experts(batch)[0])


def experts():
    """Two experts under ZeRO-1, one on each of two ranks."""
    deepspeed = _deepspeed()
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split

    torch.manual_seed(torch.distributed.get_rank())
    net = Experts()
    groups = split({"params": list(net.parameters()), "name": "all"})
    config = {**CONFIG, "zero_optimization": {"stage": 1}}
    return deepspeed.initialize(model=net, model_parameters=groups, config=config)[0]


def own_weights(engine):
    """This rank's parameters, one after the other."""
    return torch.cat([parameter.detach().flatten().clone() for parameter in engine.module.parameters()])


def has_nvme():
    """Whether DeepSpeed's asynchronous I/O was built: to build it within a test would take minutes."""
    from deepspeed.ops.op_builder import AsyncIOBuilder
    from torch.utils.cpp_extension import get_default_build_root

    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    return AsyncIOBuilder().is_compatible(verbose=False) and any(root.glob("**/async_io.so"))


def trains_others_after_a_load(rank, folder, stage):
    """Freezes a layer before the save; in the engine that loads it is trained. What is warned of at each of two steps."""
    from safe_ckpt.deepspeed import install

    run = engine(stage)
    handle = install(run)
    train(run, rank, 0, 1)
    run.module[0].requires_grad_(False)
    run.save_checkpoint(folder)
    handle.wait()
    again = engine(stage)
    install(again)
    said = []
    log = logging.getLogger("safe_ckpt.extensions.trained")
    log.addFilter(lambda record: said.append(record.getMessage()) or True)
    again.load_checkpoint(folder)
    counts = [len(said)]
    for number in (1, 2):
        train(again, rank, number, number + 1)
        counts.append(len(said))
    return counts, said


def spawn(function, *args, **options):
    return spawn_ranks(function, 2, *args, timeout_s=150, **options)
