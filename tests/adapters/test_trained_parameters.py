"""A schedule unfreezes; after a resume past it the model is frozen again: every adapter says so, once, with the names."""

import logging

import pytest
import torch
from lightning_runs import PACKAGES, fit, module_class, package
from torch.utils.data import DataLoader, TensorDataset
from transformers import TrainerCallback
from transformers_runs import trainer

from accelerate_runs import CONFIG, fresh, make
from safe_ckpt.accelerate import register


def told(caplog):
    return [text for text in caplog.messages if "other trained parameters" in text]


class Unfreeze(TrainerCallback):
    """Freezes the embeddings at the start, and trains them from the second step on."""

    def on_train_begin(self, args, state, control, model, **_):
        model.get_input_embeddings().requires_grad_(False)

    def on_step_begin(self, args, state, control, model, **_):
        if state.global_step == 1:
            model.get_input_embeddings().requires_grad_(True)


@pytest.mark.quick
def test_a_trainer_names_parameters_frozen_again_by_a_resume(tmp_path, caplog):
    """``resume_from_checkpoint`` as True and as a path; a Trainer without the schedule is not warned of."""
    trainer(tmp_path, max_steps=4, callbacks=[Unfreeze()]).train()
    for path in (True, str(tmp_path / "checkpoint-4")):
        caplog.clear()
        trainer(tmp_path, max_steps=6, callbacks=[Unfreeze()]).train(resume_from_checkpoint=path)
        (said,) = told(caplog)
        assert "model.embed_tokens.weight no longer" in said
        assert "checkpoint-4" in said
        for later in tmp_path.glob("checkpoint-6"):
            later.rename(tmp_path / f"kept-{len(list(tmp_path.glob('kept-*')))}")
    caplog.clear()
    trainer(tmp_path, max_steps=6).train(resume_from_checkpoint=True)
    assert told(caplog) == []


def finetuned(pl):
    class Module(module_class(pl)):
        def __init__(self):
            super().__init__()
            self.backbone = torch.nn.Linear(4, 4)

        def training_step(self, batch, batch_idx):
            return self.net(self.backbone(batch[0])).pow(2).mean()

        def configure_optimizers(self):
            return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)

    return Module()


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
@pytest.mark.parametrize("name", [pytest.param(PACKAGES[0], marks=pytest.mark.quick), PACKAGES[1]])
def test_lightning_names_parameters_frozen_again_by_a_resume(tmp_path, caplog, name):
    """Its own BackboneFinetuning, found by ``resume="auto"`` and by ``ckpt_path``; before the unfreezing nothing is said."""
    pl = package(name)

    def run(epochs, **more):
        caplog.clear()
        callback = pl.callbacks.BackboneFinetuning(unfreeze_backbone_at_epoch=1, verbose=False)
        with caplog.at_level(logging.WARNING, "safe_ckpt"):
            fit(
                tmp_path, name=name, module=finetuned(pl), callbacks=[callback], settings={"max_epochs": epochs},
                filename="{epoch}", save_top_k=-1, **more,
            )  # fmt: skip
        return told(caplog)

    assert run(1) == []
    assert run(2, resume="auto") == []
    (said,) = run(3, resume="auto")
    assert "backbone.weight, backbone.bias no longer" in said
    (said,) = run(3, path=str(tmp_path / "epoch=1.ckpt"))
    assert "epoch=1.ckpt" in said
    assert run(3, path=str(tmp_path / "epoch=0.ckpt")) == []


@pytest.mark.quick
def test_accelerate_names_parameters_frozen_again_by_a_load(tmp_path, caplog):
    """``load_state`` of the newest and of a path, with two models: a number tells which."""

    def run(*, unfrozen, load=False, path=None):
        with fresh():
            accelerator = make(tmp_path)
            models = [torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)) for _ in "ab"]
            models[1][0].requires_grad_(unfrozen)
            optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
            register(accelerator, CONFIG)
            data = DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=2)
            *models, a, b, data = accelerator.prepare(*models, *optimizers, data)
            caplog.clear()
            if load:
                accelerator.load_state(path)
            for (batch,) in data:
                for model, optimizer in zip(models, (a, b), strict=True):
                    accelerator.backward(model(batch).sum())
                    optimizer.step()
                    optimizer.zero_grad()
            accelerator.save_state()
            accelerator.end_training()
            return told(caplog)

    assert run(unfrozen=True) == []
    (said,) = run(unfrozen=False, load=True)
    assert "1.0.weight, 1.0.bias no longer" in said
    assert run(unfrozen=False, load=True) == []
    path = str(tmp_path / "checkpoints/checkpoint_0")
    (said,) = run(unfrozen=False, load=True, path=path)
    assert "checkpoint_0" in said
