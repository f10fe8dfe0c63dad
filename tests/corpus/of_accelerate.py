"""What the corpus holds of Accelerate: ``save_state`` within an epoch on one rank, and of an FSDP2 model on two."""

from __future__ import annotations

import os

import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.utils.data import DataLoader, TensorDataset

from accelerate_runs import CONFIG, Counter, forget, fresh, make
from corpus.filled import fill, same
from safe_ckpt.accelerate import register
from safe_ckpt.data import resumable

STEP = 2


class Job:
    """A model, an optimizer, a scheduler, a loader that knows its place and an object of the user's."""

    def __init__(self, accelerator):
        torch.manual_seed(5)
        self.accelerator = accelerator
        model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Linear(16, 2))
        optimizer = torch.optim.AdamW(model.parameters())
        data = torch.arange(12.0 * accelerator.num_processes)
        loader = resumable(DataLoader(TensorDataset(data.repeat(4, 1).T), batch_size=4, shuffle=True))
        self.model, self.optimizer, self.loader = accelerator.prepare(model, optimizer, loader)
        self.scheduler = accelerator.prepare(torch.optim.lr_scheduler.StepLR(self.optimizer.optimizer, 1, gamma=0.5))
        self.counter = Counter()
        accelerator.register_for_checkpointing(self.counter)

    def epoch(self):
        """Train to its end; a generator of the batches."""
        for (batch,) in self.loader:
            self.accelerator.backward(self.model(batch).square().mean())
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.counter.count += 1
            yield batch[:, 0].int().tolist()

    def save(self):
        for _ in self.epoch():
            if self.counter.count == STEP:
                fill(STEP, self.model, self.optimizer)
                self.accelerator.save_state()
                break

    def resume(self):
        """The batches that are left."""
        self.accelerator.load_state()
        same(STEP, self.model, self.optimizer)
        assert self.counter.count == STEP
        assert self.scheduler.scheduler.last_epoch == STEP * self.accelerator.num_processes
        return list(self.epoch())


def save(folder):
    with fresh():
        accelerator = make(folder)
        with register(accelerator, CONFIG):
            Job(accelerator).save()


def resume(folder):
    with fresh():
        accelerator = make(folder)
        with register(accelerator, CONFIG):
            return Job(accelerator).resume()


def accelerator_of_two(rank, folder):
    """Accelerate offers FSDP2 on accelerators only: its state is told by hand that this is one of FSDP."""
    forget()
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2", ACCELERATE_USE_FSDP="true")
    made = make(folder)
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    made.state.distributed_type = DistributedType.FSDP
    made.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        state_dict_type="SHARDED_STATE_DICT",
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Linear"],
        cpu_ram_efficient_loading=False,
    )
    return made


def save_sharded(rank, folder):
    accelerator = accelerator_of_two(rank, folder)
    with register(accelerator, CONFIG):
        Job(accelerator).save()


def resume_sharded(rank, folder):
    accelerator = accelerator_of_two(rank, folder)
    with register(accelerator, CONFIG):
        return Job(accelerator).resume()
