"""What ends a resume under a framework: the line that says how an older checkpoint is named; and relative directories."""

import sys

import pytest
import torch
from lightning_runs import fit, module_class, package
from transformers_runs import trainer

notes = pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have notes from Python 3.11 on")


def said(error):
    return "\n".join(getattr(error, "__notes__", ()))


@notes
def test_lightning_names_a_checkpoint_that_does_not_fit_and_the_way_out(tmp_path):
    """The module has another shape: the error has the file, and how another one is given. The next start tries it again."""
    fit(tmp_path, save_last=True, resume="auto", settings={"max_epochs": 1})
    other = module_class(package("lightning.pytorch"))()
    other.layer = torch.nn.Linear(3, 3)
    for _ in range(2):
        with pytest.raises(RuntimeError) as caught:
            fit(tmp_path, save_last=True, resume="auto", module=other, settings={"max_epochs": 2})
        assert "This ended the resume from" in said(caught.value)
        assert "ckpt_path=" in said(caught.value)


@notes
def test_a_name_that_is_not_there_gets_no_such_line(tmp_path):
    """A mistyped ``ckpt_path``: the error of Lightning is enough."""
    with pytest.raises(FileNotFoundError) as caught:
        fit(tmp_path, save_last=True, resume="auto", path=tmp_path / "nope.ckpt", settings={"max_epochs": 1})
    assert said(caught.value) == ""


@notes
def test_a_trainer_names_a_checkpoint_that_does_not_fit_and_the_way_out(tmp_path):
    """The same under a Trainer."""
    trainer(tmp_path).train()
    with pytest.raises(RuntimeError) as caught:
        trainer(tmp_path, hidden=32).train(resume_from_checkpoint=True)
    assert str(tmp_path / "checkpoint-6") in said(caught.value)
    assert "resume_from_checkpoint=" in said(caught.value)


def test_a_relative_output_dir_stays_where_training_began(tmp_path, monkeypatch):
    """A callback changes the working directory, as Hydra does."""
    from transformers import TrainerCallback

    class Moves(TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            if state.global_step == 3:
                monkeypatch.chdir(tmp_path / "second")

    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "first")
    trainer("run", callbacks=[Moves()]).train()
    assert max(path.name for path in (tmp_path / "first/run").glob("checkpoint-*")) == "checkpoint-6"
    assert list((tmp_path / "second").iterdir()) == []
