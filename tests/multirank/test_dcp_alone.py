"""``safe_ckpt.dcp`` in one process: what its rules delete, and what a load waits for."""

import threading

import pytest
import torch

from kit import limits
from kit.patience import scaled
from safe_ckpt import CheckpointConfig, Retention, dcp
from safe_ckpt.core.formats.manifest import read_manifest
from safe_ckpt.core.saving.engine import Engine
from safe_ckpt.core.storage import durable
from safe_ckpt.dcp import loading
from safe_ckpt.testing import inline_saves

pytestmark = [pytest.mark.quick, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]


@pytest.fixture(autouse=True)
def _settings():
    yield
    dcp.configure(CheckpointConfig())


def rules(**parts):
    dcp.configure(CheckpointConfig(timeouts=limits.QUICK, retention=Retention(**parts)))


@pytest.mark.parametrize(
    ("rule", "left"),
    [
        ({"keep_last": 2}, ["best-1", "best-4", "last", "run-a-2", "run-b-3", "step-2", "step-3"]),
        ({"keep_every_steps": 2}, ["best-0", "best-4", "last", "run-a-2", "run-b-3", "step-2", "step-3"]),
    ],
)
def test_a_rule_counts_names_that_differ_in_their_number_alone(tmp_path, rule, left):
    """Those of another kind stay, whichever is newer: also where a family is taken up again, and by the next process."""
    names = ["best-0", "step-1", "run-a-2", "best-1", "last", "run-b-3", "step-2", "best-4", "step-3"]
    with inline_saves():
        for number, name in enumerate(names):
            if number in (0, 5):
                rules(**rule)
            dcp.save({"n": number, "t": torch.ones(2)}, checkpoint_id=tmp_path / name, no_dist=True)
    assert sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith(".")) == left


@pytest.mark.parametrize("by", ["directory", "name", "latest"])
def test_a_load_waits_for_what_is_being_saved(tmp_path, monkeypatch, by):
    """By whatever it is named: it is the state of the save that was called before, although that is not committed yet."""
    rules()
    dcp.save({"n": 1, "t": torch.ones(2)}, checkpoint_id=tmp_path / "step-1", no_dist=True)
    loads, publish, over, look = threading.Event(), durable.publish, Engine.wait_until_over, loading._look

    def held(*args, **more):
        assert loads.wait(scaled(10))
        return publish(*args, **more)

    def waits(engine):
        loads.set()
        return over(engine)

    def looks(*args):  # without having waited
        found = look(*args)
        loads.set()
        return found

    monkeypatch.setattr(durable, "publish", held)
    saving = dcp.async_save({"n": 2, "t": torch.full((2,), 2.0)}, checkpoint_id=tmp_path / "step-2", no_dist=True)
    monkeypatch.setattr(Engine, "wait_until_over", waits)
    monkeypatch.setattr(loading, "_look", looks)
    state = {"n": 0, "t": torch.zeros(2)}
    path = {"directory": tmp_path, "name": tmp_path / "step-2", "latest": tmp_path / "latest"}[by]
    try:
        dcp.load(state, checkpoint_id=path, no_dist=True)
    finally:
        loads.set()
        saving.result(30)
    assert (state["n"], state["t"].tolist()) == (2, [2.0, 2.0])


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("step-100", 100),
        ("llama-3-step-100", 100),
        ("7", 7),
        ("v2.step_30.pt", 30),
        ("epoch=3-step=120", 120),
        ("x", 0),
    ],
)
def test_the_step_of_a_checkpoint_is_the_last_number_of_its_name(tmp_path, name, step):
    """It goes into the manifest, and counts for a rule of steps."""
    with inline_saves():
        dcp.save({"t": torch.ones(2)}, checkpoint_id=tmp_path / name, no_dist=True)
    assert read_manifest(tmp_path / name).step == step


def test_settings_that_are_given_one_after_the_other_add_up():
    """A second call of ``configure`` changes what it names, and leaves the rest; a whole configuration takes its place."""
    rules(keep_last=2)
    both = dcp.configure(on_failure="warn")
    assert (both.retention, both.on_failure) == (Retention(keep_last=2), "warn")
    third = dcp.configure(retention=Retention(keep_last=3))
    assert (third.retention.keep_last, third.on_failure) == (3, "warn")
    assert dcp.configure(CheckpointConfig()) == CheckpointConfig()
