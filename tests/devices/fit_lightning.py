"""A run of Lightning's Trainer on the late accelerator."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.utils.data import DataLoader

from devices.draw import STEPS, FitPlan
from devices.fit_parts import BATCH, Here, Net, Rows, collate, optimizer_of
from kit.device.lightning import LateAccelerator, LateDDP
from safe_ckpt.data import resumable
from safe_ckpt.lightning import SafeCheckpointCallback

warnings.filterwarnings("ignore")
ALSO_SAVED: frozenset[int] = frozenset()


class _Module(pl.LightningModule):
    def __init__(self, here: Here) -> None:
        super().__init__()
        self._here, self._plan = here, here.plan
        self.net = Net(here.plan, here.rows)

    def configure_optimizers(self) -> Any:
        optimizer, scheduler = optimizer_of(self._plan, self)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_train_batch_start(self, batch: Any, number: int) -> None:
        self._here.meets("next", self.trainer.global_step)

    def training_step(self, batch: dict[str, Any], number: int) -> torch.Tensor:
        loss = self.net(**batch)["loss"]
        if self._plan.logs:
            self.log("loss", loss, on_step=False, on_epoch=True)
        self._here.meets("forward", self.trainer.global_step)
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self._here.meets("stepping", self.trainer.global_step)


class _Acting(_Module):
    def on_train_batch_end(self, *args: Any) -> None:
        self.net.act()
        _look(self._here, self.trainer, self)


def _look(here: Here, trainer: Any, module: Any) -> None:
    here.stepped(trainer.global_step, lambda: _seen(here, trainer, module))


def _seen(here: Here, trainer: Any, module: Any) -> dict[str, torch.Tensor]:
    return here.seen(module, trainer.optimizers[0], trainer.lr_scheduler_configs[0].scheduler)


class _Witness(pl.Callback):
    def __init__(self, here: Here) -> None:
        self._here = here

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self._here.begins(trainer.global_step)

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        if not self._here.plan.acts:
            _look(self._here, trainer, module)

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        self._here.saves()


def run(here: Here) -> None:
    """Train to the end, from the newest checkpoint."""
    plan = here.plan
    strategy: Any = SingleDeviceStrategy(here.device, accelerator=LateAccelerator())
    if plan.ranks > 1:
        places = [torch.device("late", (plan.device + rank) % 3) for rank in range(plan.ranks)]
        strategy = LateDDP(places, ("cpu:gloo,late:late", None)[plan.seed % 2])
    callbacks: list[Any] = [_Witness(here)]
    if not here.reference:
        here.committed = lambda steps: (here.folder / f"step={steps}.ckpt").exists()
        ours = SafeCheckpointCallback(
            here.folder,
            filename="{step}",
            every_n_train_steps=plan.every,
            save_top_k=-1,
            save_on_exception=any(where == "raises" for _, where in plan.stops),
            config=here.config,
            resume="auto",
        )
        callbacks.append(ours)
    trainer = pl.Trainer(
        strategy=strategy,
        devices=plan.ranks,
        max_steps=STEPS,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=not here.reference,
        limit_val_batches=0,
        use_distributed_sampler=True,
        callbacks=callbacks,
    )
    module = (_Acting if plan.acts else _Module)(here)
    loader = resumable(DataLoader(Rows(plan.seed), BATCH // plan.ranks, shuffle=True, collate_fn=collate))
    with here.behaving():
        trainer.fit(module, loader)
        logged = {f"logged.{name}": value.cpu() for name, value in trainer.callback_metrics.items()}
        here.ends(trainer.global_step, _seen(here, trainer, module) | logged)


def saved(folder: Path, plan: FitPlan) -> dict[int, dict[str, torch.Tensor]]:
    """What is in the checkpoints, by the number of steps, of the first rank."""
    return {int(path.stem.partition("=")[2]): _content(path) for path in folder.glob("step=*.ckpt")}


def _content(path: Path) -> dict[str, torch.Tensor]:
    content = torch.load(path, map_location="cpu", weights_only=False)
    found = {f"model.{name}": value for name, value in content["state_dict"].items()}
    for number, values in content["optimizer_states"][0]["state"].items():
        found |= {
            f"optimizer.{number}.{key}": torch.as_tensor(value) for key, value in values.items() if value is not None
        }
    drawn = content["safe_ckpt"]["ranks"][0]["rng"]
    found |= {f"late.{number}": state for number, state in enumerate(drawn["late"])}
    found |= {"torch": drawn["torch"], "lr": torch.tensor(content["lr_schedulers"][0]["_last_lr"])}
    return found
