"""The options of torchtitan's manager with ``SafeCheckpointManager``, on two gloo ranks, and what stock does otherwise."""

import json
import os
import shutil

import pytest

pytest.importorskip("torchtitan")
import titan_runs

from kit.ranks import spawn_ranks, values
from safe_ckpt.errors import NoValidCheckpointError
from support import holding_lock

titan_runs.ready()
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def trained(folder, *jobs, ranks=2):
    """Trainings one after the other on so many ranks: what rank 0 tells of each."""
    return values(spawn_ranks(titan_runs.on_rank, ranks, folder, jobs, timeout_s=240))[0]


def names(folder):
    return sorted((path.name for path in folder.glob("step-*")), key=lambda name: int(name[5:]))


def resumed(folder):
    """The names of what the starts in a folder went on from."""
    lines = map(json.loads, (folder / ".safe_ckpt/events.jsonl").read_text().splitlines())
    return [os.path.basename(line["path"]) for line in lines if line["event"] == "resumed"]


@pytest.mark.thorough
def test_keep_latest_k_and_the_resume_follow_the_order_of_commits(tmp_path):
    """``keep_latest_k`` counts what was committed. After a step back a start goes on from the new branch, not from the old one.

    Stock counts folders by their numbers: torn ones too, so that it deletes the good ones, and it goes on from the old branch.
    """
    mine = {"dump": tmp_path / "mine", "keep_latest_k": 2}
    theirs = {**mine, "dump": tmp_path / "theirs", "manager": "stock"}
    trained(tmp_path, (2, mine), (2, theirs), (2, {"dump": tmp_path / "torn"}))
    for kind in ("mine", "theirs", "torn"):
        (tmp_path / kind / "checkpoint/step-90").mkdir()
        (tmp_path / kind / "checkpoint/step-91").mkdir()
    shutil.rmtree(tmp_path / "torn/checkpoint/step-2")
    refused = trained(tmp_path, (8, mine), (8, theirs), (2, {"dump": tmp_path / "torn"}))[2]
    assert isinstance(refused, NoValidCheckpointError), refused
    assert "without .metadata" in str(refused)
    assert names(tmp_path / "mine/checkpoint") == ["step-6", "step-8", "step-90", "step-91"]
    assert names(tmp_path / "theirs/checkpoint") == [
        "step-8",
        "step-90",
        "step-91",
    ]  # and before the last save, no good one
    back = {"dump": tmp_path / "back", "keep_latest_k": 0}
    trained(tmp_path, (8, back), (4, {**back, "load_step": 2}), (6, back))
    assert resumed(tmp_path / "back/checkpoint") == ["step-4"]


def test_a_seed_and_a_last_save_in_hugging_faces_layout_are_read(tmp_path):
    """A seed of one rank is begun from on two, as with stock; a last save in that layout is read by stock and by ours."""
    seed = {"create_seed_checkpoint": True, "last_save_model_only": True}
    trained(tmp_path, (4, {**seed, "dump": tmp_path / "mine"}), ranks=1)
    assert names(tmp_path / "mine/checkpoint") == ["step-0"]
    shutil.copytree(tmp_path / "mine/checkpoint/step-0", tmp_path / "theirs/checkpoint/step-0")
    last = {"interval": 2, "last_save_model_only": True, "last_save_in_hf": True}
    told = trained(
        tmp_path,
        (4, {**last, "dump": tmp_path / "mine"}),
        (4, {**last, "dump": tmp_path / "theirs", "manager": "stock"}),
    )
    assert told[0] == told[1], told
    files = [sorted(os.listdir(tmp_path / kind / "checkpoint/step-4")) for kind in ("mine", "theirs")]
    assert sorted({*files[1], "manifest.json"}) == files[0]
    start = {"initial_load_in_hf": True, "initial_load_path": str(tmp_path / "mine/checkpoint/step-4")}
    told = trained(
        tmp_path,
        (3, {**start, "dump": tmp_path / "ours from it"}),
        (3, {**start, "dump": tmp_path / "stock from it", "manager": "stock"}),
        (3, {"dump": tmp_path / "fresh"}),
    )
    assert told[0] == told[1] != told[2], told


def test_a_start_from_elsewhere_only_reads(tmp_path):
    """``initial_load_path`` and ``load_only`` read what a live job holds; ``exclude_from_loading`` leaves out what it names."""
    first = trained(tmp_path, (4, {"dump": tmp_path / "first"}))
    folder = tmp_path / "first/checkpoint"
    before = sorted(os.listdir(folder))
    start = {"initial_load_path": str(folder / "step-4"), "initial_load_model_only": False}
    with holding_lock(folder / ".safe_ckpt"):
        told = trained(
            tmp_path,
            (4, {"dump": tmp_path / "first", "load_only": True}),
            (4, {**start, "dump": tmp_path / "second"}),
            (6, {**start, "dump": tmp_path / "third", "exclude_from_loading": ["dataloader"]}),
            (6, {**start, "dump": tmp_path / "fourth"}),
        )
    assert told[0] == told[1] == first[0], told
    assert isinstance(told[2], str), told
    assert told[2] != told[3]
    assert sorted(os.listdir(folder)) == before


def test_another_number_of_ranks_goes_on_without_the_place_in_the_data(tmp_path):
    """torchtitan's loader refuses another number of ranks; without its state one rank goes on where two were, and back."""
    (two,) = trained(tmp_path, (4, {}))
    refused, one = trained(tmp_path, (6, {}), (5, {"exclude_from_loading": ["dataloader"]}), ranks=1)
    assert "dp_degree is inconsistent" in str(refused), refused
    assert isinstance(one, str), one
    (again,) = trained(tmp_path, (7, {"exclude_from_loading": ["dataloader"]}))
    assert isinstance(again, str), again
    assert resumed(tmp_path / "checkpoint")[-2:] == ["step-4", "step-5"]
    assert len({two, one, again}) == 3
