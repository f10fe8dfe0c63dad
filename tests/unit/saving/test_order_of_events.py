"""What happens when within one save and one resume: the order that every door relies on."""

from pathlib import Path

import pytest
import torch

import safe_ckpt.checkpointer
from kit.moments import Moments
from safe_ckpt import CheckpointConfig, Checkpointer, Retention
from safe_ckpt.extensions.assemble import assemble

DRAWINGS = Path(__file__).parents[3] / "docs" / "drawings"


def told(name):
    """The lines that the drawing of docs/design.md is made from."""
    return (DRAWINGS / f"{name}.txt").read_text(encoding="utf-8").splitlines()


@pytest.fixture
def moments(tmp_path, monkeypatch):
    found = Moments(tmp_path)
    monkeypatch.setattr(safe_ckpt.checkpointer, "assemble", lambda config: [*assemble(config), found.extension()])
    return found


def opened(folder, moments):
    config = CheckpointConfig(retention=Retention(keep_last=1))
    return Checkpointer(folder, config, hooks=[moments])


def test_the_order_of_one_save(tmp_path, moments):
    """It is agreed and copied on the caller's thread; behind it all is written before it has its name; then others go."""
    state = {"model": torch.nn.Linear(4, 4)}
    with opened(tmp_path, moments) as ckpt:
        ckpt.save(1, state).result()
        with moments:
            ckpt.save(2, state).result()
        assert moments.lines == told("one_save")


def test_the_order_of_one_resume(tmp_path, moments):
    """All is read and verified before anything of the state changes; then extensions and hooks are told."""
    with opened(tmp_path, moments) as ckpt:
        ckpt.save(1, {"model": torch.nn.Linear(4, 4)}).result()

    class Told(torch.nn.Linear):
        def load_state_dict(self, *args, **options):
            moments.note("the model is given its state")
            return super().load_state_dict(*args, **options)

    moments.reads = True
    with opened(tmp_path, moments) as ckpt, moments:
        ckpt.resume({"model": Told(4, 4)})
        assert moments.lines == told("one_resume")
