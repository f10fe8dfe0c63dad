"""``every="auto"``: the callback of Lightning and the Trainer of Transformers save when a save is due."""

import pytest
from lightning_runs import fit
from lightning_runs import names as files
from transformers_runs import SafeTrainer, names, trainer

from safe_ckpt.errors import ConfigError
from safe_ckpt.ledger import pace
from safe_ckpt.lightning import SafeCheckpointCallback


@pytest.fixture
def short(monkeypatch):
    """Every second look is due."""

    def due(self):
        self._looks += 1
        return self._looks % 2 == 0

    monkeypatch.setattr(pace.Pace, "due", due)


@pytest.mark.timeout(120)
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint")
def test_lightning_saves_when_it_is_due(tmp_path, short):
    """At the steps that are due and no others; the run goes on from the last with the callback's state."""

    auto = {"filename": "{step}", "save_top_k": -1, "every": "auto", "resume": "auto"}
    fit(tmp_path, settings={"max_steps": 5}, **auto)
    assert [name for name in files(tmp_path) if name.endswith(".ckpt")] == ["step=2.ckpt", "step=4.ckpt"]
    _, again, _ = fit(tmp_path, settings={"max_steps": 8, "max_epochs": 9}, **auto)
    found = [name for name in files(tmp_path) if name.endswith(".ckpt")]
    assert found == ["step=2.ckpt", "step=4.ckpt", "step=6.ckpt", "step=8.ckpt"]
    assert again.best_model_path.endswith("step=8.ckpt")


def test_lightning_refuses_two_rhythms(tmp_path):
    """Nobody could say which one holds."""
    with pytest.raises(ConfigError, match="every"):
        SafeCheckpointCallback(tmp_path, every="auto", every_n_train_steps=3)


@pytest.mark.timeout(120)
def test_the_trainer_saves_when_it_is_due(tmp_path, short, monkeypatch):
    """At the steps that are due and at the last one, with ``save_strategy="no"``."""
    monkeypatch.setattr(SafeTrainer, "checkpoint_every", "auto", raising=False)
    trainer(tmp_path, max_steps=5, save_strategy="no", save_total_limit=None).train()
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-4", "checkpoint-5"]
    monkeypatch.setattr(SafeTrainer, "checkpoint_every", "often", raising=False)
    with pytest.raises(ConfigError, match="checkpoint_every"):
        trainer(tmp_path, max_steps=5).train()
