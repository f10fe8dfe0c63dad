"""Within an audited process: one line of digests for each optimizer step. Imports nothing of safe_ckpt, and torch only after the script.

``watch`` is called when Python starts. Once the script has imported torch, its public global hooks are registered: before each
optimizer step a line is written of what the step sees.
"""

from __future__ import annotations

import gc
import hashlib
import importlib.abc
import importlib.util
import io
import json
import os
import random
import signal
import sys
import sysconfig
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType
from typing import Any

try:
    from xxhash import xxh3_64 as _hash
except ImportError:  # the script's environment is not ours
    _hash = hashlib.sha1  # type: ignore[assignment]

SMALL_BYTES = 10 << 20
"""Up to so much state each byte is in the digests; above, values that lie evenly over each tensor."""
_LOOK_EVERY = 50
_OURS = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_LIBRARIES = tuple({*(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")), _OURS, "<frozen"})
# Where numbers are logged: module -> class and method.
LOGGERS = {
    "torch.utils.tensorboard.writer": ("SummaryWriter", "add_scalar"),
    "wandb.sdk.wandb_run": ("Run", "log"),
    "lightning.fabric.loggers.csv_logs": ("CSVLogger", "log_metrics"),
    "lightning.fabric.loggers.tensorboard": ("TensorBoardLogger", "log_metrics"),
    "accelerate.accelerator": ("Accelerator", "log"),
    "transformers.trainer": ("Trainer", "log"),
}


class After(importlib.abc.MetaPathFinder):
    """Calls a function when a module was imported."""

    def __init__(self, wanted: Mapping[str, Callable[[ModuleType], None]]) -> None:
        self._wanted = dict(wanted)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """See ``importlib.abc.MetaPathFinder``."""
        then = self._wanted.pop(name, None)
        if then is None:
            return None
        spec = importlib.util.find_spec(name)  # of the finders behind this one
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            then(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def watch() -> None:
    """Register the hooks when torch is imported."""
    recorder = Recorder(os.environ["SAFE_CKPT_AUDIT"], int(os.environ.get("SAFE_CKPT_AUDIT_STOP", "0")))
    wanted: dict[str, Callable[[ModuleType], None]] = {"torch.optim": lambda _: recorder.register()}
    for name, (owner, method) in LOGGERS.items():
        wanted[name] = lambda module, owner=owner, method=method: recorder.listen(getattr(module, owner), method)  # type: ignore[misc]
    sys.meta_path.insert(0, After(wanted))


class Recorder:
    """What this process tells of its optimizer steps.

    Args:
        folder: gets a file of each process.
        stop: SIGKILL right behind this step; 0 for never.
    """

    def __init__(self, folder: str, stop: int) -> None:
        self._folder, self._stop = folder, stop
        self._pid, self._step = os.getpid(), 0
        self._file: io.TextIOBase | None = None
        self._batch: list[str] = []
        self._logged: list[Any] = []
        self._names: dict[int, str] = {}
        self._trained: list[Any] = []
        self._others: dict[str, Any] = {}
        self._depth = threading.local()
        self._most = SMALL_BYTES

    def register(self) -> None:
        """Have torch call this. Once torch is there."""
        from torch.nn.modules import module
        from torch.optim import optimizer

        module.register_module_forward_pre_hook(self._called)
        module.register_module_forward_hook(self._returned, always_call=True)
        optimizer.register_optimizer_step_pre_hook(self._before)
        optimizer.register_optimizer_step_post_hook(self._after)

    def listen(self, owner: type, method: str) -> None:
        """Note what a logger is given."""
        original = getattr(owner, method)

        def noting(logger: Any, *args: Any, **kwargs: Any) -> Any:
            self._logged.append(_plain([*args, kwargs]))
            return original(logger, *args, **kwargs)

        setattr(owner, method, noting)

    def _called(self, module: Any, args: Any) -> None:
        import torch

        if torch.compiler.is_compiling():
            return
        depth = getattr(self._depth, "now", 0)
        self._depth.now = depth + 1
        if depth == 0 and torch.is_grad_enabled() and module.training:
            self._batch += [digest(one, SMALL_BYTES) for one in tensors_of(args) if one.grad_fn is None]

    def _returned(self, module: Any, args: Any, result: Any) -> None:
        import torch

        if not torch.compiler.is_compiling():
            self._depth.now = getattr(self._depth, "now", 1) - 1

    def _before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._pid != os.getpid():  # forked: a file of its own
            self._pid, self._step, self._file = os.getpid(), 0, None
        self._step += 1
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        if self._step % _LOOK_EVERY == 1 or not set(map(id, parameters)) <= self._names.keys():
            self._look_around(parameters)
        size = 3 * sum(one.nbytes for one in parameters)
        self._most = SMALL_BYTES if size <= SMALL_BYTES else max(256, SMALL_BYTES // (3 * len(parameters)))
        line = {"step": self._step, "batch": self._batch, "logged": self._logged}
        line |= self._of(optimizer, parameters)
        self._batch, self._logged = [], []
        if self._file is None:
            self._file = open(os.path.join(self._folder, f"{os.getpid()}.jsonl"), "a", encoding="utf-8")  # noqa: SIM115 - of the process
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def _after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._step == self._stop:
            os.kill(os.getpid(), signal.SIGKILL)

    def _look_around(self, parameters: list[Any]) -> None:
        """Names of the parameters, and which modules no optimizer steps."""
        import torch

        modules = [one for one in gc.get_objects() if isinstance(one, torch.nn.Module)]
        inner = {id(part) for one in modules for part in one.children()}
        own = set(map(id, parameters))
        self._names, self._others, self._trained = {id(one): str(n) for n, one in enumerate(parameters)}, {}, []
        for root in (one for one in modules if id(one) not in inner):
            found = dict(root.named_parameters())
            if own.isdisjoint(map(id, found.values())):
                if found:
                    self._others[f"{type(root).__name__}-{len(self._others)}"] = root
            else:
                self._trained.append(root)
                self._names.update((id(one), name) for name, one in found.items())

    def _of(self, optimizer: Any, parameters: list[Any]) -> dict[str, Any]:
        digest_ = lambda one: digest(one, self._most)  # noqa: E731 - of this step
        states = [optimizer.state.get(one, {}) for one in parameters]
        keys = sorted({key for state in states for key in state if isinstance(key, str)})
        buffers = [item for root in self._trained for item in root.named_buffers()]
        return {
            "rank": _rank(),
            "optimizer": type(optimizer).__name__,
            "parameters": [self._names[id(one)] for one in parameters],
            "weights": [digest_(one) for one in parameters],
            "gradients": [digest_(one.grad) if one.grad is not None else "" for one in parameters],
            "frozen": [
                name for root in self._trained for name, one in root.named_parameters() if not one.requires_grad
            ],
            "state": {key: [_value(state.get(key), digest_) for state in states] for key in keys},
            "zero": [key for key in keys if all(_is_zero(state.get(key)) for state in states)],
            "groups": [
                {key: _plain(one) for key, one in group.items() if key != "params"} for group in optimizer.param_groups
            ],
            "buffers": {name: digest_(one) for name, one in buffers},
            "generators": _generators(),
            "scaler": _scaler(),
            "copies": {**self._copies(digest_), **copies_in_variables(parameters, digest_)},
            "variables": numbers_in_variables(),
        }

    def _copies(self, digest_: Callable[[Any], str]) -> dict[str, list[str]]:
        return {
            name: [digest_(one) for one in (*root.parameters(), *root.buffers())] for name, root in self._others.items()
        }


def digest(tensor: Any, most: int) -> str:
    """Of the values, on whatever device, of at most so many bytes spread over it; of this rank's part of a DTensor."""
    import torch

    with torch.no_grad():
        tensor = tensor.detach()
        tensor = getattr(tensor, "_local_tensor", tensor)
        if tensor.is_meta:
            return "meta"
        try:
            flat = tensor.resolve_conj().resolve_neg().reshape(-1)
            if tensor.nbytes > most:
                flat = flat[:: -(-tensor.nbytes // most)]
            data: Any = memoryview(flat.contiguous().cpu().view(torch.uint8).numpy())
        except (RuntimeError, TypeError, NotImplementedError):  # sparse, quantized
            buffer = io.BytesIO()
            torch.save(tensor, buffer)
            data = buffer.getvalue()
        return f"{list(tensor.shape)}{_hash(data).hexdigest()[:12]}"


def tensors_of(value: Any, depth: int = 4) -> Iterator[Any]:
    """The tensors in containers."""
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, Mapping | list | tuple):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_of(one, depth - 1)


def _value(value: Any, digest_: Callable[[Any], str]) -> Any:
    import torch

    return digest_(value) if isinstance(value, torch.Tensor) else _plain(value)


def _is_zero(value: Any) -> bool:
    import torch

    return value is None or (
        not value.any().item() if isinstance(value, torch.Tensor) and not value.is_meta else value == 0
    )


def _plain(value: Any) -> Any:
    """A value as JSON has it, alike in two processes."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 and not value.is_meta else digest(value, SMALL_BYTES)
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, bool | int | float | str) or value is None:
        return value
    return float(value) if hasattr(value, "__float__") else type(value).__name__


def _generators() -> dict[str, str]:
    import torch

    found = {"python": random.getstate(), "torch": torch.get_rng_state().numpy().tobytes()}
    if "numpy" in sys.modules:
        found["numpy"] = [str(part) for part in sys.modules["numpy"].random.get_state(legacy=True)[1:]] + [
            sys.modules["numpy"].random.get_state(legacy=True)[1].tobytes()
        ]
    if torch.cuda.is_initialized():
        found |= {f"cuda:{n}": one.numpy().tobytes() for n, one in enumerate(torch.cuda.get_rng_state_all())}
    return {
        name: _hash(one if isinstance(one, bytes) else repr(one).encode()).hexdigest()[:12]
        for name, one in found.items()
    }


def _rank() -> int:
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return int(dist.get_rank())
    return int(os.environ.get("RANK", "0"))


def _scaler() -> Any:
    """The state of the GradScaler that calls this step."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        scaler = frame.f_locals.get("self")
        if type(scaler).__name__.endswith("GradScaler") and frame.f_code.co_name in ("step", "_maybe_opt_step"):
            return _plain(scaler.state_dict())
        frame = frame.f_back
    return None


def variables() -> Iterator[tuple[str, Any]]:
    """The variables of the script's own functions that are being run, and the attributes of its own objects in them."""
    frame: FrameType | None = sys._getframe(1)
    seen: set[int] = set()
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_LIBRARIES):
            for name, value in list(frame.f_locals.items()):
                if (
                    name.startswith("_")
                    or isinstance(value, ModuleType | type)
                    or callable(value)
                    and not hasattr(value, "__dict__")
                ):
                    continue
                yield name, value
                where = getattr(sys.modules.get(type(value).__module__), "__file__", None)
                if where and not where.startswith(_LIBRARIES) and id(value) not in seen:
                    seen.add(id(value))
                    yield from ((f"{name}.{key}", one) for key, one in vars(value).items() if not key.startswith("_"))
        frame = frame.f_back


def numbers_in_variables() -> dict[str, Any]:
    """The numbers among them."""
    return {name: one for name, one in variables() if isinstance(one, bool | int | float)}


def copies_in_variables(parameters: list[Any], digest_: Callable[[Any], str]) -> dict[str, list[str]]:
    """What among them has all the shapes of what is trained, and is not that: an average of the weights, for example."""
    shapes, own = Counter(tuple(one.shape) for one in parameters), {one.data_ptr() for one in parameters}
    found = {}
    for name, value in variables():
        if isinstance(value, Mapping | list | tuple) and len(value) >= len(parameters):
            inside = list(tensors_of(value))
            whole = not shapes - Counter(tuple(one.shape) for one in inside)
            if whole and own.isdisjoint(one.data_ptr() for one in inside):
                found[name] = [digest_(one) for one in inside]
    return found
