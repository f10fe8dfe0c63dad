"""Training programs that change their state in all the ways that people do, in the moment in which a save has returned."""

from __future__ import annotations

import copy
import ctypes
import random
import threading
from collections.abc import Callable

import torch
import xxhash
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.optim.swa_utils import AveragedModel, update_bn

ROWS = 16


class Program:
    """One model with its optimizers. What it does after its saves is chosen by the seed.

    Args:
        seed: chooses the sizes, the optimizers and the changes.
    """

    def __init__(self, seed: int) -> None:
        self.chooser = random.Random(seed)
        torch.manual_seed(seed)
        self.width = self.chooser.choice([8, 40, 96])
        self.model = self._net()
        self.rival = self._net()  # as of a GAN
        self.average = AveragedModel(self.model)
        self.shadow = copy.deepcopy(self.model.state_dict())
        kinds = [
            lambda p: torch.optim.AdamW(p, lr=1e-2),
            lambda p: torch.optim.Adam(p, lr=1e-2, foreach=False, amsgrad=True),
            lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
            lambda p: torch.optim.RMSprop(p, lr=1e-3),
        ]
        self.optimizer = self.chooser.choice(kinds)(self.model.parameters())
        self.second = self.chooser.choice(kinds)(self.rival.parameters())
        self.changes = self.chooser.sample(list(CHANGES), 3)
        self._hooks = [CHANGES[name](self) for name in self.changes]
        self.train()

    @property
    def state(self) -> dict[str, object]:
        return {
            "model": self.model,
            "rival": self.rival,
            "average": self.average,
            "optimizer": self.optimizer,
            "second": self.second,
        }

    def train(self) -> None:
        for model, optimizer in ((self.model, self.optimizer), (self.rival, self.second)):
            optimizer.zero_grad()
            model(torch.randn(ROWS, self.width)).square().mean().backward()
            optimizer.step()
        self.average.update_parameters(self.model)

    def change(self) -> None:
        """What the program does in the line behind the save."""
        self.chooser.choice(self._hooks)()

    def _net(self) -> nn.Sequential:
        depth = self.chooser.randint(1, 4)
        inner = [nn.Linear(self.width, self.width) for _ in range(depth)]
        if self.chooser.random() < 0.5:
            inner.append(inner[0])  # tied
        return nn.Sequential(nn.BatchNorm1d(self.width), *inner)


def digest(state: dict[str, object]) -> str:
    """A hash of all that a save takes: of every tensor its bits, of the rest its representation."""
    found = xxhash.xxh3_128()
    for name, part in state.items():
        found.update(name.encode())
        _add(found, part if isinstance(part, dict) else part.state_dict())  # type: ignore[attr-defined]
    return found.hexdigest()


