"""Directories that a job takes: through a network file system's blips, and among what killed jobs left under other names."""

import errno
import os
from dataclasses import replace

import pytest
import torch
from small_runs import config

from safe_ckpt import CheckpointConfig, Checkpointer
from safe_ckpt.core.home.file_home import FileHome
from safe_ckpt.core.home.lease import own_lease
from safe_ckpt.core.saving.engine import Engine
from safe_ckpt.core.storage import durable
from safe_ckpt.errors import DirectoryError
from safe_ckpt.events import Removed


@pytest.mark.parametrize(
    ("code", "is_blip"),
    [(errno.ENOTCONN, True), (errno.ESTALE, True), (errno.ETIMEDOUT, True), (errno.EACCES, False), (errno.EIO, False)],
)
def test_a_directory_is_taken_when_the_mount_answers_again(tmp_path, monkeypatch, code, is_blip):
    """A mount that is not there for a moment is waited for; what does not pass by itself is told at once, and once."""
    make, refused = durable.make_directory, []

    def answers(path):
        if not refused:
            refused.append(path)
            raise OSError(code, os.strerror(code), str(path))
        return make(path)

    monkeypatch.setattr(durable, "make_directory", answers)
    if is_blip:
        with Checkpointer(tmp_path / "run", config()) as ckpt:
            assert ckpt.save(1, {"x": 1}).result(timeout_s=20).step == 1
    else:
        with pytest.raises(DirectoryError) as caught:
            Checkpointer(tmp_path / "run", config())
        assert caught.value.errno == code
    assert len(refused) == 1


def unfinished(folder):
    """A save to a name that is not over."""
    (folder / "pending/x").mkdir(parents=True)
    (folder / "pending/x/w.safetensors").write_bytes(b"half")


def test_what_happens_after_a_directory_was_given_back_is_not_recorded_there(tmp_path):
    """It is another job's by then. The next directory has it."""
    engine, told = Engine(CheckpointConfig()), [f"told {number}" for number in range(3)]
    one, other = engine.hold(tmp_path / "one"), engine.hold(tmp_path / "other")
    engine.tell(Removed(rank=0, path=told[0]))
    engine.release(one)
    engine.tell(Removed(rank=0, path=told[1]))
    engine.release(other)
    engine.hold(tmp_path / "third")
    engine.tell(Removed(rank=0, path=told[2]))
    engine.close()
    found = []
    for name in ("one", "other", "third"):
        recorded = (tmp_path / name / ".safe_ckpt/events.jsonl").read_text()
        found.append([text for text in told if text in recorded])
    assert found == [told[:1], told[:2], told[2:]]


def test_what_killed_jobs_left_under_other_names_is_swept_and_a_live_ones_is_not(tmp_path):
    """Weights are written to a name: what is there of dead jobs beside it is deleted, and what a live one writes stays."""
    names = tmp_path / ".safe_ckpt/names"
    dead, live = names / "dead", FileHome(tmp_path, lease_s=60, hidden=names / "live")
    live.open()
    for folder in (dead, live.hidden):
        unfinished(folder)
    own = own_lease(token="left", started_at="2026-01-01T00:00:00+00:00", lease_s=60.0)
    (dead / "lock").write_bytes(replace(own, process_start=1).to_bytes())
    with Checkpointer(tmp_path / "run", config()) as ckpt:
        ckpt.export({"w": torch.ones(2)}, tmp_path / "weights").result(timeout_s=20)
    assert [str(path.relative_to(names)) for path in names.rglob("*.safetensors")] == ["live/pending/x/w.safetensors"]
    live.close()
