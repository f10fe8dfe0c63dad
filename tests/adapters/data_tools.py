"""One small training with each tool: what it trains on, whole, stopped within an epoch, and resumed as a script would do it."""

from __future__ import annotations

import contextlib
import random
import warnings
from pathlib import Path

import numpy
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

SIZE, BATCH, EPOCHS, STOP = 24, 4, 3, 9
PER_EPOCH = -(-SIZE // BATCH)


class Map(Dataset):
    """A number, and what three generators gave for it. Counts what is read, in all processes."""

    def __init__(self):
        self.read = torch.zeros(1, dtype=torch.int64).share_memory_()

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        if index >= SIZE:
            raise IndexError(index)
        self.read += 1
        return torch.tensor([index, torch.rand(()).item(), random.random(), numpy.random.rand()])


class Stream(IterableDataset):
    """Each worker has a share of its own, and knows how far it is."""

    def __init__(self):
        self.read, self.at = torch.zeros(1, dtype=torch.int64).share_memory_(), 0

    def __len__(self):
        return SIZE

    def __iter__(self):
        info = get_worker_info()
        step, first = (info.num_workers, info.id) if info else (1, 0)
        while first + step * self.at < SIZE:
            self.at += 1
            self.read += 1
            yield torch.tensor([first + step * (self.at - 1), torch.rand(()).item(), random.random(), 0.0])
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def seed():
    torch.manual_seed(1)
    random.seed(1)
    numpy.random.seed(1)


def loader_of(data, workers, kind=DataLoader, **more):
    shuffle = {"shuffle": True} if isinstance(data, Map) else {}
    return kind(data, batch_size=BATCH, num_workers=workers, **shuffle, **more)


def rng():
    return torch.get_rng_state(), random.getstate(), numpy.random.get_state()


def set_rng(state):
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    numpy.random.set_state(state[2])


def torchdata(folder, data, workers, *, stop, resumed):
    """``StatefulDataLoader``, with the generators saved and restored beside it."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    seed()
    loader, seen, first, at = loader_of(data, workers, StatefulDataLoader), [], 0, folder / "state.pt"
    if resumed:
        state = torch.load(at, weights_only=False)
        loader.load_state_dict(state["loader"])
        set_rng(state["rng"])
        first = state["epoch"]
    for epoch in range(first, EPOCHS):
        for batch in loader:
            seen.append(batch.tolist())
            torch.rand(1)  # as dropout would
            if len(seen) == stop and not resumed:
                torch.save({"loader": loader.state_dict(), "rng": rng(), "epoch": epoch}, at)
                return seen
    return seen


def plain(folder, data, workers, *, stop, resumed):
    """``safe_ckpt.data.resumable`` with a ``Checkpointer``."""
    from safe_ckpt import Checkpointer, PerRank, RngState
    from safe_ckpt.data import resumable

    seed()
    loader, seen = resumable(loader_of(data, workers)), []
    state = {"loader": loader, "rng": PerRank(RngState()), "epoch": 0}
    with Checkpointer(folder) as ckpt:
        assert (ckpt.resume(state) is not None) is resumed
        for epoch in range(state["epoch"], EPOCHS):
            state["epoch"] = epoch
            for batch in loader:
                seen.append(batch.tolist())
                torch.rand(1)
                if len(seen) == stop and not resumed:
                    ckpt.save(1, state)
                    return seen
    return seen


def accelerate(folder, data, workers, *, stop, resumed, safe=False):
    """``skip_first_batches``, as Accelerate's examples do it."""
    from accelerate_runs import fresh, make
    from safe_ckpt.accelerate import register
    from safe_ckpt.data import resumable

    with fresh(), contextlib.ExitStack() as stack:
        accelerator = make(folder)
        if safe:
            stack.enter_context(register(accelerator))
        seed()
        loader, seen, first = loader_of(data, workers), [], 0
        model = torch.nn.Linear(1, 1)
        model, loader = accelerator.prepare(model, resumable(loader) if safe else loader)
        if resumed:
            accelerator.load_state(str(folder / "checkpoints" / "checkpoint_0"))
            first = stop // PER_EPOCH
        for epoch in range(first, EPOCHS):
            batches = loader
            if resumed and epoch == first:
                batches = accelerator.skip_first_batches(loader, stop % PER_EPOCH)
            for batch in batches:
                seen.append(batch.tolist())
                torch.rand(1)
                if len(seen) == stop and not resumed:
                    accelerator.save_state()
                    return seen
    return seen


def lightning(folder, data, workers, *, stop, resumed, safe=False):
    """Its own ``ModelCheckpoint``, and ``fit(ckpt_path=...)``."""
    import lightning.pytorch as pl
    from lightning_runs import Stop, package, stop_at, trainer

    from safe_ckpt.lightning import SafeCheckpointCallback, resumable

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.seen = torch.nn.Linear(4, 1), []

        def training_step(self, batch, _):
            self.seen.append(batch.tolist())
            torch.rand(1)
            return self.net(batch).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    package("lightning.pytorch")
    seed()
    loader = loader_of(data, workers)
    kind = SafeCheckpointCallback if safe else pl.callbacks.ModelCheckpoint
    saving = kind(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    module = Module()
    made = trainer(pl, [saving, *([stop_at(pl, stop)] if stop and not resumed else [])], folder, max_epochs=EPOCHS)
    with contextlib.suppress(Stop):
        path = folder / f"step={stop}.ckpt" if resumed else None
        made.fit(module, resumable(loader) if safe else loader, ckpt_path=path)
    return module.seen


def transformers(folder, data, workers, *, stop, resumed, safe=False):
    """Its own ``Trainer``."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from safe_ckpt.transformers import SafeCheckpointMixin

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(4, 1)

        def forward(self, batch):
            seen.append(batch.tolist())
            torch.rand(1)
            return {"loss": self.net(batch).mean()}

    class Safe(SafeCheckpointMixin, Trainer):
        pass

    def collate(rows):
        return {"batch": torch.stack(rows)}

    class Leave(TrainerCallback):
        def on_save(self, args, state, control, **_):
            if state.global_step == stop and not resumed:
                control.should_training_stop = True

    seen = []
    seed()
    steps = PER_EPOCH * EPOCHS
    arguments = TrainingArguments(
        str(folder), per_device_train_batch_size=BATCH, max_steps=steps, save_steps=1, seed=1, use_cpu=True, report_to=[],
        disable_tqdm=True, dataloader_num_workers=workers, remove_unused_columns=False, logging_steps=1000,
    )  # fmt: skip
    made = (Safe if safe else Trainer)(
        Model(), arguments, train_dataset=data, data_collator=collate, callbacks=[Leave()]
    )
    made.train(resume_from_checkpoint=str(folder / f"checkpoint-{stop}") if resumed else None)
    return seen


def found(tool, data, workers, folder, **more):
    """How a resume compares with a run that was not stopped.

    Returns:
        Whether the samples were the same, whether what was drawn for them was, and how many were read beyond those used.
    """
    folder = Path(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ("whole", "broken"):
            (folder / name).mkdir(parents=True)
        whole = tool(folder / "whole", data(), workers, stop=0, resumed=False, **more)[STOP:]
        tool(folder / "broken", data(), workers, stop=STOP, resumed=False, **more)
        again = data()
        rest = tool(folder / "broken", again, workers, stop=STOP, resumed=True, **more)
    samples = [[row[0] for row in batch] for batch in rest] == [[row[0] for row in batch] for batch in whole]
    used = sum(len(batch) for batch in rest)
    return samples, rest == whole, int(again.read) - used
