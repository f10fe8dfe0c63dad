"""What goes on after ``safe_ckpt.dcp.load`` goes on as if it had never stopped, or a warning says what is missing."""

import logging

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from kit.ranks import spawn_ranks, values
from safe_ckpt import Checkpointer, dcp
from safe_ckpt.errors import NoValidCheckpointError, RestoreError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
LOADED, END, USED = 3, 8, 5
WAYS = ("functions", "app", "objects")


class Net(nn.Module):
    """One of its layers is not used at first."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.later = nn.Linear(8, 6), nn.Linear(6, 4), nn.Linear(4, 4)

    def forward(self, values, step):
        found = self.second(self.first(values).relu())
        return self.later(found) if step >= USED else found


class Counts(torch.optim.Optimizer):
    """Its state has a number in it that is no tensor, as some optimizers count their steps."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["step"] = state.get("step", 0) + 1
                    state.setdefault("sum", torch.zeros_like(parameter))
                    state["sum"].mul_(0.9).add_(parameter.grad)
                    parameter.add_(state["sum"], alpha=-group["lr"] / state["step"])


OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.05),
    "counts": Counts,
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
}
# Those of torch whose state does not begin at zero.
BEGIN_ELSEWHERE = {
    "asgd": lambda parameters: torch.optim.ASGD(parameters, lr=torch.tensor(0.05)),
    "nadam": lambda parameters: torch.optim.NAdam(parameters, lr=0.05),
    "rprop": lambda parameters: torch.optim.Rprop(parameters, lr=0.05),
}


class Run:
    """A model, its optimizer and its scheduler, whole or of FSDP2 or DDP."""

    def __init__(self, seed, optimizer="adamw", wrap=""):
        torch.manual_seed(seed)
        self.model = self.inner = Net()
        if wrap == "fsdp2":
            fully_shard(self.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        elif wrap == "ddp":
            self.model = nn.parallel.DistributedDataParallel(self.inner, find_unused_parameters=True)
        self.optimizer = (OPTIMIZERS | BEGIN_ELSEWHERE)[optimizer](self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 6], 0.5)

    def train(self, begin, end):
        rank = dist.get_rank() if dist.is_initialized() else 0
        for step in range(begin, end):
            generator = torch.Generator().manual_seed(10 * step + rank)
            self.optimizer.zero_grad()
            self.model(torch.randn(4, 8, generator=generator), step).square().mean().backward()
            self.optimizer.step()
            self.scheduler.step()
        return self

    def whole(self):
        """All of it as whole tensors, and numbers."""
        kept = {f"{n}.{k}": v for n, state in self.optimizer.state_dict()["state"].items() for k, v in state.items()}
        rates = {"lr": [group["lr"] for group in self.optimizer.param_groups]}
        found = {**self.inner.state_dict(), **kept, **rates}
        whole = {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in found.items()}
        return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in whole.items()}


class App:
    """A Stateful as DCP's tutorial has it."""

    def __init__(self, run, options=None):
        self.run, self.options = run, options

    def state_dict(self):
        model, optimizer = get_state_dict(self.run.model, self.run.optimizer, options=self.options)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state):
        model, optimizer = state["model"], state["optimizer"]
        options = {"model_state_dict": model, "optim_state_dict": optimizer, "options": self.options}
        set_state_dict(self.run.model, self.run.optimizer, **options)


def _state(run, way):
    if way == "objects":
        return {"model": run.model, "optimizer": run.optimizer, "scheduler": run.scheduler}
    if way == "functions":
        model, optimizer = get_model_state_dict(run.model), get_optimizer_state_dict(run.model, run.optimizer)
        return {"model": model, "optimizer": optimizer, "scheduler": run.scheduler}
    if way == "plain":
        return {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict(), "scheduler": run.scheduler}
    return {way: App(run, FLAT if way == "flat" else None), "scheduler": run.scheduler}


def _resumed(path, way, run):
    """A run that was loaded."""
    state = _state(run, way)
    dcp.load(state, checkpoint_id=path)
    if way == "functions":
        set_model_state_dict(run.model, state["model"])
        set_optimizer_state_dict(run.model, run.optimizer, state["optimizer"])
    elif way == "plain":
        run.model.load_state_dict(state["model"])
        run.optimizer.load_state_dict(state["optimizer"])
    return run


def _different(one, other):
    """The names under which one has something else than the other."""
    both = one.keys() & other.keys()
    return sorted((one.keys() ^ other.keys()) | {name for name in both if not _equal(one[name], other[name])})


def _equal(one, other):
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def _at(step, optimizer="adamw", wrap=""):
    """What a run that was never stopped has at a step."""
    return Run(1, optimizer, wrap).train(0, step).whole()


