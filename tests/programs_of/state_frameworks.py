"""Doors of frameworks: Fabric, the file of Lightning's callback, ``save_model`` and ``save_state`` of Accelerate."""

from __future__ import annotations

import contextlib
import copy
import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import safetensors.torch
import torch
from accelerate import Accelerator, load_checkpoint_in_model
from lightning.fabric import Fabric
from lightning.fabric.fabric import _unwrap_objects
from lightning.fabric.plugins import TorchCheckpointIO

from accelerate_runs import fresh, make
from programs_of.draw import Draw
from programs_of.modules import Objects
from programs_of.runner import Verdict
from programs_of.same import difference
from programs_of.state_oracle import (
    Warned,
    as_torch_has_it,
    bare,
    config_of,
    expected_of,
    judge,
    refusing,
    state_of,
    values_of,
    warned_of,
)
from programs_of.trees import Stateful, Trees
from safe_ckpt import RngState
from safe_ckpt.accelerate import register
from safe_ckpt.adapters import pickles
from safe_ckpt.errors import HostileCheckpointError, StateError
from safe_ckpt.lightning import SafeCheckpointCallback, SafeCheckpointIO


def _again(draw: Draw) -> Draw:
    """The same choices, to make a likeness with."""
    return Draw(draw.seed, draw.made)


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    """What frameworks know nothing of, as its value."""
    return {name: one.state_dict() if isinstance(one, RngState) else bare(one) for name, one in state.items()}


def _fabric(draw: Draw, folder: Path) -> Verdict:
    """``fabric.save`` and ``fabric.load`` with the plugin give what they give with Lightning's own."""
    state = _plain(state_of(draw, 0))
    path = draw.among("file", "a.ckpt", "step-9.ckpt", "below/ü x", "last.pt")
    into_nothing, again = draw.flag("into nothing"), draw.among("saves", 1, 2)
    told: list[str] = []
    _say_again()

    def through(plugin: Any, place: Path) -> Any:
        fabric = Fabric(accelerator="cpu", devices=1, plugins=[plugin])
        for _ in range(again):
            fabric.save(place, state)
        if into_nothing:
            return fabric.load(place, weights_only=False)
        into = _plain(state_of(_again(draw), 1 if isinstance(plugin, SafeCheckpointIO) else 2))
        rest = fabric.load(place, into, weights_only=False)
        return {name: values_of(one) for name, one in {**into, **rest}.items()}

    expected = _stock(lambda: as_torch_has_it(through(TorchCheckpointIO(), folder / "stock" / path)))
    found: dict[str, Any] = {}
    with refusing(told, state), warned_of() as warned:
        verdict = _taken(lambda: found.update(through(SafeCheckpointIO(), folder / "ours" / path)), warned, expected)
    if told:
        return Verdict(came_to="refused at the save")
    # Fabric copies containers before its plugin gets them: what was one is two, in a stock file as well.
    saved = {name: values_of(one) for name, one in _unwrap_objects(state).items()}
    return verdict or judge(expected or saved, found, "equal to stock", saved)


def _say_again() -> None:
    """What a save warns of it warns of once for each name."""
    pickles._judged.clear()
    pickles._data_alone.clear()


def _stock(make_it: Callable[[], Any]) -> Any:
    """What stock gives; None where it cannot."""
    try:
        return make_it()
    except Exception:
        return None


logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def _taken(load: Callable[[], Any], warned: Warned, expected: Any) -> Verdict | None:
    """Load what was saved. Verdict where that refuses it, as a warning of the save has said, or where stock fails, too."""
    try:
        load()
    except StateError:  # of a save that is within
        raise
    except Exception as error:
        if isinstance(error, HostileCheckpointError | pickle.UnpicklingError) and "will refuse" in warned.said:
            return Verdict(came_to="a warning at the save, and the load refuses it")
        if expected is None:
            return Verdict(came_to="no load takes it, nor that of stock")
        raise
    return None


class _Stop(Exception):
    pass


class _Box(Stateful, pl.Callback):
    """With a state of its own."""


