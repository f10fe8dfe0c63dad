"""What happens when within one save and one resume: the order that every door relies on."""

import pytest
import torch

import safe_ckpt.checkpointer
from kit.moments import Moments
from safe_ckpt import CheckpointConfig, Checkpointer, Retention
from safe_ckpt.extensions.assemble import assemble


@pytest.fixture
def moments(tmp_path, monkeypatch):
    found = Moments(tmp_path)
    monkeypatch.setattr(safe_ckpt.checkpointer, "assemble", lambda config: [*assemble(config), found.extension()])
    return found


def opened(folder, moments):
    config = CheckpointConfig(retention=Retention(keep_last=1))
    return Checkpointer(folder, config, hooks=[moments])


SAVE = """
caller: extensions: models
caller: extensions: planning
caller: extensions: deciding
caller: extensions: begun
hooks: Agreed
save: extensions: started
save: mkdir .safe_ckpt/pending/ID
save: mkdir .safe_ckpt/pending/ID/step-00000002
save: extensions: writing
write: open .safe_ckpt/pending/ID/step-00000002/model.safetensors
save: extensions: recognised
save: extensions: written
save: extensions: entry
save: extensions: concluding
save: open .safe_ckpt/pending/ID/step-00000002/manifest.json
save: mkdir .safe_ckpt/trash/ID
save: rename .safe_ckpt/pending/ID/step-00000002 step-00000002
hooks: Snapshotted
hooks: Written
hooks: Committed
save: extensions: ended
save: extensions: keeps
save: mkdir .safe_ckpt/trash/ID
save: rename step-00000001 .safe_ckpt/trash/ID/step-00000001
save: rmdir .safe_ckpt/trash/ID
save: extensions: deleted
hooks: Removed
hooks: Retained
save: rmdir .safe_ckpt/pending/ID
save: rmdir .safe_ckpt/trash/ID
"""
RESUME = """
caller: read step-00000001/manifest.json
caller: read step-00000001/manifest.json
caller: read step-00000001/manifest.json
caller: read step-00000001/model.safetensors
caller: extensions: remembers
hooks: Resumed
caller: read step-00000001/manifest.json
caller: extensions: resumed
caller: the model is given its state
caller: extensions: training
caller: read step-00000001/manifest.json
"""


def test_the_order_of_one_save(tmp_path, moments):
    """It is agreed and copied on the caller's thread; behind it all is written before it has its name; then others go."""
    state = {"model": torch.nn.Linear(4, 4)}
    with opened(tmp_path, moments) as ckpt:
        ckpt.save(1, state).result()
        with moments:
            ckpt.save(2, state).result()
        assert moments.lines == SAVE.split("\n")[1:-1]


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
        assert moments.lines == RESUME.split("\n")[1:-1]
