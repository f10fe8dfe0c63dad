"""A loop with Accelerate and safe_ckpt. OMIT names what its resume leaves out."""

import argparse
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed
from forgetting import Net, data, forget, omitted

import safe_ckpt.accelerate
from safe_ckpt.data import resumable
from safe_ckpt.errors import NoValidCheckpointError

options = argparse.ArgumentParser()
options.add_argument("--out")
options.add_argument("--skip", action="store_true")  # with Accelerate's own sampler and skip_first_batches
options = options.parse_args()


class Own:
    """Progress of the loop, and the net's own state."""

    step = epoch = position = 0

    def state_dict(self):
        return {"step": self.step, "epoch": self.epoch, "position": self.position, **net.own_state()}

    def load_state_dict(self, saved):
        for key in {"step", "epoch", "position"} - set(omitted):
            setattr(self, key, saved[key])
        self.position += ("skipped" in omitted) - ("twice" in omitted)
        net.restore_own_state(saved)


set_seed(0)
accelerator = Accelerator(
    cpu=True,
    dataloader_config=DataLoaderConfiguration(use_seedable_sampler=options.skip),
    project_config=ProjectConfiguration(project_dir=options.out, automatic_checkpoint_naming=True, total_limit=3),
)
safe_ckpt.accelerate.register(accelerator)
net, own = Net(), Own()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
fresh = scheduler.state_dict()
draws = torch.Generator().manual_seed(0) if options.skip else None
loader = torch.utils.data.DataLoader(
    torch.utils.data.TensorDataset(*data()), batch_size=8, shuffle=True, generator=draws
)
if not options.skip:
    loader = resumable(loader)
model, optimizer, loader, scheduler = accelerator.prepare(net, optimizer, loader, scheduler)
accelerator.register_for_checkpointing(own)
try:
    accelerator.load_state()
    if "all" in omitted:
        omitted += ["optimizer", "scheduler", "python", "numpy", "torch"]
        own.step = own.epoch = own.position = 0
    forget(net, optimizer.optimizer, scheduler.scheduler, fresh)
except (NoValidCheckpointError, FileNotFoundError):
    print("from the beginning", file=sys.stderr)
while True:
    if options.skip:
        loader.set_epoch(own.epoch)
    batches = accelerator.skip_first_batches(loader, own.position) if options.skip and own.position else loader
    for x, labels in batches:
        loss = model(x, labels)["loss"]
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        net.best = min(net.best, loss.item())
        own.step, own.position = own.step + 1, own.position + 1
        net.stepped(own.step)
        if own.step % 5 == 0:
            accelerator.save_state()
    own.position, own.epoch = 0, own.epoch + 1
