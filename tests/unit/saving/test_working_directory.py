"""A relative path means the directory that it named when it was given: programs change their working directory."""

import os

import torch

from safe_ckpt import CheckpointConfig, Checkpointer, Telemetry
from safe_ckpt.core.home.home import HIDDEN


def test_a_checkpointer_stays_where_it_was_opened(tmp_path, monkeypatch):
    """Saves, retention, events, metrics and the resume go on in one place; nothing appears in the other."""
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    monkeypatch.chdir(tmp_path / "first")
    state = {"w": {"t": torch.ones(3)}}
    settings = CheckpointConfig(telemetry=Telemetry(prometheus_textfile="safe.prom"))
    with Checkpointer("run", settings) as ckpt:
        ckpt.save(1, state).result(timeout_s=20)
        monkeypatch.chdir(tmp_path / "second")
        info = ckpt.save(2, state).result(timeout_s=20)
        assert info.path == tmp_path / "first/run/step-00000002"
        assert ckpt.resume(state).step == 2
        assert ckpt.export({"w": torch.ones(2)}, "weights").result(timeout_s=20).path == tmp_path / "second/weights"
    assert sorted(os.listdir(tmp_path / "second")) == ["weights"]
    assert {HIDDEN, "step-00000001", "step-00000002"} <= set(os.listdir(tmp_path / "first/run"))
    assert len((tmp_path / "first/run" / HIDDEN / "events.jsonl").read_text().splitlines()) >= 3
    assert "safe_ckpt" in (tmp_path / "first/safe.prom").read_text()