def _goes_on(rank, path, wrap, optimizers):
    """What a resumed run has otherwise than one that was never stopped, when it was loaded and at the end."""
    found = {}
    for optimizer in optimizers:
        run = Run(1, optimizer, wrap).train(0, LOADED)
        for way in WAYS:
            dcp.save(_state(run, way), checkpoint_id=path / f"{optimizer}-{way}")
        loaded, end = run.whole(), run.train(LOADED, END).whole()
        for way in WAYS:
            # A new one, and one that goes back.
            for again in (Run(7, optimizer, wrap), run) if way == WAYS[-1] else (Run(7, optimizer, wrap),):
                _resumed(path / f"{optimizer}-{way}", way, again)
                different = _different(again.whole(), loaded), _different(again.train(LOADED, END).whole(), end)
                if any(different):
                    found[optimizer, way, again is run] = different
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("wrap", ["", "fsdp2", "ddp"])
def test_a_loaded_run_goes_on_as_if_it_had_never_stopped(tmp_path, wrap):
    """Weights, moments, steps and learning rates are equal, bit for bit, for optimizers handed over themselves, as by DCP's
    functions, and as by its tutorial: before their first step, and after it; with a layer that had no optimizer state yet.
    """
    if wrap:
        assert values(spawn_ranks(_goes_on, 2, tmp_path, wrap, ["adamw"])) == [{}, {}]
    else:
        assert _goes_on(0, tmp_path, wrap, OPTIMIZERS) == {}


@pytest.mark.parametrize("way", WAYS)
def test_a_parameter_that_has_begun_anew_may_begin_anew_again(tmp_path, way):
    """A resumed run saves before the layer is used, and is resumed once more: as if it had never stopped."""
    run = Run(1).train(0, 2)
    for step in (2, 3):
        dcp.save(_state(run, way), checkpoint_id=tmp_path / str(step))
        run = _resumed(tmp_path / str(step), way, Run(7))
        run.train(step, END if step == LOADED else LOADED)
    assert _different(run.whole(), _at(END)) == []


def _through_a_checkpointer(rank, path, ways):
    """What differs after two resumes before a layer was used."""
    found = {}
    for way, optimizer in ways:
        run = Run(1, optimizer, "fsdp2").train(0, 2)
        for step in (2, LOADED):
            with Checkpointer(path / f"{way}-{optimizer}") as ckpt:
                ckpt.save(step, _state(run, way)).result()
                run = Run(7, optimizer, "fsdp2")
                state = _state(run, way)
                ckpt.resume(state)
            if way == "functions":
                set_state_dict(
                    run.model, run.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
                )
            run.train(step, END if step == LOADED else LOADED)
        found[way, optimizer] = _different(run.whole(), _at(END, optimizer, "fsdp2"))
    return found


def test_a_checkpointer_begins_anew_with_a_parameter_that_had_no_state(tmp_path):
    """The state of an FSDP2 optimizer as DCP's functions, its tutorial and its flattened form have it is saved and resumed."""
    ways = [*((way, "adamw") for way in ("functions", "app", "flat")), ("flat", "asgd"), ("flat", "nadam")]
    for found in values(spawn_ranks(_through_a_checkpointer, 2, tmp_path, ways)):
        assert found == {way: [] for way in ways}


@pytest.mark.parametrize("optimizer", ["adamw", *BEGIN_ELSEWHERE])
def test_a_flattened_state_begins_anew_with_a_parameter_that_had_none(tmp_path, caplog, optimizer):
    """It must have something there: that with which a first step begins. One warning names what the checkpoint has not."""
    run = Run(1, optimizer).train(0, LOADED)
    dcp.save(_state(run, "flat"), checkpoint_id=tmp_path / "one")
    for _ in range(2):
        again = _resumed(tmp_path / "one", "flat", Run(7, optimizer))
        assert _different(again.train(LOADED, END).whole(), _at(END, optimizer)) == []
    (said,) = [record.message for record in caplog.records if "begins anew" in record.message]
    assert "flat.optimizer.state.later.bias." in said
    assert ("with the learning rate that the checkpoint has" in said) == (optimizer in ("asgd", "rprop"))


