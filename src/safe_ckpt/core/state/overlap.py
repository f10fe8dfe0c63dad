"""Which tensors stay as they are until an optimizer steps, so that they may be copied while forward and backward run.

Only what is known to change in a known optimizer's step alone: parameters of the modules at hand, and that optimizer's
state. Everything else, such as buffers, frozen parameters, teachers, counters and learning rates, is copied at once.

The gate in front of every optimizer's step opens when the copies that are under way are complete. It is one hook on all
optimizers of the process (``torch.optim.optimizer.register_optimizer_step_pre_hook``): a hook on the optimizer at hand would
miss one that is wrapped, and those that step within backward.
"""

from __future__ import annotations

import copy
import ctypes
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from safe_ckpt.core.formats.refusals import is_short
from safe_ckpt.core.sharding.dtensor import local_of

_SAMPLE_BYTES = 64
_WORD = 8
_Tensor: Any = torch.Tensor
_PLACE: Any = torch.UntypedStorage.data_ptr
_VERSION = attrgetter("_version")
_EMBEDDINGS = (torch.nn.Embedding, torch.nn.EmbeddingBag)
"""With ``max_norm`` they change their weights in the forward."""


MutationDetector = Callable[[], str]
"""Returns the name of a tensor that has changed; "" when none has."""


class _Samples:
    """Where in memory some bytes of every tensor lie: at its start, in the middle and at its end.

    Of tensors that are not in host memory, or not contiguous, there are none. They are read by one gather of 8-byte words: tens
    of thousands of tensors asked one by one would take longer than their copies.

    Args:
        tensors: their addresses are kept, and not they.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        words: list[int] = []
        self._ends: list[tuple[int, int]] = []  # of what is of each tensor, among the words and among the odd ones
        self._odd: list[tuple[int, int]] = []  # addresses and bytes of what cannot be read by words
        for tensor in tensors:
            start, spans = _sampled(tensor)
            if all((start + place) % _WORD == length % _WORD == 0 for place, length in spans):
                first = start // _WORD
                words += [first + at for place, n in spans for at in range(place // _WORD, (place + n) // _WORD)]
            else:
                self._odd += [(start + place, length) for place, length in spans]
            self._ends.append((len(words), len(self._odd)))
        self._first = min(words, default=0)
        self._words = torch.tensor(words, dtype=torch.int64, device="cpu") - self._first
        self._span = max(words, default=-1) - self._first + 1

    def read(self) -> tuple[torch.Tensor, list[bytes]]:
        """The bytes as they are now. The tensors, or what took their place in the same memory, must be alive."""
        odd = [ctypes.string_at(address, length) for address, length in self._odd]
        if not self._span:
            return self._words, odd
        memory = (ctypes.c_int64 * self._span).from_address(self._first * _WORD)
        return torch.frombuffer(memory, dtype=torch.int64).take(self._words), odd

    def changed(self, then: tuple[torch.Tensor, list[bytes]]) -> int | None:
        """The number of the first tensor of which something else is read now; None for none."""
        (words, odd), (words_then, odd_then) = self.read(), then
        if odd == odd_then and torch.equal(words, words_then):
            return None
        word = next(iter((words != words_then).nonzero().flatten().tolist()), len(words))
        other = next((number for number, piece in enumerate(odd) if piece != odd_then[number]), len(odd))
        return next(number for number, (end, end_odd) in enumerate(self._ends) if end > word or end_odd > other)


def _sampled(tensor: torch.Tensor) -> tuple[int, list[tuple[int, int]]]:
    """Return where a tensor begins, and which parts of it are looked at: places behind that, and bytes."""
    if not tensor.is_cpu or not tensor.is_contiguous():
        return 0, []
    start, size = tensor.data_ptr(), tensor.numel() * tensor.element_size()
    if size <= 3 * _SAMPLE_BYTES:
        return start, [(0, size)]
    return start, [(place, _SAMPLE_BYTES) for place in (0, size // 2 // _WORD * _WORD, size - _SAMPLE_BYTES)]


_OPTIMIZERS = [
    "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "Muon", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
]  # fmt: skip
KNOWN: frozenset[type] = frozenset(getattr(torch.optim, name) for name in _OPTIMIZERS if hasattr(torch.optim, name))
"""They change parameters and state only within ``step``, after evaluating the closure. Not their subclasses; not LBFGS,
which evaluates its closure several times."""


class OverlapPlan:
    """A plan of the tensors that may be copied later.

    Args:
        modules: those whose parameters are saved.
        optimizers: those whose state is saved, or that change the parameters.

    Attributes:
        token: the same for plans of which one is the ``renewed`` other.
    """

    def __init__(self, modules: Iterable[torch.nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> None:
        modules, optimizers = list(modules), list(optimizers)
        stepped = [optimizer for optimizer in optimizers if is_known(optimizer)]
        owned = {id(parameter) for optimizer in stepped for parameter in _parameters(optimizer)}
        changing: list[torch.Tensor] = []  # by something else than a step
        tensors: list[tuple[str, torch.Tensor]] = []
        for number, module in enumerate(modules):
            of = _which("module", number, modules)
            embeddings = (part for part in module.modules() if isinstance(part, _EMBEDDINGS))
            in_forward = (part.weight for part in embeddings if part.max_norm is not None)
            changing += [*module.buffers(), *in_forward]
            for name, parameter in module.named_parameters():
                if id(parameter) in owned:
                    tensors.append((f"parameter {name}{of}", local_of(parameter)))
                else:
                    changing.append(parameter)
        for number, optimizer in enumerate(stepped):
            of = _which("optimizer", number, stepped)
            for index, stepped_one in enumerate(_parameters(optimizer)):
                if getattr(stepped_one, "_post_accumulate_grad_hooks", None):  # it may be stepped in backward
                    changing.append(stepped_one)
                    continue
                for key, value in optimizer.state.get(stepped_one, {}).items():
                    if isinstance(value, torch.Tensor) and value.dim() > 0:
                        tensors.append((f"optimizer state {key} of parameter {index}{of}", local_of(value)))
        # A tensor that shares memory with one of these is not deferred either.
        homes = {_home(tensor) for tensor in map(local_of, changing) if _is_plain(tensor)}
        placed = [(name, tensor, _home(tensor)) for name, tensor in tensors if _is_plain(tensor)]
        # Every deferred tensor is watched. Equal modules have parameters of the same names.
        self._names = [name for name, _, home in placed if home not in homes]
        self.watched: Sequence[torch.Tensor] = [tensor for _, tensor, home in placed if home not in homes]
        self._storages = {home for _, _, home in placed} - homes
        self._samples: list[_Samples] = []  # shared with those that are renewed
        self.token: object = object()

    def renewed(self, tensors: Sequence[torch.Tensor]) -> OverlapPlan:
        """The same plan for other objects with the same memory.

        Args:
            tensors: in the place of ``watched``.
        """
        again = copy.copy(self)
        again.watched = tensors
        return again

    def covers(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` lies in memory that may be copied later."""
        return bool(tensor.numel()) and _home(tensor) in self._storages

    def detector(self) -> MutationDetector:
        """Remember versions and samples of the tensors as they are now."""
        tensors, names = self.watched, self._names
        if not self._samples:
            self._samples.append(_Samples(tensors))
        (samples,) = self._samples
        versions, seen = list(map(_VERSION, tensors)), samples.read()
        # They may be given other memory before this is asked, and addresses in the old one are read then.
        held = list(map(_Tensor.untyped_storage, tensors))
        places = list(map(_PLACE, held))

        def changed() -> str:
            if (there := list(map(_PLACE, held))) != places:  # resized: other bytes may have been copied
                return next(name for name, one, other in zip(names, there, places, strict=True) if one != other)
            now = list(map(_VERSION, tensors))
            if now != versions:
                return next(name for name, one, other in zip(names, now, versions, strict=True) if one != other)
            number = samples.changed(seen)
            return "" if number is None else names[number]

        return changed

    def __bool__(self) -> bool:
        return bool(self._storages)


