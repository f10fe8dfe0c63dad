"""A stock tool saved on beside ours: ours is taken all the same, and one warning names the newer one and how to take it."""

import pytest
import torch
from lightning_runs import fit, module_class, package
from lightning_runs import trainer as lightning_trainer
from transformers import Trainer
from transformers_runs import SafeTrainer, trainer

from accelerate_runs import Training, fresh, make
from kit.ranks import spawn_ranks, values
from safe_ckpt import CheckpointConfig, Timeouts
from safe_ckpt.accelerate import register
from safe_ckpt.adapters import Planned, Saver, torch_file
from safe_ckpt.adapters.saver import candidates_in
from safe_ckpt.layouts.table import TRAINER_STATE, TRANSFORMERS

# Half of it is waited for a manifest that is missing.
HASTY, ALONE = (CheckpointConfig(timeouts=Timeouts(barrier_s=seconds)) for seconds in (2, 0.4))


class HastyTrainer(SafeTrainer):
    checkpoint_config = ALONE


def said(caplog):
    """What was said of checkpoints without a manifest since it was last asked."""
    found = [record.getMessage() for record in caplog.records if "no manifest" in record.getMessage()]
    caplog.clear()
    return found


def warning(newer, taken, how):
    return (
        f"{newer} is of a later step than {taken}, which is taken, and has no manifest: another tool saved it, or its copy is "
        f"not whole. To go on from {newer} name it: {how}"
    )


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* not empty.*")
@pytest.mark.quick
def test_lightning_names_a_newer_file_of_the_stock_callback(tmp_path, caplog):
    """ModelCheckpoint saved the same step again, and a later one: the later one is named, until ours are as far."""
    fit(tmp_path, resume="auto", settings={"max_epochs": 1})
    pl = package("lightning.pytorch")
    stock = pl.callbacks.ModelCheckpoint(dirpath=tmp_path, save_top_k=-1, save_last=True)
    lightning_trainer(pl, [stock], tmp_path, max_epochs=2).fit(module_class(pl)())
    made = sorted(path.name for path in tmp_path.glob("*.ckpt"))
    assert made == ["epoch=0-step=3-v1.ckpt", "epoch=0-step=3.ckpt", "epoch=1-step=6.ckpt", "last.ckpt"]
    assert said(caplog) == []
    run, callback, _ = fit(tmp_path, resume="auto", settings={"max_epochs": 2})
    ours = tmp_path / "epoch=0-step=3.ckpt"
    assert callback._came_from == ours
    assert run.global_step == 6
    assert said(caplog) == [warning(tmp_path / "epoch=1-step=6.ckpt", ours, "fit(..., ckpt_path=...)")]
    fit(tmp_path, resume="auto", settings={"max_epochs": 3})
    assert said(caplog) == []


@pytest.mark.quick
def test_a_trainer_names_a_newer_checkpoint_of_the_stock_one(tmp_path, caplog):
    """Of the warnings of a resume one speaks of it. Named, it is gone on from, and then ours is the newest."""
    trainer(tmp_path, HastyTrainer, max_steps=4).train()
    trainer(tmp_path, Trainer).train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    stock = tmp_path / "checkpoint-6"
    trainer(tmp_path, HastyTrainer, max_steps=5, save_steps=100).train(resume_from_checkpoint=True)
    expected = warning(stock, tmp_path / "checkpoint-4", "train(resume_from_checkpoint=...)")
    assert said(caplog) == [expected]
    trainer(tmp_path, HastyTrainer, max_steps=8).train(resume_from_checkpoint=str(stock))
    caplog.clear()
    trainer(tmp_path, HastyTrainer, max_steps=8).train(resume_from_checkpoint=True)
    assert said(caplog) == []


@pytest.mark.quick
def test_accelerate_names_a_newer_checkpoint_of_the_stock_one(tmp_path, caplog):
    """With automatic naming, by the numbers of the names."""
    with fresh():
        accelerator = make(tmp_path)
        Training(accelerator)
        with register(accelerator, ALONE):
            ours = accelerator.save_state(async_save=False)
        accelerator.save_state()
        stock = accelerator.save_state()
        with register(accelerator, ALONE):
            accelerator.load_state()
    assert said(caplog) == [warning(stock, ours, "load_state(path)")]


def _resume(rank, folder, heard):
    import logging
    from pathlib import Path

    handler = logging.FileHandler(f"{heard}{rank}")
    logging.getLogger("safe_ckpt").addHandler(handler)
    folder = Path(folder)
    with Saver(HASTY, "transformers", find=lambda top: candidates_in(top, "transformers", TRANSFORMERS)) as saver:
        home, planned = saver.home(folder), Planned(files=[torch_file(f"state{rank}.pt", {"w": torch.ones(3)})])
        saver.save(home, folder / "checkpoint-4", planned.payload(), step=4).result()
        if rank == 0:
            (folder / "checkpoint-6").mkdir()
            (folder / "checkpoint-6" / TRAINER_STATE).write_text("{}")
        return saver.newest(home).name


def test_rank_0_alone_names_it(tmp_path):
    """Of two ranks."""
    (tmp_path / "run").mkdir()
    assert values(spawn_ranks(_resume, 2, str(tmp_path / "run"), str(tmp_path / "heard"))) == ["checkpoint-4"] * 2
    heard = [(tmp_path / f"heard{rank}").read_text() for rank in (0, 1)]
    assert [text.count("is of a later step than") for text in heard] == [1, 0]
