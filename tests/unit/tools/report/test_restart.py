"""The headline: what a restart would take now, its age and its health."""

import json

import pytest
import torch
from typer.testing import CliRunner

from safe_ckpt import CheckpointConfig, Checkpointer, Health
from safe_ckpt.tools.cli.app import app
from safe_ckpt.tools.report import restart


@pytest.fixture
def saved(tmp_path):
    """Two checkpoints, in a directory."""
    with Checkpointer(tmp_path / "run") as ckpt:
        for step in (1, 2):
            ckpt.save(step, {"w": {"t": torch.ones(1000)}}).result(timeout_s=20)
    return tmp_path / "run"


def page_of(directory):
    found = CliRunner().invoke(app, ["report", str(directory), "-o", "-"])
    assert found.exit_code == 0, found.output
    return found.stdout


def test_the_headline_is_what_a_restart_would_take(saved):
    """The newest with its step, age and health, on the page, in the text and in the JSON."""
    there = restart.look_at_restart(saved)
    assert (there.name, there.step, there.verifiable, there.passed_over) == ("step-00000002", 2, True, ())
    assert restart.sentence(there, there.saved_at + 7300) == "A restart goes on from step 2, 2 hours old, healthy."
    text = page_of(saved)
    assert "A restart goes on from step 2" in text
    assert "all is well" in text
    told = json.loads(CliRunner().invoke(app, ["report", str(saved), "--json"]).stdout)
    assert list(told)[:2] == ["restart", "ledger"]
    assert told["restart"]["step"] == 2
    said = CliRunner().invoke(app, ["report", str(saved), "-o", str(saved / "r.html")]).output
    assert said.startswith("A restart goes on from step 2")


def test_a_damaged_newest_is_no_good_news(saved):
    """One that was cut short: the one before is named, and why; the page has no check mark."""
    (saved / "step-00000002/w.safetensors").write_bytes(b"short")
    there = restart.look_at_restart(saved)
    assert there.step == 1
    assert "step-00000002: w.safetensors has 5 bytes" in there.passed_over[0]
    assert "not all is well" in page_of(saved)


def test_a_run_of_unhealthy_checkpoints_is_no_good_news(tmp_path):
    """Every save was committed, none failed, and a restart takes none of them."""
    with Checkpointer(tmp_path, CheckpointConfig(health=Health(action="mark"))) as ckpt:
        ckpt.save(1, {"model": torch.nn.Linear(2, 2).to(torch.float32).requires_grad_(True), "n": 1}).result(
            timeout_s=20
        )
        bad = torch.nn.Linear(2, 2)
        bad.weight.data.fill_(float("nan"))
        for step in (2, 3):
            ckpt.save(step, {"model": bad, "n": 1}).result(timeout_s=20)
    there = restart.look_at_restart(tmp_path)
    assert there.step == 1
    assert any("NaN" in one for one in there.passed_over)
    assert "not all is well" in page_of(tmp_path)


def test_without_any_checkpoint_a_restart_starts_afresh(tmp_path):
    """That is said; a directory that cannot be read says nothing."""
    with Checkpointer(tmp_path):
        pass
    assert restart.sentence(restart.look_at_restart(tmp_path), 0.0) == "A restart would start afresh."
    assert restart.look_at_restart(tmp_path / "nowhere") is None
