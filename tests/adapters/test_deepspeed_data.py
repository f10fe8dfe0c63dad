"""install(engine, resume_data=True): the engine's own loader goes on within an epoch, on as many ranks and on fewer."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

pytest.importorskip("deepspeed")
import deepspeed_runs as runs
import torch

from kit.ranks import spawn_ranks, values
from kit.thorough import THOROUGH
from safe_ckpt import CheckpointConfig, Telemetry
from safe_ckpt.errors import ConfigError, SafeCheckpointError

pytestmark = pytest.mark.timeout(300)
SIZE, EPOCHS = 44, 2


class Noisy(torch.utils.data.Dataset):
    """Draws in the workers, which DeepSpeed's loader has two of."""

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        return index, torch.rand(64) + random.random()


def engine_with_data(rank):
    deepspeed = runs._deepspeed()

    torch.manual_seed(rank)
    net = torch.nn.Linear(64, 16)
    engine, _, _, _ = deepspeed.initialize(
        model=net,
        model_parameters=net.parameters(),
        training_data=Noisy(),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
            "zero_optimization": {"stage": 1},
            "steps_per_print": 10**9,
        },
    )
    return engine


def epochs(rank, folder, stop, *, resumed):
    """Samples and sums of what was drawn, in order; a save and the end behind ``stop`` batches."""
    from safe_ckpt.deepspeed import install

    engine = engine_with_data(rank)
    seen, epoch, count = [], 0, 0
    with install(engine, resume_data=True):
        if resumed:
            epoch = engine.load_checkpoint(folder)[1]["epoch"]
        loader = engine.training_dataloader
        for number in range(epoch, EPOCHS):
            loader.data_sampler.set_epoch(number)
            for index, values_ in loader:
                engine.backward(engine(values_).square().mean())
                engine.step()
                seen.append([number, index.tolist(), values_.sum().item()])
                count += 1
                if count == stop:
                    engine.save_checkpoint(folder, client_state={"epoch": number})
                    return seen, None
        weights = runs.weights(engine).tolist()
    return seen, weights


def job(size, folder, stop, *, resumed=False):
    return values(spawn_ranks(in_rank, size, str(folder), stop, resumed, timeout_s=120))


def in_rank(rank, folder, stop, resumed):
    return epochs(rank, folder, stop, resumed=resumed)


def test_the_engines_loader_goes_on_within_an_epoch(tmp_path):
    """Samples, what two workers drew for them, and weights: those of a run that was not stopped, on both ranks."""
    whole = job(2, tmp_path / "whole", 0)
    for stop in (2, 8) if THOROUGH else (8,):
        before = job(2, tmp_path / str(stop), stop)
        after = job(2, tmp_path / str(stop), 0, resumed=True)
        for rank in (0, 1):
            assert json.dumps(before[rank][0] + after[rank][0]) == json.dumps(whole[rank][0]), (stop, rank)
            assert after[rank][1] == whole[rank][1]


@pytest.mark.thorough
def test_a_place_loaded_without_resume_data_is_one_warning(tmp_path):
    """A tag with the place of the engine's loader, loaded without resume_data: one warning says what to do."""
    job(1, tmp_path, 2)
    (said,) = values(spawn_ranks(without, 1, str(tmp_path), timeout_s=60))
    assert said == 1


def without(rank, folder):
    from safe_ckpt.deepspeed import data_place, install

    said = []
    data_place.logger.addFilter(lambda record: said.append(record.getMessage()) or False)
    with install(engine_with_data(rank)) as handle:
        handle._engine.load_checkpoint(folder)
    return sum("resume_data=True" in one for one in said)


def test_an_engine_without_a_loader_is_refused(tmp_path):
    """At install, with what to do."""
    assert values(spawn_ranks(refused, 1, str(tmp_path), timeout_s=60)) == [True]


def refused(rank, folder):
    from safe_ckpt.deepspeed import install

    engine = runs.engine(0, width=64)
    with install(engine) as handle:
        before = dict(vars(engine))
        with pytest.raises(ConfigError, match="training_data"):
            install(engine, resume_data=True)
        assert vars(engine) == before
        assert not handle.closed
    return Path(folder).is_dir() and rank == 0


def test_an_install_that_fails_leaves_engine_and_loader_as_they_were(tmp_path):
    """Settings that need what is not there, found behind all checks: also the loader makes its own again."""
    assert values(spawn_ranks(failing, 1, str(tmp_path), timeout_s=60)) == [True]


def failing(rank, folder):
    from safe_ckpt.deepspeed import install

    net = torch.nn.Linear(64, 16)
    engine, _, _, _ = runs._deepspeed().initialize(
        model=net, training_data=Noisy(), config={"train_micro_batch_size_per_gpu": 4, "steps_per_print": 10**9}
    )
    before = dict(vars(engine)), dict(vars(engine.training_dataloader))
    unmet = CheckpointConfig(telemetry=Telemetry(prometheus_textfile=f"{folder}/none/x.prom"))
    with pytest.raises(SafeCheckpointError):
        install(engine, unmet, resume_data=True)
    assert (dict(vars(engine)), dict(vars(engine.training_dataloader))) == before
    return rank == 0
