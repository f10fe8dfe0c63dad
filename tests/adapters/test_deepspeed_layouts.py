"""``install(engine)`` with what DeepSpeed can divide a model into, and with its settings for checkpoints: real engines."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

pytest.importorskip("deepspeed")
import deepspeed_runs as runs

from kit.ranks import spawn_ranks, values
from safe_ckpt.core.formats.manifest import read_manifest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def spawn(function, *args, **options):
    return values(spawn_ranks(function, 2, *args, timeout_s=150, **options))


def goes_on(run, rank, out, train, weigh):
    """Save, train on, go back, and train the same again. Returns whether it came to the same, with ours and with stock."""
    from safe_ckpt.deepspeed import install

    with install(run) as handle:
        train(run, rank, 0, 2)
        run.save_checkpoint(out, tag="warmup/two", client_state={"n": 1})
        handle.wait()
        train(run, rank, 2, 4)
        want = weigh(run)
        assert run.load_checkpoint(out)[1]["n"] == 1
        train(run, rank, 2, 4)
        ours = torch.equal(weigh(run), want)
    if run.checkpoint_writer_enabled():
        return ours, True  # which DeepSpeed itself cannot read
    assert run.load_checkpoint(str(out))[1]["n"] == 1
    train(run, rank, 2, 4)
    return ours, torch.equal(weigh(run), want)


def files(out):
    """Who wrote what of the tag."""
    return {entry.path: entry.rank for entry in read_manifest(Path(out) / "warmup" / "two").files}


def divided(rank, folder):
    folder = Path(folder)
    # The pipeline's groups stay those of the process.
    experts = goes_on(runs.experts(), rank, folder / "experts", runs.train, runs.own_weights)
    save_queue = goes_on(runs.save_queue(), rank, folder / "pipeline", runs.train_pipeline, runs.own_weights)
    return save_queue, experts


def test_pipelines_and_experts_go_on_bit_for_bit(tmp_path):
    """Stages on two ranks, and experts on two ranks: each rank's part is in the tag, and a resume is exact, also stock."""
    assert spawn(divided, str(tmp_path)) == [((True, True), (True, True))] * 2
    layers = files(tmp_path / "pipeline")
    assert {layers[f"layer_{number:02d}-model_states.pt"] for number in (0, 2)} == {0, 1}
    experts = files(tmp_path / "experts")
    assert [experts[f"layer_0_expert_{number}_mp_rank_00_model_states.pt"] for number in (0, 1)] == [0, 1]
    assert (tmp_path / "experts" / "latest").read_text() == "warmup/two"


def with_settings(rank, folder):
    folder = Path(folder)
    os.environ.update(CROSS_SIZE="1", CROSS_RANK="0", LOCAL_SIZE="2")
    writer = {"writer": {"type": "python", "data_parallel": "replica", "decoupled": False}}
    first = goes_on(runs.engine(2, width=64, checkpoint=writer), rank, folder / "writer", runs.train, runs.weights)
    os.environ["LOCAL_RANK"] = "0"  # each rank on a node of its own
    local = {"use_node_local_storage": True}
    second = goes_on(runs.engine(1, width=64, checkpoint=local), rank, folder / "local", runs.train, runs.weights)
    return first, second


def test_settings_that_say_who_writes_are_taken_and_resume_exactly(tmp_path):
    """``checkpoint.writer`` and ``use_node_local_storage`` are taken: one rank writes the weights, and a resume is exact."""
    assert spawn(with_settings, str(tmp_path)) == [((True, True), (True, True))] * 2
    for name in ("writer", "local"):
        assert files(tmp_path / name) == {
            "mp_rank_00_model_states.pt": 0,
            "zero_pp_rank_0_mp_rank_00_optim_states.pt": 0,
            "zero_pp_rank_1_mp_rank_00_optim_states.pt": 1,
        }
