"""A restart from weights alone, which every framework can save, is never silent."""

import logging

import pytest
import torch
from lightning_runs import fit
from transformers import Trainer
from transformers_runs import Leave, SafeTrainer, trainer

from safe_ckpt import Checkpointer
from safe_ckpt.errors import NoValidCheckpointError, RestoreError


def told(caplog):
    return [text for text in caplog.messages if "save_only_model" in text]


STOCK = pytest.param(Trainer, id="stock", marks=pytest.mark.quick)


@pytest.mark.parametrize("kind", [pytest.param(SafeTrainer, id="ours"), STOCK])
def test_a_trainer_warns_once_of_a_resume_from_weights_alone(tmp_path, caplog, kind):
    """``save_only_model=True``, saved by ours or by a stock Trainer, resumed as True or by its path.

    Of a stock Trainer's a second warning says, once too, that it is not verified.
    """
    trainer(tmp_path, kind, max_steps=2, save_only_model=True).train()
    for path in (True, str(tmp_path / "checkpoint-2")):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "safe_ckpt"), pytest.raises(KeyboardInterrupt):
            trainer(tmp_path, max_steps=3, save_strategy="no", callbacks=[Leave()]).train(resume_from_checkpoint=path)
        (said,) = told(caplog)
        assert "checkpoint-2 has the weights of the model alone" in said
        assert caplog.text.count("it is loaded without verification") == (kind is Trainer)


def test_a_trainer_does_not_warn_of_a_resume_from_a_whole_checkpoint(tmp_path, caplog):
    """Nor where weights alone are saved from now on, but what is resumed from is whole."""
    trainer(tmp_path, max_steps=2).train()
    trainer(tmp_path, max_steps=3, save_only_model=True).train(resume_from_checkpoint=True)
    assert told(caplog) == []


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
@pytest.mark.parametrize("how", ["ours", "stock", "at once"])
@pytest.mark.quick
def test_lightning_refuses_to_resume_from_weights_alone(tmp_path, how):
    """Weights alone are no checkpoint for ``resume="auto"``, and an error as ``ckpt_path``.

    Saved by ``save_weights_only``, by a stock callback, or in this process, without an engine.
    """
    if how == "ours":
        fit(tmp_path, save_weights_only=True, filename="weights", settings={"max_epochs": 1})
    else:
        made, *_ = fit(tmp_path / "other", settings={"max_epochs": 1})
        dumped = made._checkpoint_connector.dump_checkpoint(weights_only=True)
        if how == "stock":
            torch.save(dumped, tmp_path / "weights.ckpt")
        else:
            made.strategy.checkpoint_io.save_checkpoint(dumped, tmp_path / "weights.ckpt")
    with pytest.raises(NoValidCheckpointError, match="weights"):
        fit(tmp_path, resume="auto")
    with pytest.raises(KeyError, match="contains only the model"):
        fit(tmp_path, path=str(tmp_path / "weights.ckpt"))


def test_a_plain_loop_refuses_a_checkpoint_without_its_optimizer(tmp_path):
    """A checkpoint without the optimizer that is asked for does not fit."""
    module = torch.nn.Linear(1, 1)
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"model": module})
    with Checkpointer(tmp_path) as ckpt, pytest.raises(RestoreError, match="optimizer"):
        ckpt.resume({"model": module, "optimizer": torch.optim.AdamW(module.parameters())})
