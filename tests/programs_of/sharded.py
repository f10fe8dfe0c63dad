"""Programs of sharded training on several ranks: FSDP2, tensor parallelism, and what stands beside it."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from programs_of import processes, sharded_models
from programs_of.chains import Chain
from programs_of.draw import Draw
from programs_of.runner import Verdict
from programs_of.start import Here
from safe_ckpt import CheckpointConfig, Checkpointer, PerRank, Retention, RngState, dcp
from safe_ckpt.errors import NoValidCheckpointError
from safe_ckpt.tools.audit.compare import Run

FIXED = (506, 513, 602)
"""Seeds that together cover much."""
_STEPS = 6
_OPTIONS = {
    "flattened": StateDictOptions(flatten_optimizer_state_dict=True),
    "whole": StateDictOptions(full_state_dict=True),
}
_DOORS = ("Checkpointer", "dcp.save", "dcp.async_save")


class Sharded:
    """See the module."""

    def run(self, draw: Draw, folder: Path) -> Verdict:
        """Whole, killed once or twice, and started again, perhaps on other ranks; or resumed in the process that saved."""
        chosen = _choose(draw)
        if chosen["in place"]:
            one = processes.start("sharded", draw, folder, "whole", out="whole", ranks=chosen["ranks"])
            return processes.failed(one) if one.error else Verdict(came_to="equal in place")
        kills = processes.kills_of(draw, "save", "forward", steps=_STEPS - 1, ranks=2, least=3)
        is_same = (chosen["ranks"], chosen["wrap"]) == (chosen["ranks again"], chosen["wrap again"])
        chain = Chain(
            "sharded", draw, folder, kills, [chosen["ranks"], *[chosen["ranks again"]] * len(kills)],
            is_exact=lambda number: is_same or not number, steps=_steps,
        )  # fmt: skip
        return chain.run() or processes.verdict_of(chain.wrong, chain.came_to())


def _steps(lines: Run) -> Run:
    """Without those of ``get_optimizer_state_dict``, which steps with a rate of 0."""
    found = {rank: [_begun(one) for one in of if one["values"].get("groups.lr") != 0] for rank, of in lines.items()}
    return {rank: of for rank, of in found.items() if of}


def _begun(line: dict[str, Any]) -> dict[str, Any]:
    """Without the state of a parameter that was never used: it is missing, or zero. And without the names of what wraps."""
    values = {name.replace("_checkpoint_wrapped_module.", ""): one for name, one in line["values"].items()}
    names = [name for name in values if name.startswith("state.step.") and not values[name]]
    left = {f".{name.removeprefix('state.step.')}" for name in names}
    return {**line, "values": {name: one for name, one in values.items() if not _is_of(name, left)}}


def _is_of(name: str, left: Collection[str]) -> bool:
    return name.startswith("state.") and name.endswith(tuple(left))


def _choose(draw: Draw) -> dict[str, Any]:
    """The choices of both sides."""
    in_place = draw.among("stop", "in place", "in place", "in place", "killed") == "in place"
    door = draw.among("door", *_DOORS)
    wraps = sharded_models.WRAPS
    wrap = draw.among("wrap", *wraps[:-1])
    ranks = draw.among("ranks", 2, 2, 2, 2, 2, 2, 2, 2, 3, 4)
    is_elsewhere = draw.flag("elsewhere", of=3)
    ranks_again = draw.among("ranks again", 2, 1, 1, 3) if is_elsewhere and not in_place else ranks
    wrap_again = draw.among("wrap again", *wraps) if is_elsewhere else wrap
    found = {
        "in place": in_place, "at": draw.among("resumes at", 2, 4),
        "door": door, "wrap": wrap, "ranks": ranks, "ranks again": ranks_again,
        "wrap again": "none" if ranks_again == 1 and draw.flag("alone without a group") else wrap_again,
        "handed": draw.among("handed", "objects", "functions", "app", "modules", "flattened", "whole"),
        "optimizer": draw.among("optimizer", *sharded_models.OPTIMIZERS),
        "optimizers": draw.among("optimizers", 1, 1, 2),
        "groups": draw.among("groups", "one", "by decay", "the last first", "trained alone"),
        "unused": draw.among("unused", "", "", "always", "later"),
        "frozen": draw.flag("frozen"),
        "tied": draw.flag("tied", of=3),
        "buffer": draw.among("buffer", "", "saved", "not saved"),
        "bias": not draw.flag("no bias", of=3),
        "width": draw.among("width", 4, 5, 3, 1),
        "inner": draw.among("inner", 4, 6, 5),
        "blocks": draw.among("blocks", 1, 2),
        "mixed": draw.flag("mixed", of=4),
        "reshard": not draw.flag("keeps gathered", of=4),
        "root": not draw.flag("blocks alone", of=3),
        "scheduler": draw.among("scheduler", "", "StepLR", "MultiStepLR", "LambdaLR", "OneCycleLR"),
        "more": draw.among("more", "", "ema", "list"),
        "every": draw.among("every", 1, 1, 2),
        "retention": draw.flag("retention"),
        "snapshot": draw.among("snapshot", "eager", "eager", "overlapped"),
        "grads": draw.flag("gradients at the resume"),
        "bfloat16": draw.flag("bfloat16", of=6),
        "again": draw.among("computed again", "", "", "always", "first", "later"),
        "export": draw.flag("export", of=4),
    }  # fmt: skip
    if draw.flag("begins later", of=6):  # what a flattened state has for it is not zero
        found |= {"handed": "flattened", "unused": "later", "optimizer": draw.among("that begins", "ASGD", "NAdam")}
    if {wrap, found["wrap again"]} & {"tensor parallel", "both"}:
        found["inner"] = 12  # torch has no uneven ones
    if "last dimension" in {wrap, found["wrap again"]}:
        found["width"] = found["inner"] = 4
    if {wrap, found["wrap again"]} & set(sharded_models.BESIDE) and found["optimizer"] in ("foreach", "fused"):
        found["optimizer"] = "AdamW"  # torch takes no DTensors together with others
    if not is_elsewhere and found["again"]:
        found["again"] = "always"  # else what goes into a block is told twice in one of the runs
    if (found["handed"], found["optimizer"]) == ("whole", "SGD"):
        found["optimizer"] = "AdamW"  # torch's set_optimizer_state_dict wants a tensor
    is_of_torch = found["handed"] not in ("objects", "modules")
    if is_of_torch and found["handed"] == "whole":
        found["unused"] = (
            ""  # torch's set_optimizer_state_dict wants state for it, or counts a step: see docs/limits.md
        )
    if (found["handed"], found["optimizer"], found["unused"]) == ("flattened", "ASGD", "later"):
        found["scheduler"] = ""  # its rate begins with that of the load: see docs/limits.md
    if found["bfloat16"] and is_of_torch and found["optimizer"] in ("NAdam", "ASGD"):
        found["bfloat16"] = False  # torch's set_optimizer_state_dict rounds what they keep in float32
    found["tied"] &= found["handed"] != "modules"
    if wrap != found["wrap again"] and "replicated" in {wrap, found["wrap again"]}:
        found["tied"] = False  # torch's distribute_module unties: then the names of an average are others
    found["dropout"] = draw.flag("dropout", of=3) and door == "Checkpointer" and wrap in sharded_models.OF_DATA
    return found


class App:
    """A Stateful as DCP's tutorial has it."""

    def __init__(self, model: Any, optimizer: Any, options: Any = None) -> None:
        self.model, self.optimizer, self.options = model, optimizer, options

    def state_dict(self) -> dict[str, Any]:
        """Of both."""
        return {
            "model": get_model_state_dict(self.model, options=self.options),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer, options=self.options),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Of both."""
        set_model_state_dict(self.model, state["model"], options=self.options)
        set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"], options=self.options)


class Program:
    """What a start trains, and how it hands it over."""

    def __init__(self, chosen: Mapping[str, Any], here: Here, number: int) -> None:
        self.chosen, self.here = chosen, here
        self.how = chosen["wrap again"] if number else chosen["wrap"]
        net = sharded_models.Net(chosen)
        if chosen["bfloat16"]:
            net.to(torch.bfloat16)
        if chosen["again"] in ("always", "later" if number else "first"):
            for number, block in enumerate(net.blocks):
                net.blocks[number] = checkpoint_wrapper(block)
        self.model = sharded_models.wrap(net, self.how, chosen)
        make = sharded_models.OPTIMIZERS[chosen["optimizer"]]
        found = sharded_models.groups(self.model, chosen["groups"])
        if chosen["handed"] == "modules":
            names = [name for name, _ in self.model.named_children() if name not in ("dropout", "again")]
            self.optimizers = {
                f"{name}_optimizer": make(sharded_models.groups(self.model, f"of {name}")) for name in names
            }
        elif chosen["optimizers"] == 2 and len(found) > 1:
            self.optimizers = {"optimizer": make(found[:1]), "optimizer2": make(found[1:])}
        else:
            self.optimizers = {"optimizer": make(found)}
        self.scheduler = _scheduler(chosen["scheduler"], next(iter(self.optimizers.values())))
        self.more = {}
        if chosen["more"]:
            named = sharded_models.named_of(self.model)
            self.more = {name: one.detach().clone() for name, one in named}
        self.step = 0
        self.is_elsewhere = (chosen["ranks"], chosen["wrap"]) != (chosen["ranks again"], chosen["wrap again"])

    def state(self) -> dict[str, Any]:
        """As it is handed over."""
        handed, found = self.chosen["handed"], {"at": {"step": self.step}}
        if self.scheduler is not None:
            found["scheduler"] = self.scheduler
        if self.more:
            found["more"] = self.more if self.chosen["more"] == "ema" else list(self.more.values())
        if self.chosen["dropout"]:
            found["rng"] = PerRank(RngState())
        if handed == "modules":
            return {**found, **dict(self.model.named_children()), **self.optimizers, **self._root()}
        if handed == "objects":
            return {**found, "model": self.model, **self.optimizers}
        options = _OPTIONS.get(handed)
        apps = {name: App(self.model, one, options) for name, one in self.optimizers.items()}
        if handed in ("app", *_OPTIONS):
            return {**found, **apps}
        found |= {name: get_optimizer_state_dict(self.model, one) for name, one in self.optimizers.items()}
        return {**found, "model": get_model_state_dict(self.model)}

    def _root(self) -> dict[str, Any]:
        """What lies in the model itself."""
        kept = {"seen", "mean"} if self.chosen["buffer"] == "saved" else {"seen"}
        return {name: one for name, one in self.model.named_buffers(recurse=False) if name in kept}

    def take(self, state: dict[str, Any]) -> None:
        """What a resume has put there."""
        self.step = state["at"]["step"]
        if self.chosen["handed"] == "functions":
            set_model_state_dict(self.model, state["model"])
            for name, one in self.optimizers.items():
                set_optimizer_state_dict(self.model, one, state[name])

    def all(self) -> dict[str, Any]:
        """Digests, where it goes on elsewhere or in place; a collective. Else what the steps tell is compared."""
        if not self.is_elsewhere and not self.chosen["in place"]:
            return {}
        found = sharded_models.all_of(self.model, self.optimizers, self.more, whole_ones=self.is_elsewhere)
        return found | ({} if self.scheduler is None else {"scheduler": str(self.scheduler.state_dict())})

    def backward(self) -> None:
        """Of the next step."""
        rank = dist.get_rank() if dist.is_initialized() and self.how in sharded_models.OF_DATA else 0
        generator = torch.Generator().manual_seed(10 * self.step + rank)
        values = torch.randn(3, 4, generator=generator).to(next(self.model.parameters()).dtype)
        values = sharded_models.as_given(values, self.model, self.how)
        sharded_models.whole(self.model(values, self.step).square().mean()).backward()
        sharded_models.average_plain(self.model)

    def train(self) -> None:
        """A step."""
        self.step += 1
        self.here.meets("forward")
        self.backward()
        for one in self.optimizers.values():
            one.step()
            one.zero_grad()
        if self.scheduler is not None:
            self.scheduler.step()
        with torch.no_grad():
            for (_, one), other in zip(self.model.named_parameters(), self.more.values(), strict=False):
                other.mul_(0.5).add_(one, alpha=0.5)


def _scheduler(name: str, optimizer: Any) -> Any:
    make = torch.optim.lr_scheduler
    return {
        "": lambda: None,
        "StepLR": lambda: make.StepLR(optimizer, 2, 0.5),
        "MultiStepLR": lambda: make.MultiStepLR(optimizer, [2, 5], 0.5),
        "LambdaLR": lambda: make.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
        "OneCycleLR": lambda: make.OneCycleLR(optimizer, 0.02, total_steps=20, cycle_momentum=False),
    }[name]()


def start(draw: Draw, here: Here) -> None:
    """The program."""
    chosen = _choose(draw)
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size > 1 or chosen["wrap again"] != "none":
        store = dist.FileStore(str(here.records / "store"), size)
        dist.init_process_group("gloo", store=store, rank=here.rank, world_size=size)
    run = _with_checkpointer if chosen["door"] == "Checkpointer" else _with_dcp
    program = _made(chosen, here, here.number)
    first = run(program, here)
    if chosen["in place"]:
        torch.manual_seed(7)
        again = run(_made(chosen, here, 1), here, at=chosen["at"])
        _compare(first, again, every=not program.is_elsewhere)
    here.result("step", program.step)
    if dist.is_initialized():
        dist.destroy_process_group()


def _made(chosen: Mapping[str, Any], here: Here, number: int) -> Program:
    program = Program(chosen, here, number)
    if chosen["grads"] and chosen["handed"] in ("objects", "modules"):
        program.model.eval()  # so that it is no batch of a step
        program.backward()  # of others the page says that these are in the way
        program.model.train()
    return program


def _compare(first: Mapping[int, Any], again: Mapping[int, Any], *, every: bool) -> None:
    """What a run in the same process had: at each step of the other, or at the one that was resumed."""
    for step in list(again)[: None if every else 1]:
        ours, theirs = first[step], again[step]
        names = sorted(name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name))
        if names:
            where = "as it was resumed" if step == next(iter(again)) else f"{step - next(iter(again))} steps later"
            raise ValueError(
                f"restored: {len(names)} differ {where}, {names[:3]}: {[theirs.get(one) for one in names[:3]]}"
            )


def _with_checkpointer(program: Program, here: Here, at: int | None = None) -> dict[int, Any]:
    """Step -> what there was then."""
    chosen, found = program.chosen, {}
    config = CheckpointConfig(
        retention=Retention(keep_last=2 if chosen["retention"] and not chosen["in place"] else None),
        snapshot="overlapped" if chosen["snapshot"] == "overlapped" and not chosen["buffer"] else "eager",
    )
    with Checkpointer(here.out, config) as ckpt:
        state = program.state()
        if (info := ckpt.resume(state, step=at)) is not None:
            program.take(state)
        program.model.zero_grad()
        found[program.step] = program.all()
        here.note("resumed", [info and info.step, found[program.step]])
        while program.step < _STEPS:
            program.train()
            found[program.step] = program.all()
            if program.step % chosen["every"] == 0:
                here.note("saved", [program.step, found[program.step]])
                ckpt.save(program.step, program.state())
                here.meets("save")
        if chosen["export"]:
            _export(program, ckpt, here)
    return found


def _export(program: Program, ckpt: Checkpointer, here: Here) -> None:
    """Whole weights, which are those of the model."""
    ckpt.export(program.model, here.out.parent / f"{here.out.name}-weights").result()
    names = {id(one): sharded_models.whole(one.detach()) for one in program.model.parameters()}
    if here.rank:
        return
    found = load_file(here.out.parent / f"{here.out.name}-weights" / "model.safetensors")
    for full, one in program.model.named_parameters():
        name = full.replace("_checkpoint_wrapped_module.", "")
        if name not in found or not torch.equal(found[name], names[id(one)]):
            raise ValueError(f"exported: {name} is {found.get(name)} instead of {names[id(one)]}")


def _with_dcp(program: Program, here: Here, at: int | None = None) -> dict[int, Any]:
    """Step -> what there was then."""
    chosen, found = program.chosen, {}
    dcp.configure(retention=Retention(keep_last=2 if chosen["retention"] and not chosen["in place"] else None))
    state, step = program.state(), None
    try:
        dcp.load(state, checkpoint_id=here.out if at is None else here.out / f"step-{at}")
        program.take(state)
        step = program.step
    except NoValidCheckpointError as error:
        if error.rejected:
            raise
    program.model.zero_grad()
    found[program.step] = program.all()
    here.note("resumed", [step, found[program.step]])
    save = dcp.save if chosen["door"] == "dcp.save" else dcp.async_save
    upload = None
    while program.step < _STEPS:
        program.train()
        found[program.step] = program.all()
        if program.step % chosen["every"] == 0:
            here.note("saved", [program.step, found[program.step]])
            upload = save(program.state(), checkpoint_id=here.out / f"step-{program.step}")
            here.meets("save")
    if chosen["door"] == "dcp.async_save" and upload is not None:
        upload.result()
    return found
