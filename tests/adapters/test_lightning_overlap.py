"""Overlapped snapshots in a Trainer: taken where everything that changes parameters is known, and never torn."""

import threading

import pytest
import torch
from lightning_runs import PACKAGES, module_class, package, trainer

from safe_ckpt import CheckpointConfig
from safe_ckpt.core.copying import Copy
from safe_ckpt.core.engine import Engine
from safe_ckpt.lightning import SafeCheckpointCallback, overlapping


class Spy:
    """What was decided at each save, and the weights at that moment."""

    def __init__(self, monkeypatch):
        self.taken, self.reasons, self.weights = [], [], []
        decide = overlapping.deferral

        def deferral(trainer, mode):
            found = decide(trainer, mode)
            self.taken.append(found is not None)
            self.reasons.append(overlapping.reason(trainer))
            state = trainer.lightning_module.state_dict()
            self.weights.append((trainer.global_step, {key: value.clone() for key, value in state.items()}))
            return found

        monkeypatch.setattr(overlapping, "deferral", deferral)


def run(folder, module, *callbacks, snapshot="auto", pl=None, **more):
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


@pytest.mark.parametrize("name", PACKAGES)
def test_a_plain_trainer_overlaps_and_nothing_is_torn(tmp_path, monkeypatch, name):
    """Automatic optimization, torch's own optimizer, Lightning's own callbacks: copied while the next closure runs, and what
    is on disk is what was there at the save, although the copy begins only when the step stands at the gate.
    """
    spy = Spy(monkeypatch)
    reached = threading.Event()
    passing, copying = Copy.pass_gate, Copy.run_deferred

    def pass_gate(self, timeout_s):
        reached.set()
        passing(self, timeout_s)

    def run_deferred(self):
        assert reached.wait(20)
        reached.clear()
        copying(self)

    monkeypatch.setattr(Copy, "pass_gate", pass_gate)
    monkeypatch.setattr(Copy, "run_deferred", run_deferred)
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


def test_auto_overlaps_where_it_is_safe(tmp_path, monkeypatch):
    """Nothing was asked for and nothing stands against it: overlapped, and right."""
    spy = Spy(monkeypatch)
    run(tmp_path, module_class(package(PACKAGES[0]))())
    assert spy.reasons == [""] * 6
    assert all(spy.taken)
    assert same_as_at_the_save(tmp_path, spy) == 6


def _module(pl, kind):
    base = module_class(pl)

    class ByHand(base):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.net(batch[0]).square().mean())
            optimizer.step()

    class Clipped(base):
        def on_train_batch_start(self, batch, batch_idx):
            for weight in self.net.parameters():
                weight.data.clamp_(-0.1, 0.1)

    class Unknown(base):
        def configure_optimizers(self):
            class Mine(torch.optim.SGD):
                pass

            return Mine(self.parameters(), lr=0.1)

    class Hooked(base):
        def __init__(self):
            super().__init__()
            self.net.register_forward_pre_hook(lambda *_: None)

    return {"by hand": ByHand, "clipped": Clipped, "unknown": Unknown, "hooked": Hooked}.get(kind, base)()


def _swa(pl):
    return pl.callbacks.StochasticWeightAveraging(swa_lrs=0.1, swa_epoch_start=1)


def _ema(pl):
    return pl.callbacks.EMAWeightAveraging()


def _own(pl):
    class Own(pl.Callback):
        def on_train_batch_start(self, trainer, module, *_):
            for weight in module.parameters():
                weight.data.mul_(0.5)

    return Own()


@pytest.mark.parametrize("kind", ["by hand", "clipped", "unknown", "hooked", "swa", "ema", "own"])
@pytest.mark.filterwarnings("ignore")
def test_auto_is_eager_where_something_else_changes_parameters(tmp_path, monkeypatch, kind):
    """Manual optimization, edits through .data, optimizers and callbacks of the user's, averaging: eager, and never torn."""
    pl = package(PACKAGES[0])
    spy = Spy(monkeypatch)
    callbacks = [{"swa": _swa, "ema": _ema, "own": _own}[kind](pl)] if kind in ("swa", "ema", "own") else []
    run(tmp_path, _module(pl, kind), *callbacks)
    assert not any(spy.taken), spy.reasons
    assert all(spy.reasons)
    if kind != "ema":  # there the save swaps the averaged weights in
        assert same_as_at_the_save(tmp_path, spy) >= 3


def test_eager_is_eager(tmp_path, monkeypatch):
    """Asked for, it is done, whatever is known."""
    spy = Spy(monkeypatch)
    run(tmp_path, module_class(package(PACKAGES[0]))(), snapshot="eager")
    assert not any(spy.taken)


def test_memory_is_made_ready_when_training_begins(tmp_path, monkeypatch):
    """Before the first step, for the state as it will be after it."""
    asked = []
    prepare = Engine.prepare
    monkeypatch.setattr(Engine, "prepare", lambda self, size: (asked.append(size), prepare(self, size))[1])
    module = module_class(package(PACKAGES[0]))()
    run(tmp_path, module)
    parameters = sum(p.nbytes for p in module.parameters())
    assert len(asked) == 1
    assert asked[0] >= 3 * parameters