class _Module(pl.LightningModule):
    """Steps its optimizer, and has more to save."""

    def __init__(self, draw: Draw, values: int) -> None:
        super().__init__()
        self.automatic_optimization = False
        trees, objects = Trees(draw, values), Objects(draw, values)
        self.net = objects.module("net")
        for name, one in trees.tensors("buffers", draw.number("buffers", 0, 3)).items():
            self.net.register_buffer(str(name).replace(".", "_"), one)
        self.made = objects.optimizer("made")
        self.held = {"more": trees.tree("more", 3)}  # an attribute of its own would be a parameter
        self.box = _Box(trees.tree("box", 2))
        self.stops = values > 0

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Without a forward."""
        self.optimizers().step()

    def configure_optimizers(self) -> Any:
        """The one that was made."""
        return self.made

    def train_dataloader(self) -> Any:
        """Two batches."""
        return torch.utils.data.DataLoader([0, 1])

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """More."""
        checkpoint["more"] = self.held["more"]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """More."""
        self.held["more"] = checkpoint["more"]

    def on_train_start(self) -> None:
        """What was resumed is there."""
        if self.stops:
            raise _Stop

    def all(self) -> dict[str, Any]:
        """What is saved."""
        return {"net": self.net, "optimizer": self.made, "more": self.held["more"], "box": self.box.inner}


def _fit(module: _Module, folder: Path, config: Any, given: dict[str, Any], **more: Any) -> pl.Trainer:
    saves = SafeCheckpointCallback(
        dirpath=folder, config=config, every_n_train_steps=1, save_top_k=-1, filename="{step}", **more
    )
    trainer = pl.Trainer(
        max_steps=1 if not module.stops else 3, accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder, callbacks=[saves, module.box],
    )  # fmt: skip
    trainer.fit(module, **given)
    return trainer


def _lightning(draw: Draw, folder: Path) -> Verdict:
    """The file of the callback, or of the user's own save, has what ``torch.save`` keeps, and ``resume="auto"`` takes it."""
    module, config, told = _Module(draw, 0), config_of(draw), []
    is_users, given = draw.flag("saved by the user", of=3), draw.among("fit", {}, {"weights_only": False})
    _say_again()
    if any(one.is_meta for one in module.state_dict().values() if isinstance(one, torch.Tensor)):
        return Verdict(came_to="no Trainer takes it")
    with refusing(told, ["checkpoint"]), warned_of() as warned:
        trainer = _fit(module, folder / "run", config, given)
        file = folder / "run" / "step=1.ckpt"
        if is_users:
            trainer.save_checkpoint(file := folder / "run" / "step=1-own.ckpt")
    if told:
        return Verdict(came_to="refused at the save")
    kept = torch.load(file, weights_only=False)
    saved = {name: values_of(one) for name, one in module.all().items()}
    in_file = {
        "net": {name.removeprefix("net."): one for name, one in kept["state_dict"].items()},
        "optimizer": kept["optimizer_states"][0], "more": kept["more"],
        "box": next(one["inner"] for one in kept["callbacks"].values() if "inner" in one),
    }  # fmt: skip
    as_saved = _stock(lambda: {name: as_torch_has_it(one) for name, one in saved.items()}) or {**saved}
    as_saved["net"] = {**as_saved["net"]}  # Lightning's own mapping has other names
    verdict = judge(as_saved, in_file, "equal in the file")
    if verdict.wrong:
        return verdict
    copied = _stock(
        lambda: copy.deepcopy({"box": as_torch_has_it(module.box.inner)})
    )  # as Lightning does it at a resume
    expected = _stock(lambda: expected_of(module.all(), _Module(_again(draw), 2).all())) if copied else None
    again = _Module(_again(draw), 1)

    def resume() -> None:
        with contextlib.suppress(_Stop):
            _fit(again, folder / "run", config, given, resume="auto")
            raise ValueError("it did not begin to train")

    return _taken(resume, warned, expected) or judge(expected or saved, again.all(), "equal", saved)


class _Net(torch.nn.Module):
    """A module with tensors of every kind as its buffers and parameters."""

    def __init__(self, draw: Draw, values: int) -> None:
        super().__init__()
        self.inner = Objects(draw, values).module("net")
        for key, one in Trees(draw, values).tensors("own", draw.number("own", 0, 5)).items():
            add = self.register_parameter if isinstance(one, torch.nn.Parameter) else self.register_buffer
            add(str(key).replace(".", "_"), one)


