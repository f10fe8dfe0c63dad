"""Which checkpoint an adapter's directory goes on from, where some are the framework's own."""

import dataclasses
import errno
import re

import pytest
import torch

from kit.limits import QUICK
from safe_ckpt import CheckpointConfig
from safe_ckpt.adapters import Planned, Saver, torch_file
from safe_ckpt.core.home.candidates import list_directories
from safe_ckpt.errors import DirectoryError


def number_of(name):
    found = re.fullmatch(r"checkpoint_(\d+)", name)
    return int(found[1]) if found else None


def problem_of(path):
    return "" if (path / "model.bin").exists() else "model.bin is missing"


@pytest.fixture
def saver():
    impatient = dataclasses.replace(QUICK, barrier_s=2.0)  # half of that is how long a file is awaited
    with Saver(CheckpointConfig(timeouts=impatient), "toy") as made:
        yield made


def save(saver, home, step):
    planned = Planned(files=[torch_file("model.bin", {"w": torch.ones(2)})])
    path = home.held.path / f"checkpoint_{step}"
    return saver.save(home, path, planned.payload(), step=step).result(timeout_s=30)


@pytest.mark.parametrize(
    ("ours", "stock", "unfinished", "taken"),
    [([], [9, 10], [], 10), ([], [9], [10], 9), ([8], [9], [], 8), ([8, 11], [9], [10], 11), ([], [], [], None)],
)
def test_the_frameworks_own_checkpoints_are_gone_on_from_where_there_is_none_of_ours(
    saver, tmp_path, ours, stock, unfinished, taken
):
    """Ours first, then the framework's by their numbers; one of these that lacks a file is passed over, and none is moved."""
    home = saver.home(tmp_path)
    for step in ours:
        save(saver, home, step)
    for number in [*stock, *unfinished]:
        (tmp_path / f"checkpoint_{number}").mkdir()
    for number in stock:
        torch.save({"w": torch.ones(2)}, tmp_path / f"checkpoint_{number}/model.bin")
    found = saver.newest(home, lambda: list_directories(tmp_path, number_of, problem_of))
    assert (found and found.name) == (taken and f"checkpoint_{taken}")
    assert {path.name for path in tmp_path.glob("checkpoint_*")} == {
        f"checkpoint_{number}" for number in [*ours, *stock, *unfinished]
    }


@pytest.mark.parametrize("times", [1, 10**6])
def test_a_file_that_a_reader_does_not_find_is_waited_for_and_then_passed_over(saver, tmp_path, times):
    """What a framework reads is missing for a moment: it is read again. It stays missing: the one before is taken."""
    home, refused = saver.home(tmp_path), []
    for step in (1, 2):
        save(saver, home, step)

    def verify(path):
        if path.name == "checkpoint_2" and len(refused) < times:
            refused.append(path)
            missing = path / ("model.bin" if times == 1 else "other.bin")
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(missing))

    assert saver.newest(home, verify=verify).step == (2 if times == 1 else 1)
    assert refused


def test_a_file_elsewhere_that_a_reader_does_not_find_is_its_own_error(saver, tmp_path):
    """It says nothing of the checkpoint: no older one is taken instead."""
    home = saver.home(tmp_path)
    for step in (1, 2):
        save(saver, home, step)

    def verify(_):
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", "/elsewhere/tokenizer.json")

    with pytest.raises(DirectoryError, match="tokenizer"):
        saver.newest(home, verify=verify)
