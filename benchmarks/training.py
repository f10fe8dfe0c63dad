"""Training loops that are the same every time, of a given size of parameters and Adam state."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

PARAMETERS = 48
FORWARD_BACKWARD_S = 0.05
CALIBRATING = 200
FORWARD_X_COPY = 6.0  # with every core busy the copy takes a multiple of its time alone


@dataclass(frozen=True)
class Step:
    """One step, in seconds; the gate is what passed before the optimizer began to change anything."""

    total_s: float
    gate_s: float


class Training:
    """A model that is trained on one thread, so that the other cores are free or busy as the benchmark wants it.

    Args:
        model: what is trained.
        optimizer: of its parameters.
        work: forward and backward.
        batch: rows per step, where it was chosen; else 0.
    """

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, work: Callable[[], None], batch: int = 0
    ) -> None:
        self.model, self.optimizer, self.work, self.batch = model, optimizer, work, batch
        self._updating = 0.0
        self.step()  # makes Adam's state

    def step(self, gate: Callable[[], None] | None = None) -> Step:
        begun = time.perf_counter()
        self.work()
        # Moved to the end of the optimizer's hooks, so that whatever else waits in a hook has waited when it runs.
        hook = self.optimizer.register_step_pre_hook(self._mark)
        gated = time.perf_counter()
        if gate is not None:
            gate()
        self.optimizer.step()
        hook.remove()
        return Step(time.perf_counter() - begun, self._updating - gated)

    def tensors(self) -> Iterator[torch.Tensor]:
        yield from (parameter.data for parameter in self.model.parameters())
        for state in self.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))

    @property
    def state_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())

    def digest(self) -> dict[str, Any]:
        """All of the state, a hash of its bits in place of every tensor.

        Not a clone: that much fresh memory in the allocator's heap makes all later steps slower or faster.
        """
        return _digest({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()})

    def scramble(self) -> None:
        """Leave nothing from which a load that loads nothing could look right."""
        with torch.no_grad():
            for tensor in self.tensors():
                tensor.fill_(7)
        for group in self.optimizer.param_groups:
            group["lr"] = 7.0

    def _mark(self, *_: Any) -> None:
        self._updating = time.perf_counter()


def make(kind: str, mebibytes: int, batch: int = 0) -> Training:
    """Deterministic.

    Args:
        kind: one of ``KINDS``.
        mebibytes: size of parameters and Adam state together, about.
        batch: rows per step of the first kind; 0 chooses it so that forward and backward last clearly longer than a copy of
            the state.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return KINDS[kind](mebibytes, batch)


def _compute_bound(mebibytes: int, batch: int) -> Training:
    """An MLP: forward and backward are most of a step."""
    parameters = mebibytes * (1 << 20) // 12
    width = max((w for w in (256, 512, 1024, 2048) if parameters // (w * w) >= 8), default=256)
    layers = max(1, round(parameters / (width * (width + 1))))
    blocks = [(torch.nn.Linear(width, width), torch.nn.Tanh()) for _ in range(layers)]
    model = torch.nn.Sequential(*(part for block in blocks for part in block))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    rows = {"inputs": torch.empty(0), "targets": torch.empty(0)}

    def choose(batch: int) -> None:
        generator = torch.Generator().manual_seed(1)
        rows.update({name: torch.randn(batch, width, generator=generator) for name in rows})

    def work() -> None:
        # Gradients keep their memory: fresh pages in every step would only add noise.
        optimizer.zero_grad(set_to_none=False)
        torch.nn.functional.mse_loss(model(rows["inputs"]), rows["targets"]).backward()

    choose(batch or 8)
    training = Training(model, optimizer, work, batch)
    if not batch:
        training.batch = _calibrate(training, choose)
    return training


def _memory_bound(mebibytes: int, batch: int) -> Training:
    """The optimizer is most of a step: it waits for memory, while forward and backward touch none of the state."""
    del batch
    count = max(1, mebibytes * (1 << 20) // 12 // PARAMETERS)
    model = torch.nn.ParameterList(torch.nn.Parameter(torch.randn(count)) for _ in range(PARAMETERS))
    for parameter in model.parameters():
        parameter.grad = torch.randn(count)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, foreach=True)
    left, right = torch.randn(256, 256), torch.randn(256, 256)
    begun = time.perf_counter()
    for _ in range(CALIBRATING):
        torch.mm(left, right)
    times = max(1, round(FORWARD_BACKWARD_S * CALIBRATING / (time.perf_counter() - begun)))

    def work() -> None:
        for _ in range(times):
            torch.mm(left, right)

    return Training(model, optimizer, work)


KINDS = {"compute-bound": _compute_bound, "memory-bound": _memory_bound}


def _calibrate(training: Training, choose: Callable[[int], None]) -> int:
    copy_s = min(copy_seconds(list(training.tensors()), times=3))
    batch = 8
    while True:
        choose(batch)
        training.work()
        begun = time.perf_counter()
        training.work()
        if time.perf_counter() - begun >= FORWARD_X_COPY * copy_s:
            return batch
        batch += batch // 2


def copy_seconds(tensors: list[torch.Tensor], *, times: int) -> list[float]:
    """How long a copy of the tensors to memory in use takes, on as many threads as torch has."""
    targets = [tensor.clone() for tensor in tensors]
    taken = []
    with torch.no_grad():
        for _ in range(times):
            begun = time.perf_counter()
            torch._foreach_copy_(targets, tensors)
            taken.append(time.perf_counter() - begun)
    return taken


def _digest(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        bits = value.detach().contiguous().reshape(-1).view(torch.uint8)  # not by value: 0.0 is equal to -0.0
        return str(value.dtype), tuple(value.shape), xxhash.xxh3_128(bits.numpy()).hexdigest()
    if isinstance(value, dict):
        return {key: _digest(item) for key, item in value.items()}
    return [_digest(item) for item in value] if isinstance(value, list | tuple) else value