def is_known(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it changes things only in a step before which our gate is asked."""
    if type(optimizer) not in KNOWN:
        return False
    # A step that was captured in a CUDA graph runs without its hooks.
    return not any(group.get("capturable") for group in optimizer.param_groups)


def _which(kind: str, number: int, among: Sequence[object]) -> str:
    return f" of {kind} {number + 1} of {len(among)}" if len(among) > 1 else ""


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _is_plain(tensor: torch.Tensor) -> bool:
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided and not tensor.is_meta
    if not plain or tensor.is_inference():  # the latter has no version, which would tell of a change
        return False
    return not is_short(tensor)  # what is not there is not looked at, whether it is saved or not


def _home(tensor: torch.Tensor) -> tuple[torch.device, int]:
    return tensor.device, tensor.untyped_storage().data_ptr()


class Gated(Protocol):
    """A copy that is under way."""

    def pass_gate(self, timeout_s: float, /) -> object:
        """Wait until it is complete; give it up after ``timeout_s``."""

    def wait(self, timeout_s: float, /) -> bool:
        """Wait until it is complete or given up. Returns whether it is."""


_lock = threading.RLock()
_pending: tuple[tuple[Gated, float], ...] = ()
_hooked = False


def close_gate(gated: Gated, timeout_s: float) -> None:
    """From now on every step waits for ``gated``, until it is complete; after ``timeout_s`` the copy is given up instead."""
    global _pending, _hooked  # noqa: PLW0603 - the hook is the process's, so is what it looks at
    with _lock:
        if not _hooked:
            # For good: to take it away while another thread walks through the hooks would break that thread's step.
            register_optimizer_step_pre_hook(_before_step)
            os.register_at_fork(after_in_child=_forget)
            _hooked = True
        # Where no optimizer of torch's steps, nobody passes the gate: what is over is let go of here.
        _pending = (*(entry for entry in _pending if not entry[0].wait(0)), (gated, timeout_s))


def _before_step(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if not _pending:
        return None
    # ``args`` begins with the optimizer itself.
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if type(optimizer) not in KNOWN or not callable(closure):
        _pass()
        return None
    # It evaluates the closure, with forward and backward in it, before it changes anything: wait after that.
    wrapped = _then_pass(closure)
    if "closure" in kwargs:
        return args, {**kwargs, "closure": wrapped}
    return (args[0], wrapped, *args[2:]), kwargs


def _then_pass(closure: Callable[[], Any]) -> Callable[[], Any]:
    def evaluate() -> Any:
        result = closure()
        _pass()
        return result

    return evaluate


def _pass() -> None:
    global _pending  # noqa: PLW0603
    waiting = _pending
    for gated, timeout_s in waiting:
        gated.pass_gate(timeout_s)
    with _lock:
        _pending = tuple(entry for entry in _pending if entry not in waiting)


def _forget() -> None:
    # A forked process has no threads that copy, and nothing to save.
    global _pending, _lock
    _pending, _lock = (), threading.RLock()