@pytest.mark.parametrize(("way", "prefix"), [("plain", ""), ("functions", ""), ("app", "app.")])
def test_optimizer_state_without_a_place_is_one_warning(tmp_path, caplog, way, prefix):
    """Before its first step an optimizer's ``state_dict()`` has no place for moments, and with gradients there
    ``get_optimizer_state_dict`` makes none: said once, with what to do.
    """
    dcp.save(_state(Run(1).train(0, LOADED), way), checkpoint_id=tmp_path / "one")
    for _ in range(2):
        run = Run(7)
        if way != "plain":
            run.model(torch.ones(2, 8), 0).sum().backward()
        _resumed(tmp_path / "one", way, run)
    (said,) = [record.message for record in caplog.records if "not loaded" in record.message]
    assert f"12 entries are not loaded, as the state dict has no place for them: {prefix}optimizer.state." in said
    assert "hand over the optimizer itself" in said.lower()
    assert "zero_grad()" in said


def _asks_for_a_part(rank, path):
    """Each rank has one of two layers, as pipelines do."""
    mine = f"layer{rank}"
    dcp.save({"model": {mine: torch.ones(2)}, "both": {"a": 1, "b": 2}}, checkpoint_id=path)
    state = {"model": {mine: torch.zeros(2)}, "both": {"a": 0}}
    said = []
    logging.getLogger("safe_ckpt.core.sharding.dcp_load").addFilter(lambda record: said.append(record.getMessage()))
    dcp.load(state, checkpoint_id=path)
    return state["model"][mine].tolist(), state["both"], said


def test_what_another_rank_has_a_place_for_is_no_warning(tmp_path):
    """What no rank has asked for is told by the first one."""
    first, second = values(spawn_ranks(_asks_for_a_part, 2, tmp_path / "one"))
    assert first[:2] == second[:2] == ([1.0, 1.0], {"a": 1})
    assert len(first[2]) == 1
    assert "1 entries are not loaded, as the state dict has no place for them: both.b." in first[2][0]
    assert second[2] == []


@pytest.mark.parametrize("way", ["objects", "app"])
def test_a_fresh_run_is_as_if_nothing_was_to_be_loaded(tmp_path, way):
    """DCP's functions take a step of an optimizer without state. Where there is no checkpoint, nobody asks for a state."""
    run = Run(1)
    with pytest.raises(NoValidCheckpointError, match="there is no checkpoint"):
        dcp.load(_state(run, way), checkpoint_id=tmp_path / "none")
    assert run.optimizer.state_dict()["state"] == {}
    assert _different(run.train(0, END).whole(), _at(END)) == []


def test_state_of_another_optimizer_is_refused(tmp_path):
    """A parameter that has state, but not this one, is no parameter without state."""
    dcp.save(_state(Run(1).train(0, LOADED), "app"), checkpoint_id=tmp_path / "one")
    with pytest.raises(RestoreError, match=r"Missing key .*app.optimizer.state.first.weight.momentum_buffer"):
        dcp.load(_state(Run(7, "sgd"), "app"), checkpoint_id=tmp_path / "one")


def test_numbers_as_keys_come_back_as_numbers(tmp_path):
    """DCP makes text of a mapping's keys: beside the numbers that were there, which kept their values."""
    run = Run(1).train(0, LOADED)
    saved = {"scheduler": run.scheduler, "seen": {1: "new", 2: {3: [4]}}}
    dcp.save(saved, checkpoint_id=tmp_path / "one")
    again = Run(7)
    state = {"scheduler": again.scheduler, "seen": {1: "old", 2: {3: [0]}}}
    dcp.load(state, checkpoint_id=tmp_path / "one")
    assert state["seen"] == saved["seen"]
    assert again.scheduler.state_dict() == run.scheduler.state_dict()
    dcp.save(state, checkpoint_id=tmp_path / "two")


def test_an_optimizer_itself_gets_what_the_checkpoint_has(tmp_path):
    """State of a parameter that is frozen by now; and a setting that is newer than the checkpoint is as its class has it."""
    run = Run(1).train(0, END)
    setting = run.optimizer.param_groups[0].pop("decoupled_weight_decay")
    dcp.save(_state(run, "objects"), checkpoint_id=tmp_path / "one")
    run.optimizer.param_groups[0]["decoupled_weight_decay"] = setting
    again = Run(7)
    again.model.first.requires_grad_(False)
    _resumed(tmp_path / "one", "objects", again)
    assert _different(again.whole(), run.whole()) == []
    assert again.optimizer.param_groups[0]["decoupled_weight_decay"] == setting


def test_an_optimizer_where_something_else_was_saved_is_refused(tmp_path):
    """A tensor lies under its name: the error says so, and the optimizer is as it was."""
    dcp.save({"optimizer": torch.ones(3)}, checkpoint_id=tmp_path / "one")
    again = Run(7).train(0, LOADED)
    before = again.whole()
    with pytest.raises(RestoreError, match=r"Missing key .*optimizer\.state\.0\."):
        dcp.load({"optimizer": again.optimizer}, checkpoint_id=tmp_path / "one")
    assert _different(again.whole(), before) == []
