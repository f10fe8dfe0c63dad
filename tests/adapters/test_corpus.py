"""Checkpoints that were saved by an earlier commit, by each way to save: today's code lists, verifies and resumes them.

They lie in ``tests/corpus/checkpoints``; ``tests/corpus/make.py`` says by which commit, and how. What a resume has to find
follows from formulas in ``tests/corpus``; the batches that were left are those of an uninterrupted run of that commit.
"""

import json
import shutil

import obstore
import pytest
from typer.testing import CliRunner

import safe_ckpt
from corpus import of_accelerate, of_doors, of_lightning, of_transformers, plain, ranks
from corpus.make import CHECKPOINTS
from kit.ranks import spawn_ranks, values
from safe_ckpt.tools.cli.app import app

BOTH = [(2, "valid"), (1, "valid")]
HELD = {
    "plain_one_rank": BOTH,
    "plain_frozen": BOTH,
    "plain_marked": [(2, "unhealthy"), (1, "valid")],
    "plain_ranks": BOTH,
    "plain_sharded": BOTH,
    "plain_together": BOTH,
    "lightning_file": [(2, "valid")],
    "lightning_sharded": [(2, "valid")],
    "accelerate": [(0, "valid")],
    "accelerate_sharded": [(0, "valid")],
    "transformers": [(2, "valid")],
    "deepspeed_zero2": [(2, "valid")],
    "deepspeed_zero3": [(2, "valid")],
    "dcp": BOTH,
    "published": BOTH,
    "transformers_sharded": [(2, "valid")],
}


@pytest.fixture
def saved(tmp_path):
    """A copy of all of them."""
    return shutil.copytree(CHECKPOINTS, tmp_path / "checkpoints")


def rows(command, folder):
    done = CliRunner().invoke(app, [command, str(folder), "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.output)


def listed_and_valid(place, held):
    assert [(row["step"], row["state"]) for row in rows("list", place)] == held
    assert [row["state"] for row in rows("verify", place)] == ["valid"] * len(held)


@pytest.mark.parametrize("name", sorted(path.name for path in CHECKPOINTS.iterdir() if path.name != "objects"))
def test_checkpoints_of_an_earlier_commit_are_listed_and_valid(saved, name):
    """Each with its step; what is marked is so because of its numbers, and its bytes are those that were written."""
    listed_and_valid(saved / name, HELD[name])


def test_checkpointer_resumes_an_earlier_commits_checkpoint_from_a_store(bucket):
    """Every object under its key, as it was in the store then."""
    store, objects = obstore.store.from_url(bucket.url("")), CHECKPOINTS / "objects"
    for file in [path for path in objects.rglob("*") if path.is_file()]:
        obstore.put(store, file.relative_to(objects).as_posix(), file.read_bytes())
    listed_and_valid(bucket.url(), BOTH)
    plain.resume_objects(bucket.url())


@pytest.mark.parametrize("name", plain.ONE_RANK)
def test_checkpointer_resumes_an_earlier_commits_checkpoint(saved, name):
    """Weights, optimizer, data, generators and what belongs to the rank; the marked one is passed over."""
    plain.ONE_RANK[name][1](saved / name)


@pytest.mark.parametrize("name", plain.SHARDED)
def test_one_rank_resumes_what_two_have_sharded(saved, name):
    """The parts of both are put together."""
    plain.resume_sharded_on_one_rank(saved / name)


@pytest.mark.filterwarnings("ignore:The dirpath has changed")  # Lightning's, of what it knows of the best ones
def test_lightning_resumes_an_earlier_commits_file(saved):
    """Weights and optimizer, and of the epoch the batch that was left."""
    assert of_lightning.resume(saved / "lightning_file") == [[1, 10, 3, 4]]


def test_accelerate_resumes_an_earlier_commits_directory(saved):
    """The same, with the scheduler and an object of the user's."""
    assert of_accelerate.resume(saved / "accelerate") == [[0, 5, 2, 3]]


def test_a_trainer_resumes_an_earlier_commits_directory(saved):
    """The same, with the four batches that were left."""
    left = [[14, 17, 4, 13], [8, 9, 1, 5], [12, 23, 21, 20], [7, 11, 16, 0]]
    assert of_transformers.resume(saved / "transformers") == left


def test_two_ranks_resume_an_earlier_commits_checkpoints(saved):
    """Each finds its own, its part of what Checkpointer, Accelerate and Lightning sharded, and the batches left."""
    with_accelerate, with_lightning = zip(*values(spawn_ranks(ranks.resume, 2, saved, init=False)), strict=True)
    assert with_accelerate == ([[9, 5, 22, 10]], [[19, 21, 14, 16]])
    assert with_lightning == ([[5, 1, 15, 4]], [[14, 18, 9, 7]])


def test_two_ranks_resume_what_dcp_and_other_savers_saved_earlier(saved):
    """DCP's one import, any saver's files, and a model that is sharded at load with the rows left of the epoch."""
    left = [[14, 17, 4, 13], [8, 9, 1, 5], [12, 23, 21, 20], [7, 11, 16, 0]]
    assert values(spawn_ranks(of_doors.resume, 2, saved, init=False)) == [left] * 2


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_one_process_reads_what_two_ranks_saved_by_dcp(saved):
    """Whole tensors of both ranks' parts, the newest and one by its name."""
    of_doors.resume_dcp(0, saved / "dcp")


@pytest.mark.parametrize("name", HELD)
def test_what_every_door_of_ours_saved_is_found_from_python(saved, name):
    """The newest is the first that ``list`` names, and a follower takes all of them, the oldest first."""
    folder = saved / name
    steps = [step for step, state in HELD[name] if state == "valid"]
    one = safe_ckpt.newest(folder)
    assert (one.step, one.verified, one.healthy) == (steps[0], True, True)
    assert sorted(one.step for one in safe_ckpt.checkpoints(folder)) == sorted(step for step, _ in HELD[name])
    taken = list(safe_ckpt.follow(folder, timeout_s=0))
    assert [one.step for one in taken] == steps[::-1]
    assert all(one.pinned and one.path.exists() for one in taken)
    assert not list(folder.rglob("pins"))
