"""Overlapped snapshots in a Trainer: when they were asked for, and never torn."""

import contextlib
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from lightning_runs import PACKAGES, module_class, package, trainer

from safe_ckpt import CheckpointConfig
from safe_ckpt.core.saving.engine import Engine
from safe_ckpt.core.staging.snapshot import StagingCopy
from safe_ckpt.errors import ConfigError
from safe_ckpt.lightning import SafeCheckpointCallback, contents, strategies


class Spy:
    """What was decided at each save, and the weights at that moment."""

    def __init__(self, monkeypatch):
        self.taken, self.weights = [], []
        decide = contents.overlap_plan

        def overlap_plan(trainer, mode):
            found = decide(trainer, mode)
            self.taken.append(found is not None)
            state = trainer.lightning_module.state_dict()
            self.weights.append((trainer.global_step, {key: value.clone() for key, value in state.items()}))
            return found

        monkeypatch.setattr(contents, "overlap_plan", overlap_plan)


def run(folder, module, *callbacks, snapshot, pl=None, **more):
    pl = pl or package(PACKAGES[0])
    pl.seed_everything(3)
    ours = SafeCheckpointCallback(
        dirpath=folder,
        filename="{step}",
        save_top_k=-1,
        every_n_train_steps=1,
        config=CheckpointConfig(snapshot=snapshot),
    )
    trainer(pl, [ours, *callbacks], folder, max_epochs=2, **more).fit(module)


def same_as_at_the_save(folder, spy):
    found = {}
    for path in folder.glob("*.ckpt"):
        loaded = torch.load(path, weights_only=False)
        found[loaded["global_step"]] = loaded["state_dict"]
    assert sorted(found) == [step for step, _ in spy.weights]
    for step, weights in spy.weights:
        assert all(found[step][key].equal(value) for key, value in weights.items()), step
    return len(found)


@pytest.mark.quick
@pytest.mark.parametrize("name", PACKAGES)
def test_parameters_whose_memory_is_freed_between_steps_are_copied_at_once(name):
    """FSDP 1 fills and frees it, averages change it: nothing is copied later, also under a class of yours."""
    pl, net = package(name), torch.nn.Linear(2, 2)
    single = pl.strategies.SingleDeviceStrategy(torch.device("cpu"))

    class OfYours(pl.strategies.FSDPStrategy):
        pass

    class AverageOfYours(pl.callbacks.StochasticWeightAveraging):
        pass

    cases = {
        "single": (single, []),
        "fsdp": (pl.strategies.FSDPStrategy(), []),
        "fsdp of yours": (OfYours(), []),
        "average": (single, [pl.callbacks.StochasticWeightAveraging(1e-2)]),
        "average of yours": (single, [AverageOfYours(1e-2)]),
    }
    later = set()
    for case, (strategy, callbacks) in cases.items():
        made = SimpleNamespace(
            callbacks=callbacks, strategy=strategy, lightning_module=net, optimizers=[torch.optim.SGD(net.parameters())]
        )
        if contents.overlap_plan(made, "overlapped") is not None:
            later.add(case)
    assert later == {"single"}


@pytest.mark.quick
@pytest.mark.parametrize(
    ("processes", "sharding", "gathers"), [(1, "FULL_SHARD", False), (2, "FULL_SHARD", True), (2, "NO_SHARD", False)]
)
def test_parts_are_asked_for_where_fsdp_has_some(processes, sharding, gathers):
    """On one process, and where nothing is sharded, torch has none to give, and Lightning's own way is taken."""
    kind = type("FSDPStrategy", (), {"_state_dict_type": "full", "world_size": processes})
    strategy = kind()
    strategy.sharding_strategy = SimpleNamespace(name=sharding)
    assert strategies.form_of(strategy).gathers is gathers