def _files(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for file in sorted(folder.iterdir()):
        if file.suffix == ".safetensors":
            found |= safetensors.torch.load_file(file)
        elif file.suffix == ".bin":
            found |= torch.load(file, weights_only=True)
    return found


def _weights(draw: Draw, folder: Path) -> Verdict:
    """``save_model`` writes what Accelerate's own writes, and Accelerate loads it."""
    model, told = _Net(draw, 0), []
    options = {
        "safe_serialization": not draw.flag("bin", of=3),
        "max_shard_size": draw.among("shards", "10GB", 1 << 10, "1MB"),
    }
    is_patched, again = draw.flag("the Accelerator's own name"), draw.among("saves", 1, 2)
    state = {name: one for name, one in model.state_dict().items() if isinstance(one, torch.Tensor)}
    with fresh(), register(accelerator := make(), config_of(draw)) as handle:
        save = accelerator.save_model if is_patched else handle.save_model
        with refusing(told, [*model.state_dict(), "model"]):
            for _ in range(again):
                save(model, folder / "ours", **options)
        if told:
            return Verdict(came_to="refused at the save")
        stock = _stock(lambda: Accelerator.save_model(accelerator, model, folder / "stock", **options))
        del stock
    found = _files(folder / "ours")
    by_stock = _stock(lambda: _files(folder / "stock")) or found
    for name, one in found.items():
        wanted = as_torch_has_it(state[name].detach())
        if options["safe_serialization"] and wanted.layout is torch.strided:
            wanted = wanted.as_subclass(torch.Tensor).resolve_conj().resolve_neg().contiguous()
        if how := difference({"x": wanted}, {"x": one.detach()}):
            return Verdict(came_to="differs", wrong=f"{how} {name}")
    if missing := [name for name in {**state, **by_stock} if name not in found and not _is_tied(name, found, state)]:
        return Verdict(came_to="differs", wrong=f"missing: {missing} of {sorted(state)}")
    return _loaded(draw, folder, found)


def _is_tied(name: str, found: dict[str, Any], state: dict[str, Any]) -> bool:
    """Whether another name of the same memory is there."""
    one = state.get(name)
    return one is not None and any(
        other in found and state[other].shape == one.shape and state[other].data_ptr() == one.data_ptr()
        for other in state
    )


def _loaded(draw: Draw, folder: Path, found: dict[str, Any]) -> Verdict:
    """By Accelerate, as from stock's folder."""

    def load(name: str) -> dict[str, Any]:
        into = _Net(_again(draw), 1)
        load_checkpoint_in_model(into, folder / name)
        return into.state_dict()

    expected = _stock(lambda: load("stock"))
    if expected is None:
        return Verdict(came_to="weights in files that stock does not load")
    loaded, saved = load("ours"), _Net(_again(draw), 0).state_dict()
    for name in found:
        how = difference({"x": expected[name]}, {"x": loaded[name]})
        if how and not torch.equal(saved[name], loaded[name]):  # stock loses that a tensor is to be conjugated
            return Verdict(came_to="differs", wrong=f"loaded: {name}: {how}")
    return Verdict(came_to="weights equal")


class _Project:
    """A model, an optimizer, a scheduler, and objects that are registered; saved and taken back by an Accelerator."""

    def __init__(self, draw: Draw, values: int, names: list[str]) -> None:
        trees, objects = Trees(draw, values), Objects(draw, values)
        self.all = {
            "model": _Net(draw, values), "optimizer": objects.optimizer("optimizer"),
            "scheduler": objects.scheduler("scheduler"), **{name: Stateful(trees.tree(name, 3)) for name in names},
        }  # fmt: skip

    def act(self, how: str, folder: Path, config: Any) -> None:
        """With ours, or, without settings, with stock Accelerate."""
        with fresh():
            accelerator = make(folder)
            if config is not None:
                register(accelerator, config)
            _, _, _, *registered = self.all.values()
            accelerator.prepare(*list(self.all.values())[:3])
            accelerator.register_for_checkpointing(*registered)
            getattr(accelerator, how)()
            accelerator.end_training()


def _accelerate(draw: Draw, folder: Path) -> Verdict:
    """``save_state`` and ``load_state``."""
    config, told = config_of(draw), []
    names = draw.among("registered", ["tree"], ["tree", "other"], [])
    one = _Project(draw, 0, names)
    if any(value.is_meta for value in one.all["model"].state_dict().values() if isinstance(value, torch.Tensor)):
        return Verdict(came_to="no Accelerator takes it")
    _say_again()
    saved = {name: values_of(value) for name, value in one.all.items()}

    def by_stock() -> dict[str, Any]:
        one.act("save_state", folder / "stock", None)
        other = _Project(_again(draw), 2, names)
        other.act("load_state", folder / "stock", None)
        return {name: as_torch_has_it(values_of(value)) for name, value in other.all.items()}

    expected = _stock(by_stock)
    with (
        refusing(told, [*one.all["model"].state_dict(), "model", "optimizer", "scheduler", "custom"]),
        warned_of() as warned,
    ):
        one.act("save_state", folder / "ours", config)
    if told:
        return Verdict(came_to="refused at the save")
    into = _Project(_again(draw), 1, names)
    return _taken(lambda: into.act("load_state", folder / "ours", config), warned, expected) or judge(
        expected or saved, into.all, "equal", saved
    )


DOORS = [_fabric, _lightning, _weights, _accelerate]
