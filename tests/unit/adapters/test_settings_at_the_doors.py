"""What each door takes as its settings, and what it says of anything else."""

import inspect

import pytest
import torch

import safe_ckpt
from safe_ckpt import CheckpointConfig, Checkpointer, Retention, Timeouts, dcp
from safe_ckpt.errors import ConfigError

STATE = {"step": 0}


def checkpointer(folder, config):
    with Checkpointer(folder, config) as ckpt:
        return ckpt.config


def publishing(folder, config):
    with safe_ckpt.publishing(folder, 1, config) as inside:
        (inside / "file").write_bytes(b"data")


def configure(_folder, config):
    try:
        return dcp.configure(config)
    finally:
        dcp.configure(CheckpointConfig())


DOORS = [checkpointer, publishing, configure]


@pytest.mark.parametrize("door", DOORS)
def test_settings_may_be_a_mapping_or_the_path_of_a_file(door, tmp_path):
    """``config`` is a CheckpointConfig, a mapping of its keys, or the path of a YAML file, with the same result."""
    file = tmp_path / "ours.yaml"
    file.write_text("retention: {keep_last: 2}\n")
    wanted = CheckpointConfig(retention=Retention(keep_last=2))
    for given in (wanted, {"retention": {"keep_last": 2}}, file, str(file)):
        assert door(tmp_path / "run", given) in (wanted, None)


@pytest.mark.parametrize("door", DOORS)
def test_anything_else_in_their_place_is_an_error_that_says_what_was_meant(door, tmp_path):
    """A Retention, a key that there is not, a file that is not there, a number: ``ConfigError`` with what was meant."""
    for given, said in {
        Retention(keep_last=2): r"config: got a Retention: write CheckpointConfig\(retention=Retention\(\.\.\.\)\)",
        Timeouts(): r"write CheckpointConfig\(timeouts=Timeouts\(\.\.\.\)\)",
        "no.yaml": r"no\.yaml: cannot be read",
        3: "expected a CheckpointConfig, a mapping of its keys, the path of a YAML file, or None, got int",
    }.items():
        with pytest.raises(ConfigError, match=said):
            door(tmp_path / "run", given)
    with pytest.raises(ConfigError, match=r"keep_last: unknown key; .*belongs under .retention"):
        door(tmp_path / "run", {"keep_last": 2})
    assert not (tmp_path / "run").exists()


def test_settings_are_the_argument_behind_what_a_door_is_about(tmp_path):
    """``Checkpointer`` and ``publishing`` take ``config`` before the keywords: settings are never taken for a group."""
    for door, place in ((Checkpointer, 1), (safe_ckpt.publishing, 2)):
        parameters = list(inspect.signature(door).parameters.values())
        assert parameters[place].name == "config"
        assert all(one.kind is one.KEYWORD_ONLY for one in parameters[place + 1 :])
    for misplaced in (lambda: Checkpointer(tmp_path / "run", group=CheckpointConfig()), lambda: newest(tmp_path)):
        with pytest.raises(ConfigError, match="group: expected a process group or None, got CheckpointConfig"):
            misplaced()


def newest(folder):
    return safe_ckpt.newest(folder, group=CheckpointConfig())


def test_a_notebook_completes_the_public_names():
    """``dir(safe_ckpt)`` has every public name, also before it is first used."""
    assert set(safe_ckpt.__all__) <= set(dir(safe_ckpt))
    assert torch.nn  # it was imported, and is no name of ours
    assert "torch" not in dir(safe_ckpt)
