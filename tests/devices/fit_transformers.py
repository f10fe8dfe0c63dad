"""A run of the Trainer of Transformers on the late accelerator."""

from __future__ import annotations

import contextlib
import os
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import Trainer, TrainerCallback, TrainingArguments

from devices.draw import STEPS, FitPlan
from devices.fit_parts import BATCH, Here, Net, Rows, collate, loaded, optimizer_of, weights_and_moments
from safe_ckpt.errors import NoValidCheckpointError
from safe_ckpt.transformers import SafeCheckpointMixin

warnings.filterwarnings("ignore")
ALSO_SAVED: frozenset[int] = frozenset({STEPS})
"""At the end, in any case."""


class _SafeTrainer(SafeCheckpointMixin, Trainer):
    pass


class _Net(Net):
    def __init__(self, here: Here) -> None:
        super().__init__(here.plan, here.rows)
        self._here, self.steps = here, 0

    def forward(self, x: torch.Tensor, labels: torch.Tensor, rows: list[int]) -> dict[str, torch.Tensor]:
        found = super().forward(x, labels, rows)
        self._here.meets("forward", self.steps)
        return found


class _Witness(TrainerCallback):
    def __init__(self, here: Here, net: _Net, stepping: tuple[Any, Any]) -> None:
        self._here, self._net, (self._optimizer, self._scheduler) = here, net, stepping

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._here.begins(state.global_step)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._net.steps = state.global_step
        self._here.meets("next", state.global_step)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._here.meets("stepping", state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._here.plan.acts:
            self._net.act()
        self._here.stepped(state.global_step, lambda: self._here.seen(self._net, self._optimizer, self._scheduler))
        if control.should_save:
            self._here.saves()


def run(here: Here) -> None:
    """Train to the end, from the newest checkpoint."""
    plan = here.plan
    os.environ["ACCELERATE_TORCH_DEVICE"] = str(here.device)  # Accelerate's own way to a device that it does not know
    if several := plan.ranks > 1:
        # As in a script of Accelerate: the Trainer knows no group for such a device.
        dist.init_process_group("cpu:gloo,late:late")
    arguments = TrainingArguments(
        use_cpu=several,
        output_dir=str(here.folder),
        max_steps=STEPS,
        per_device_train_batch_size=BATCH // plan.ranks,
        save_strategy="no" if here.reference else "steps",
        save_steps=plan.every,
        logging_strategy="steps" if plan.logs else "no",
        logging_steps=2,
        logging_nan_inf_filter=plan.logs,  # waits for each loss
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        report_to=[],
        disable_tqdm=True,
        seed=torch.initial_seed() % 2**31,
    )
    net = _Net(here).to(here.device)  # before the optimizer: parameters of such a device are other objects
    stepping = optimizer_of(plan, net)
    _SafeTrainer.checkpoint_config = here.config
    trainer = (Trainer if here.reference else _SafeTrainer)(
        model=net,
        args=arguments,
        train_dataset=Rows(plan.seed),
        data_collator=collate,
        optimizers=stepping,
        callbacks=[_Witness(here, net, stepping)],
    )
    here.committed = lambda steps: (here.folder / f"checkpoint-{steps}").exists()
    with here.behaving():
        _train(trainer, resumes=not here.reference)
        here.ends(trainer.state.global_step, here.seen(net, *stepping))


def _train(trainer: Any, *, resumes: bool) -> None:
    if resumes:
        with contextlib.suppress(NoValidCheckpointError):
            trainer.train(resume_from_checkpoint=True)
            return
    trainer.train()


def saved(folder: Path, plan: FitPlan) -> dict[int, dict[str, torch.Tensor]]:
    """What is in the checkpoints, by the number of steps."""
    return {int(path.name.partition("-")[2]): _content(path) for path in folder.glob("checkpoint-*")}


def _content(path: Path) -> dict[str, torch.Tensor]:
    found = weights_and_moments(path, "optimizer.pt")
    found["lr"] = torch.tensor(loaded(path / "scheduler.pt")["_last_lr"])
    return found
