"""What an optimizer keeps in float32 beside bfloat16 parameters is not rounded where a framework loads it: torch would."""

import contextlib

import pytest
import torch
import transformers_runs
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from lightning_runs import Stop, module_class, package, stop_at, trainer

from kit.limits import QUICK
from safe_ckpt import CheckpointConfig
from safe_ckpt.accelerate import register
from safe_ckpt.lightning import SafeCheckpointCallback

CONFIG = CheckpointConfig(timeouts=QUICK)


class Float32Moments(torch.optim.Optimizer):
    """Of the user's own."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in (one for one in group["params"] if one.grad is not None):
                state = self.state[parameter]
                state.setdefault("sum", torch.zeros_like(parameter, dtype=torch.float32))
                state["sum"].mul_(0.9).add_(parameter.grad.float())
                parameter.sub_(group["lr"] * state["sum"].to(parameter.dtype))
        return loss


OPTIMIZERS = [torch.optim.NAdam, torch.optim.ASGD, Float32Moments]


def kept(optimizer):
    """Types and values."""
    state = optimizer.state_dict()["state"]
    return {f"{n}.{key}": (one.dtype, one.tolist()) for n, of in state.items() for key, one in of.items()}


def with_lightning(folder, kind, stop=None):
    pl = package("lightning.pytorch")
    pl.seed_everything(1, verbose=False)

    class Module(module_class(pl)):
        def training_step(self, batch, batch_idx):
            return self.net(batch[0].bfloat16()).pow(2).mean()

        def validation_step(self, batch, batch_idx):
            pass

        def configure_optimizers(self):
            return kind(self.parameters(), lr=0.1)

    module = Module().bfloat16()
    saves = SafeCheckpointCallback(dirpath=folder, every_n_train_steps=3, resume="auto", config=CONFIG)
    made = trainer(pl, [saves, *([stop_at(pl, stop)] if stop is not None else [])], folder)
    with contextlib.suppress(Stop):
        made.fit(module)
    return kept(made.optimizers[0])


def with_accelerate(folder, kind, stop=None):
    accelerator = Accelerator(
        cpu=True, project_config=ProjectConfiguration(str(folder), automatic_checkpoint_naming=True)
    )
    torch.manual_seed(1)
    model, optimizer = accelerator.prepare(
        module := torch.nn.Linear(3, 2).bfloat16(), kind(module.parameters(), lr=0.1)
    )
    with register(accelerator, CONFIG):
        begin = 0
        if list(folder.glob("checkpoints/*")):
            accelerator.load_state()
            begin = 4
        for step in range(begin, 9):
            if step == stop:
                return None
            optimizer.zero_grad()
            values = torch.randn(4, 3, generator=torch.Generator().manual_seed(step)).bfloat16()
            accelerator.backward(model(values).square().mean())
            optimizer.step()
            if step == 3:
                accelerator.save_state(async_save=False)
    return kept(optimizer.optimizer)


def with_transformers(folder, kind, stop=None):
    of = transformers_runs.model().bfloat16()
    optimizers = kind(of.parameters(), lr=0.1), None

    class Trains(transformers_runs.SafeTrainer):
        def __init__(self, **arguments):
            super().__init__(**arguments, optimizers=optimizers)

    callbacks = [transformers_runs.Stop(stop)] if stop is not None else []
    made = transformers_runs.trainer(folder, Trains, of=of, callbacks=callbacks)
    with contextlib.suppress(KeyboardInterrupt):
        made.train(resume_from_checkpoint=bool(transformers_runs.names(folder)))
    return kept(made.optimizer.optimizer)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("framework", ["lightning", "accelerate", "transformers"])
def test_what_is_kept_in_float32_beside_bfloat16_is_not_rounded_by_a_resume(tmp_path, framework, kind):
    """NAdam's products, ASGD's rates, moments of a class of one's own: a run that was stopped ends as one that was not."""
    run = globals()[f"with_{framework}"]
    expected = run(tmp_path / "whole", kind)
    assert torch.float32 in {dtype for name, (dtype, _) in expected.items() if not name.endswith("step")}
    run(tmp_path / "stopped", kind, stop=5)
    assert run(tmp_path / "stopped", kind) == expected
