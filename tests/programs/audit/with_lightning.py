"""Lightning's Trainer with the callback of safe_ckpt, or with Lightning's own. OMIT names what its resume leaves out."""

import argparse
import random
from pathlib import Path

import lightning as pl
import numpy as np
import torch
from forgetting import Net, data, forget, forget_generators, omitted
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from safe_ckpt.lightning import SafeCheckpointCallback, resumable

options = argparse.ArgumentParser()
options.add_argument("--out")
options.add_argument("--stock", action="store_true")
options = options.parse_args()


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net, self.resumed = Net(), False

    def training_step(self, batch, _):
        if self.resumed:  # the generators are restored right before
            self.resumed = False
            forget_generators()
        loss = self.net(*batch)["loss"]
        self.log("loss", loss)
        self.log("seen", float(self.net.seen))
        self.net.best = min(self.net.best, loss.item())
        return loss

    def on_train_batch_end(self, *_):
        self.net.stepped(self.trainer.global_step)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
        self.fresh = scheduler.state_dict()
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def on_save_checkpoint(self, checkpoint):
        checkpoint["own"] = self.net.own_state()

    def on_load_checkpoint(self, checkpoint):
        self.net.restore_own_state(checkpoint["own"])

    def on_train_start(self):
        if self.trainer.global_step:
            self.resumed = True
            forget(self.net, self.optimizers().optimizer, self.lr_schedulers(), self.fresh)


pl.seed_everything(0)
random.seed(0)
np.random.seed(0)
if options.stock:
    saves = ModelCheckpoint(options.out, every_n_train_steps=5, save_top_k=-1, save_last=True)
else:
    saves = SafeCheckpointCallback(dirpath=options.out, every_n_train_steps=5, save_top_k=-1, save_last=True)
trainer = pl.Trainer(
    max_epochs=20, accelerator="cpu", callbacks=[saves], logger=CSVLogger(f"{options.out}-logs"), log_every_n_steps=1,
    enable_progress_bar=False, enable_model_summary=False, default_root_dir=options.out,
)  # fmt: skip
module = Module()
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data()), batch_size=8, shuffle=True)
if not options.stock:
    loader = resumable(loader)
last = next(iter(sorted(Path(options.out).glob("last*.ckpt"))), None)
if last is not None and "all" in omitted:
    module.load_state_dict(torch.load(last, weights_only=False)["state_dict"])
    last = None
trainer.fit(module, loader, ckpt_path=last, **({"weights_only": False} if last else {}))
