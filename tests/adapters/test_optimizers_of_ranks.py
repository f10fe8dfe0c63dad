"""A ``ZeroRedundancyOptimizer`` under Lightning's and Accelerate's DDP on two ranks: each rank has a part of its state."""

import os
import signal

import pytest
import torch
from lightning_runs import trainer

from accelerate_runs import CONFIG, forget, make, train
from accelerate_runs import seed as seeded
from kit.ranks import spawn_ranks, values
from safe_ckpt.accelerate import register
from safe_ckpt.lightning import SafeCheckpointCallback, resumable

pl = pytest.importorskip("lightning.pytorch")
STEPS, KILLED_AT = 6, 4
pytestmark = pytest.mark.timeout(240)


def divided(model, lr=0.05):
    from torch.distributed.optim import ZeroRedundancyOptimizer  # it warns when it is imported

    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=lr)


def local_state(model, optimizer):
    """All that this rank has of weights, moments and learning rate."""
    tensors = [one.detach().clone() for one in model.parameters()]
    local = optimizer.optim
    tensors += [value.clone() for one in model.parameters() for _, value in sorted(local.state.get(one, {}).items())]
    return [*tensors, *(torch.tensor(group["lr"]) for group in (*local.param_groups, *optimizer.param_groups))]


def check(found, file):
    wanted = torch.load(file)
    assert len(found) == len(wanted) > 10
    assert all(map(torch.equal, found, wanted))


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 2))

    def training_step(self, batch, batch_idx):
        if self.global_step == self.dies_at:
            self.trainer.checkpoint_callback.wait()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.net(batch).pow(2).mean()

    def train_dataloader(self):
        return resumable(torch.utils.data.DataLoader(torch.arange(48.0).reshape(12, 4), batch_size=1))

    def configure_optimizers(self):
        optimizer = divided(self)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5), "interval": "step"}]


def _lightning(rank, folder, dies_at=-1):
    os.environ.update(LOCAL_RANK=str(rank), GROUP_RANK="0", TORCHELASTIC_RUN_ID="test")
    os.environ["LOCAL_WORLD_SIZE"] = os.environ["WORLD_SIZE"]
    pl.seed_everything(1 if dies_at else 7, verbose=False)
    ours = SafeCheckpointCallback(
        dirpath=folder, config=CONFIG, resume="auto", save_last=True, every_n_train_steps=1, save_top_k=1, monitor=None
    )
    more = {"strategy": "ddp", "devices": int(os.environ["WORLD_SIZE"]), "max_epochs": 1}
    made, module = trainer(pl, [ours], folder, **more), Module()
    module.dies_at = dies_at
    made.fit(module)
    return local_state(module, made.optimizers[0])


def _dies(rank, run, folder):
    torch.save(run(rank, folder / "straight"), folder / f"want-{rank}.pt")
    run(rank, folder / "exp", KILLED_AT)


def _compares(rank, run, folder):
    check(run(rank, folder / "exp"), folder / f"want-{rank}.pt")


def parts_of(made, number):
    seeded(number)
    model = made.prepare(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 2)))
    optimizer = made.prepare_optimizer(divided(model), device_placement=False)
    return model, optimizer, made.prepare(torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 2, gamma=0.5))


def _accelerate(rank, folder, dies_at=-1):
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=os.environ["WORLD_SIZE"])
    forget()
    made = make(folder)
    parts = parts_of(made, 1 if dies_at else 7)
    with register(made, CONFIG) as handle:
        begin = 0
        if any(folder.glob("checkpoints/checkpoint_*")):
            made.load_state()
            begin = made.project_configuration.iteration
        for step in range(begin, STEPS):
            if step == dies_at:
                handle.wait()
                os.kill(os.getpid(), signal.SIGKILL)
            train(made, parts, 1)
            made.save_state(step=step)
    return local_state(parts[0], parts[1].optimizer)


@pytest.mark.parametrize("run", [_lightning, _accelerate])
def test_a_killed_run_goes_on_bit_for_bit(tmp_path, run):
    """Each rank has its moments again. Rank 0 has written those of all, as the frameworks do it."""
    dead = spawn_ranks(_dies, 2, run, tmp_path, init=False)
    assert [outcome.exit_code for outcome in dead] == [-9, -9], dead
    values(spawn_ranks(_compares, 2, run, tmp_path, init=False))