@pytest.mark.quick
@pytest.mark.parametrize("way", ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2", "FULL_SHARD"])
@pytest.mark.parametrize("kind", ["sharded", "full"])
def test_a_hybrid_of_fsdp1_in_parts_is_refused_by_name(tmp_path, way, kind):
    """Its moments come back wrong under Accelerate, by the function of torch that Lightning calls as well."""
    pl = package(PACKAGES[0])
    made = SimpleNamespace(strategy=pl.strategies.FSDPStrategy(state_dict_type=kind, sharding_strategy="FULL_SHARD"))
    made.strategy.sharding_strategy = SimpleNamespace(name=way)
    refused = "HYBRID" in way and kind == "sharded"
    with pytest.raises(ConfigError, match="moments come back wrong") if refused else contextlib.nullcontext():
        strategies.refuse_hybrid(made.strategy)


@pytest.mark.parametrize("name", PACKAGES)
def test_a_trainer_overlaps_and_nothing_is_torn(tmp_path, monkeypatch, name):
    """Copied while the next closure runs: what is on disk is what was there at the save, although the copy begins only when
    the step stands at the gate.
    """
    spy = Spy(monkeypatch)
    reached = threading.Event()
    passing, copying = StagingCopy.pass_gate, StagingCopy.run_deferred

    def pass_gate(self, timeout_s):
        reached.set()
        passing(self, timeout_s)
        reached.clear()

    def run_deferred(self):
        limit = time.monotonic() + 20
        while not reached.wait(0.01) and not self.wait(0):  # of the two threads that come here one copies
            assert time.monotonic() < limit
        copying(self)

    monkeypatch.setattr(StagingCopy, "pass_gate", pass_gate)
    monkeypatch.setattr(StagingCopy, "run_deferred", run_deferred)
    pl = package(name)
    run(tmp_path, module_class(pl)(), _open_at_the_end(pl, reached), snapshot="overlapped", pl=pl)
    assert all(spy.taken)
    assert same_as_at_the_save(tmp_path, spy) == 6


def _open_at_the_end(pl, reached):
    class OpenAtTheEnd(pl.Callback):
        """The last save has no step behind it that would come to the gate."""

        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step == 6:
                reached.set()

    return OpenAtTheEnd()


def _swa(pl):
    return pl.callbacks.StochasticWeightAveraging(swa_lrs=0.1, swa_epoch_start=1)


def _ema(pl):
    return pl.callbacks.EMAWeightAveraging()


@pytest.mark.parametrize("make", [_swa, _ema])
@pytest.mark.filterwarnings("ignore")
def test_averaging_callbacks_make_snapshots_eager(tmp_path, monkeypatch, make):
    """Callbacks that swap other weights in between steps: eager even where overlapping was asked for."""
    pl = package(PACKAGES[0])
    spy = Spy(monkeypatch)
    run(tmp_path, module_class(pl)(), make(pl), snapshot="overlapped")
    assert not any(spy.taken)
    if make is _swa:  # with the other one the save itself swaps
        assert same_as_at_the_save(tmp_path, spy) >= 3


@pytest.mark.parametrize("snapshot", ["auto", "eager"])
def test_edits_between_steps_are_not_in_the_file_by_default(tmp_path, monkeypatch, snapshot):
    """What hooks of the module do to parameters after a save, through .data and under no_grad, is not in the file."""
    pl = package(PACKAGES[0])

    class Clipped(module_class(pl)):
        @torch.no_grad()
        def on_train_batch_end(self, *_):
            for weight in self.net.parameters():
                weight.data.clamp_(-0.1, 0.1)

    spy = Spy(monkeypatch)
    run(tmp_path, Clipped(), snapshot=snapshot)
    assert not any(spy.taken)
    assert same_as_at_the_save(tmp_path, spy) == 6


def test_memory_is_made_ready_when_training_begins(tmp_path, monkeypatch):
    """Before the first step, for the state as it will be after it."""
    asked = []
    prepare = Engine.prepare
    monkeypatch.setattr(Engine, "prepare", lambda self, size: (asked.append(size), prepare(self, size))[1])
    module = module_class(package(PACKAGES[0]))()
    run(tmp_path, module, snapshot="auto")
    parameters = sum(p.nbytes for p in module.parameters())
    assert len(asked) == 1
    assert asked[0] >= 3 * parameters