def _add(found: xxhash.xxh3_128, value: object) -> None:
    if isinstance(value, torch.Tensor):
        found.update(f"{value.dtype} {tuple(value.shape)}".encode())
        found.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
    elif isinstance(value, dict):
        for key, item in value.items():
            found.update(repr(key).encode())
            _add(found, item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _add(found, item)
    else:
        found.update(repr(value).encode())


# ---------------------------------------------------- the changes: each makes ready, and returns what changes the state


def _weights(program: Program) -> list[torch.Tensor]:
    return list(program.model.parameters())


def data_in_place(program: Program) -> Callable[[], object]:
    return lambda: [weight.data.mul_(0.5) for weight in _weights(program)]


def data_replaced(program: Program) -> Callable[[], object]:
    def change() -> None:
        for weight in _weights(program):
            weight.data = torch.rand_like(weight)  # the old memory is free, and soon used by something else
        torch.full((program.width, program.width), 5.0)

    return change


def through_numpy(program: Program) -> Callable[[], object]:
    def change() -> None:
        for weight in _weights(program):
            weight.detach().numpy()[...] += 1

    return change


def by_foreign_code(program: Program) -> Callable[[], object]:
    def change() -> None:
        for weight in _weights(program):
            ctypes.memset(weight.data_ptr(), program.chooser.randrange(1, 60), weight.nbytes)

    return change


def in_a_helper(program: Program) -> Callable[[], object]:
    @torch.no_grad()
    def clip(module: nn.Module) -> None:
        for weight in module.parameters():
            weight.clamp_(-weight.abs().max() / 2, weight.abs().max() / 2)

    return lambda: clip(program.model)


def an_optimizers_own_hook(program: Program) -> Callable[[], object]:
    """A hook that was there before ours, and runs before it."""

    def decay(optimizer: torch.optim.Optimizer, *_: object) -> None:
        with torch.no_grad():
            for group in optimizer.param_groups:
                for weight in group["params"]:
                    weight.mul_(0.9)

    program.optimizer.register_step_pre_hook(decay)
    return program.train


def a_hook_of_all_optimizers(program: Program) -> Callable[[], object]:
    def change() -> None:
        handle = register_optimizer_step_pre_hook(
            lambda optimizer, *_: [weight.data.add_(1) for weight in optimizer.param_groups[0]["params"]] and None
        )
        program.train()
        handle.remove()

    return change


def in_forward(program: Program) -> Callable[[], object]:
    def renorm(module: nn.Module, *_: object) -> None:
        with torch.no_grad():
            for weight in module.parameters():
                weight.div_(weight.norm() + 1)

    program.model.register_forward_pre_hook(renorm)
    return lambda: program.model(torch.randn(ROWS, program.width))


def averages_swapped_in(program: Program) -> Callable[[], object]:
    def change() -> None:
        own = copy.deepcopy(program.model.state_dict())
        program.model.load_state_dict(program.shadow)
        program.model(torch.randn(ROWS, program.width))
        program.model.load_state_dict(own)
        program.shadow = {key: value * 0.5 for key, value in own.items()}
        program.model.load_state_dict(program.shadow)

    return change


def stochastic_averages(program: Program) -> Callable[[], object]:
    def change() -> None:
        program.average.update_parameters(program.model)
        update_bn([torch.randn(ROWS, program.width)], program.average)

    return change


def steps_in_turn(program: Program) -> Callable[[], object]:
    def change() -> None:
        for model, optimizer in ((program.rival, program.second), (program.model, program.optimizer)):
            optimizer.zero_grad()
            (-model(torch.randn(ROWS, program.width)).mean()).backward()
            optimizer.step()

    return change


def state_of_the_optimizer(program: Program) -> Callable[[], object]:
    def change() -> None:
        for state in program.optimizer.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    value.zero_()

    return change


def an_optimizer_loaded(program: Program) -> Callable[[], object]:
    before = copy.deepcopy(program.optimizer.state_dict())
    return lambda: program.optimizer.load_state_dict(before)


def vector_to_parameters(program: Program) -> Callable[[], object]:
    def change() -> None:
        flat = nn.utils.parameters_to_vector(program.model.parameters())
        nn.utils.vector_to_parameters(flat * 2, program.model.parameters())

    return change


def on_another_thread(program: Program) -> Callable[[], object]:
    def change() -> None:
        thread = threading.Thread(
            target=lambda: [weight.data.fill_(program.chooser.random()) for weight in _weights(program)]
        )
        thread.start()
        thread.join()

    return change


def closures(program: Program) -> Callable[[], object]:
    def closure() -> torch.Tensor:
        with torch.no_grad():
            for weight in _weights(program):
                weight.add_(1e-2)
        program.optimizer.zero_grad()
        loss = program.model(torch.randn(ROWS, program.width)).square().mean()
        loss.backward()
        return loss

    return lambda: program.optimizer.step(closure)


CHANGES: dict[str, Callable[[Program], Callable[[], object]]] = {
    change.__name__: change
    for change in (
        data_in_place,
        data_replaced,
        through_numpy,
        by_foreign_code,
        in_a_helper,
        an_optimizers_own_hook,
        a_hook_of_all_optimizers,
        in_forward,
        averages_swapped_in,
        stochastic_averages,
        steps_in_turn,
        state_of_the_optimizer,
        an_optimizer_loaded,
        vector_to_parameters,
        on_another_thread,
        closures,
    )
}
