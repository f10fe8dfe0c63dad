"""What stands beside a save never costs it: without any of it, and where it raises at every moment."""

import inspect
import logging

import pytest
import torch

from kit.inside import home_of, sessions
from safe_ckpt import CheckpointConfig, Checkpointer, Retention, checkpointer
from safe_ckpt.core.saving.extension import Extension
from safe_ckpt.errors import ConfigError
from safe_ckpt.extensions.assemble import assemble

MOMENTS = {name for name, value in vars(Extension).items() if inspect.isfunction(value)}
ASKED = MOMENTS - {"opened", "offers", "fetch"}


class Failing(Extension):
    """Raises at every moment at which it is asked, but for those that are to end what asks."""

    name = "failing"

    def __init__(self):
        self.asked = []


def _raises(moment):
    def method(self, *_):
        self.asked.append(moment)
        raise ValueError(moment)

    return method


for _moment in ASKED:
    setattr(Failing, _moment, _raises(_moment))


def three_saves(folder):
    """Save three, keep two, and go on from the newest. Returns the steps that are there, and the value that came back."""
    config = CheckpointConfig(retention=Retention(keep_last=2))
    model = torch.nn.Linear(600, 600)
    with Checkpointer(folder, config) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, {"model": model, "n": step}).result(timeout_s=30)
    state = {"model": torch.nn.Linear(600, 600), "n": 0}
    with Checkpointer(folder, config) as ckpt:
        info = ckpt.resume(state)
    assert torch.equal(state["model"].weight, model.weight)
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("step-")), (info.step, state["n"])


@pytest.mark.parametrize("which", ["none", "the usual"])
def test_a_save_needs_no_extension(tmp_path, monkeypatch, which):
    """An engine without extensions saves, resumes, retains and closes as one with them."""
    if which == "none":
        monkeypatch.setattr(checkpointer, "assemble", lambda _: [])
    there, came_back = three_saves(tmp_path)
    assert (there, came_back) == (["step-00000002", "step-00000003"], (3, 3))


def test_an_extension_that_raises_at_every_moment_costs_no_save(tmp_path, monkeypatch, caplog):
    """All saves are committed and resumed from; what it would have said of a deletion keeps the checkpoint; it is logged."""
    failing = Failing()
    monkeypatch.setattr(checkpointer, "assemble", lambda config: [*assemble(config), failing])
    with caplog.at_level(logging.ERROR):
        there, came_back = three_saves(tmp_path)
    assert (there, came_back) == ([f"step-0000000{step}" for step in (1, 2, 3)], (3, 3))
    assert set(failing.asked) == ASKED - {"deleted", "named", "stopping", "awaited"}
    assert "this goes on without it" in caplog.text


def test_settings_that_an_extension_refuses_are_raised_at_the_opening(tmp_path, monkeypatch):
    """Settings that it cannot work with end the opening; the directory is free again, and the session is over."""

    class Refusing(Extension):
        name = "refusing"

        def opened(self, run):
            raise ConfigError(key="refusing", message=f"not on rank {run.rank}")

    monkeypatch.setattr(checkpointer, "assemble", lambda _: [Refusing()])
    before = sessions()
    with pytest.raises(ConfigError, match="not on rank 0"):
        Checkpointer(tmp_path)
    assert sessions() == before
    monkeypatch.undo()
    Checkpointer(tmp_path).close()


class Keeping(Extension):
    """Needs every checkpoint until the job ends."""

    name = "keeping"

    def __init__(self):
        self.over = False

    def keeps(self, home, places):
        return () if self.over else places

    def closing(self, within_s):
        self.over = True


@pytest.mark.parametrize("fails", [False, True])
def test_checkpoints_that_an_extension_needed_are_deleted_at_the_end(tmp_path, monkeypatch, fails):
    """And whatever goes wrong with that, the directory is given back."""
    keeping = Keeping()
    monkeypatch.setattr(checkpointer, "assemble", lambda _: [keeping])
    config = CheckpointConfig(retention=Retention(keep_last=1))
    with Checkpointer(tmp_path, config) as ckpt:
        for step in (1, 2):
            ckpt.save(step, {"n": step}).result(timeout_s=30)
        assert (tmp_path / "step-00000001").exists()
        if fails:
            monkeypatch.setattr(home_of(ckpt), "discard", lambda _: 1 / 0)
    assert (tmp_path / "step-00000001").exists() == fails
    Checkpointer(tmp_path).close()
