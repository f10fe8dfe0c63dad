"""Which tensors stay as they are until an optimizer steps, so that they may be copied while forward and backward run.

Only what is known to change in a known optimizer's step alone: parameters of the modules at hand, and that optimizer's
state. Everything else, such as buffers, frozen parameters, teachers, counters and learning rates, is copied at once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from safe_ckpt.core.sharding.dtensor import local_of

_SAMPLE_BYTES = 64


MutationDetector = Callable[[], str]
"""Returns the name of a tensor that has changed; "" when none has."""


def _sample(tensor: torch.Tensor) -> bytes:
    """Some bytes at the start, in the middle and at the end; none of a tensor that is not in host memory."""
    if not tensor.is_cpu or not tensor.is_contiguous():
        return b""
    start, size = tensor.data_ptr(), tensor.numel() * tensor.element_size()
    if size <= 3 * _SAMPLE_BYTES:
        return ctypes.string_at(start, size)
    places = (0, size // 2, size - _SAMPLE_BYTES)
    return b"".join(ctypes.string_at(start + place, _SAMPLE_BYTES) for place in places)


_OPTIMIZERS = [
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "ASGD",
    "Muon",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
]
KNOWN: frozenset[type] = frozenset(
    kind for name in _OPTIMIZERS if (kind := getattr(torch.optim, name, None)) is not None
)
"""They change parameters and state only within ``step``, after evaluating the closure. Not their subclasses; not LBFGS,
which evaluates its closure several times."""
_STATES: Mapping[str, int] = {"Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 2, "Adamax": 2, "Adadelta": 2, "Rprop": 2}


class OverlapPlan:
    """What may be copied later.

    Args:
        modules: those whose parameters are saved.
        optimizers: those whose state is saved, or that change the parameters.
    """

    def __init__(self, modules: Iterable[torch.nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> None:
        modules, optimizers = list(modules), list(optimizers)
        stepped = [optimizer for optimizer in optimizers if is_known(optimizer)]
        owned = {id(parameter) for optimizer in stepped for parameter in _parameters(optimizer)}
        changing: list[torch.Tensor] = []  # by something else than a step
        tensors: list[tuple[str, torch.Tensor]] = []
        for number, module in enumerate(modules):
            of = _which("module", number, modules)
            changing += [*module.buffers(), *_changed_in_forward(module)]
            for name, parameter in module.named_parameters():
                if id(parameter) in owned and not _steps_in_backward(parameter):
                    tensors.append((f"parameter {name}{of}", local_of(parameter)))
                else:
                    changing.append(parameter)
        for number, optimizer in enumerate(stepped):
            of = _which("optimizer", number, stepped)
            for index, stepped_one in enumerate(_parameters(optimizer)):
                if _steps_in_backward(stepped_one):
                    changing.append(stepped_one)
                    continue
                for key, value in optimizer.state.get(stepped_one, {}).items():
                    if isinstance(value, torch.Tensor) and value.dim() > 0:
                        tensors.append((f"optimizer state {key} of parameter {index}{of}", local_of(value)))
        # A tensor that shares memory with one of these is not deferred either.
        homes = {_home(tensor) for tensor in map(local_of, changing) if _is_plain(tensor)}
        placed = [(name, tensor, _home(tensor)) for name, tensor in tensors if _is_plain(tensor)]
        # Every deferred tensor is watched. Equal modules have parameters of the same names.
        self._tensors = [(name, tensor) for name, tensor, home in placed if home not in homes]
        self._storages = {home for _, _, home in placed} - homes

    def covers(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` lies in memory that may be copied later."""
        return bool(tensor.numel()) and _home(tensor) in self._storages

    def detector(self) -> MutationDetector:
        """Remember versions and samples of the tensors as they are now."""
        seen = [(name, tensor, tensor._version, _sample(tensor)) for name, tensor in self._tensors]

        def changed() -> str:
            for name, tensor, version, sample in seen:
                if tensor._version != version or _sample(tensor) != sample:
                    return name
            return ""

        return changed

    def __bool__(self) -> bool:
        return bool(self._storages)


def is_known(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it changes things only in a step before which our gate is asked."""
    if type(optimizer) not in KNOWN:
        return False
    # A step that was captured in a CUDA graph runs without its hooks.
    return not any(group.get("capturable") for group in optimizer.param_groups)


def expected_state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """What its state will take after the first step, as far as that is known of its kind; else what it takes now."""
    now = sum(
        value.numel() * value.element_size()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )
    later = 0
    for group in optimizer.param_groups:
        count = _STATES.get(type(optimizer).__name__, 0) + bool(group.get("amsgrad"))
        if isinstance(optimizer, torch.optim.SGD):
            count = int(bool(group.get("momentum")))
        later += count * sum(p.numel() * p.element_size() for p in group["params"] if p.requires_grad)
    return max(now, later)


def _which(kind: str, number: int, among: Sequence[object]) -> str:
    return f" of {kind} {number + 1} of {len(among)}" if len(among) > 1 else ""


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _changed_in_forward(module: torch.nn.Module) -> list[torch.Tensor]:
    kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    return [part.weight for part in module.modules() if isinstance(part, kinds) and part.max_norm is not None]


def _steps_in_backward(parameter: torch.Tensor) -> bool:
    return bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided and not tensor.is_meta


def _home(tensor: torch.Tensor) -> tuple[torch.device, int]:
    return tensor.device, tensor.untyped_storage().data_ptr()
