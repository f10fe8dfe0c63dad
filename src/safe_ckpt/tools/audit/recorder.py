"""Within an audited process: a line for each optimizer step. Imports nothing of safe_ckpt, and torch only after the script.

``register_hooks`` is called when Python starts. Once the script has imported torch, its public global hooks are registered: a
line of digests for each optimizer step tells what it sees, as name -> value; a name begins with its category, see ``compare``.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import importlib.abc
import importlib.util
import io
import itertools
import json
import os
import pickle
import random
import signal
import sys
import sysconfig
import threading
import traceback
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

try:
    from xxhash import xxh3_64 as _hash
except ImportError:  # the script's environment is not ours
    _hash = hashlib.sha1  # type: ignore[assignment,misc]

SMALL_BYTES = 10 << 20
"""Up to so much state every byte is digested; above, values that lie evenly over each tensor."""
_LOOKS = {16**power for power in range(7)}  # steps; each takes as long as a walk over all objects of the process
_OURS = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_LIBRARIES = (*{sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}, _OURS, "<frozen")
# Where numbers are logged: module -> class and method.
LOGGERS = {
    "torch.utils.tensorboard.writer": ("SummaryWriter", "add_scalar"),
    "wandb.sdk.wandb_run": ("Run", "log"),
    "lightning.pytorch.trainer.connectors.logger_connector.logger_connector": ("_LoggerConnector", "log_metrics"),
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
        spec = importlib.util.find_spec(name) if then else None  # of the finders behind this one
        if then and spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                then(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def register_hooks() -> None:
    """Register the hooks when torch is imported."""
    recorder = Recorder(os.environ["SAFE_CKPT_AUDIT"], int(os.environ["SAFE_CKPT_AUDIT_STOP"]))
    wanted = {"torch.optim": lambda _: recorder.register(), "safe_ckpt.data.batches": recorder.follow}
    for name, (owner, method) in LOGGERS.items():
        wanted[name] = lambda module, owner=owner, method=method: recorder.listen(getattr(module, owner), method)  # type: ignore[misc]
    sys.meta_path.insert(0, After(wanted))


class Recorder:
    """Records the optimizer steps of this process.

    Args:
        folder: gets a file of each process.
        stop: SIGKILL right behind this step; 0 for never.
    """

    def __init__(self, folder: str, stop: int) -> None:
        self._folder, self._stop = folder, stop
        self._pid, self._step = os.getpid(), 0
        self._file: io.TextIOBase | None = None
        self._batch: list[str] = []
        self._asked: dict[int, Iterator[Any]] = {}
        self._given: deque[tuple[set[str], Any]] = deque(maxlen=256)
        self._logged: dict[str, list[Any]] = {}
        self._names: dict[int, str] = {}
        self._line: dict[str, Any] = {}
        self._most = SMALL_BYTES
        self._call = threading.local()

    def register(self) -> None:
        """Have torch call this. Once torch is there."""
        from torch.nn.modules import module
        from torch.optim import optimizer

        # What torch says of such hooks where a module is compiled: they do nothing while it is traced.
        warnings.filterwarnings("ignore", message="Using `torch.compile.module.` when there are global hooks")
        module.register_module_forward_pre_hook(self._called)
        module.register_module_forward_hook(self._returned, always_call=True)
        optimizer.register_optimizer_step_pre_hook(self._before)
        optimizer.register_optimizer_step_post_hook(self._after)

    def listen(self, owner: type, method: str) -> None:
        """Note the numbers that a logger is given."""
        original = getattr(owner, method)

        def noting(logger: Any, *args: Any, **kwargs: Any) -> Any:
            name = next((one for one in args if isinstance(one, str)), "")
            for key, value in _leaves([*args, kwargs], name):
                with contextlib.suppress(TypeError, ValueError, RuntimeError):  # no number, or a tensor of several
                    if key and not isinstance(value, str):
                        self._logged[f"logged.{key}"] = [*self._logged.get(f"logged.{key}", []), float(value)]
            return original(logger, *args, **kwargs)

        setattr(owner, method, noting)

    def follow(self, batches: ModuleType) -> None:
        """Note which samples are in what ``resumable`` loaders give; the batch of a step is found by its values."""
        ask, give = batches.Remaining.__iter__, batches.Batches._given

        def asking(remaining: Any) -> Iterator[Any]:
            self._asked[id(remaining._loader())], indices = itertools.tee(ask(remaining))
            return indices

        def giving(given: Any, inner: Any) -> Any:
            try:
                batch = give(given, inner)
            finally:  # a data set that raised had its indices, too
                samples = next(self._asked.get(id(given._loader), iter(())), None)
            if samples is not None:
                self._given.append(({digest(one, SMALL_BYTES) for one in tensors_within(batch)}, samples))
            return batch

        batches.Remaining.__iter__, batches.Batches._given = asking, giving

    def _called(self, module: Any, args: Any) -> None:
        """Note the tensors given to the outermost module, or to the first within it that is given tensors by position."""
        import torch

        if torch.compiler.is_compiling():
            return
        depth = self._call.depth = getattr(self._call, "depth", 0) + 1
        if depth == 1:
            self._call.seen = False
        if not self._call.seen and module.training and torch.is_grad_enabled():
            found = (
                one for one in tensors_within(args) if not isinstance(one, torch.nn.Parameter)
            )  # a parametrization's
            given = [digest(one, SMALL_BYTES) for one in found if one.grad_fn is None]
            self._call.seen = bool(given)
            self._batch += given

    def _returned(self, module: Any, args: Any, result: Any) -> None:
        import torch

        if not torch.compiler.is_compiling():
            self._call.depth = max(0, getattr(self._call, "depth", 1) - 1)

    def _before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._pid != os.getpid():  # forked: a file of its own
            self._pid, self._step, self._file = os.getpid(), 0, None
        self._line = {}
        if any(frame.f_code.co_name == "_init_optim_state" for frame, _ in traceback.walk_stack(sys._getframe())):
            return  # DCP makes it, with gradients of zero, to have a state to load into: no step of the training
        self._step += 1
        parameters = _parameters(optimizer)
        if self._step in _LOOKS or not set(map(id, parameters)) <= self._names.keys():
            self._look_around(optimizer)
        self._line = {"step": self._step, "rank": _rank(), **self._of(optimizer, parameters)}

    def _after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Write the line of a step. Only now it has what a closure has computed."""
        if not self._line:
            return
        values = {**self._line["values"], **self._logged, **{f"generators.{name}": one for name, one in _generators()}}
        for one in _parameters(optimizer):
            values[f"gradients.{self._names[id(one)]}"] = "" if one.grad is None else digest(one.grad, self._most)
        samples = [next((ids for batch, ids in self._given if one in batch), None) for one in self._batch]
        line = {**self._line, "batch": self._batch, "samples": samples, "values": values}
        self._batch, self._logged = [], {}
        if self._file is None:
            self._file = open(os.path.join(self._folder, f"{os.getpid()}.jsonl"), "a", encoding="utf-8")  # noqa: SIM115 - of the process
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        if self._step == self._stop:
            os.kill(os.getpid(), signal.SIGKILL)

    def _look_around(self, optimizer: Any) -> None:
        """Note the names of what any optimizer trains, the modules that none of them steps, and what scales the losses."""
        import torch

        kinds = (torch.nn.Module, torch.optim.Optimizer, torch.amp.GradScaler)
        alive = [one for one in gc.get_objects() if issubclass(type(one), kinds)]  # __class__ may warn
        modules = [one for one in alive if isinstance(one, torch.nn.Module)]
        self._scalers: list[Any] = [one for one in alive if isinstance(one, torch.amp.GradScaler)]
        optimizers = [
            optimizer,
            *(one for one in alive if isinstance(one, torch.optim.Optimizer)),
        ]  # gc.freeze hides it
        self._names = {id(part): str(n) for one in optimizers for n, part in enumerate(_parameters(one))}
        own, inner = set(self._names), {id(part) for one in modules for part in one.children()}
        self._others: dict[str, Any] = {}
        self._trained: list[Any] = []
        for root in (one for one in modules if id(one) not in inner):
            found = dict(root.named_parameters())
            if not own.isdisjoint(map(id, found.values())):
                self._trained.append(root)
                self._names.update((id(one), name) for name, one in found.items())
            elif found:
                self._others[f"{type(root).__name__}-{len(self._others)}"] = root
        named = (item for root in self._trained for item in root.named_modules(prefix="module"))
        self._own: list[tuple[str, Any]] = [(name, one) for name, one in named if is_of_the_script(type(one))]

    def _of(self, optimizer: Any, parameters: list[Any]) -> dict[str, Any]:
        is_small = 3 * sum(one.nbytes for one in parameters) <= SMALL_BYTES
        self._most = most = SMALL_BYTES if is_small else max(256, SMALL_BYTES // (3 * len(parameters)))
        found: dict[str, Any] = {}
        states = [optimizer.state.get(one, {}) for one in parameters]
        for one, state in zip(parameters, states, strict=True):
            name = self._names[id(one)]
            found[f"weights.{name}"] = digest(one, most)
            found |= {f"state.{key}.{name}": _plain(value, most) for key, value in state.items()}
        for number, group in enumerate(optimizer.param_groups):
            of = f" of group {number}" if number else ""
            found |= {f"groups.{key}{of}": _plain(one) for key, one in group.items() if key != "params"}
        for number, root in enumerate(self._trained):
            of = str(number or "")
            found |= {f"frozen.{name}": not one.requires_grad for name, one in root.named_parameters(of)}
            found |= {f"buffers.{name}": digest(one, most) for name, one in root.named_buffers(of)}
        for name, root in self._others.items():
            found[f"copies.{name}"] = [digest(one, most) for one in (*root.parameters(), *root.buffers())]
        variables = dict(variables_of_the_script(self._own))
        found |= {f"copies.{name}": one for name, one in _copies(variables, parameters, most)}
        found |= {f"scaler.{key}": one for scaler in self._scalers for key, one in scaler.state_dict().items()}
        return {
            "values": found,
            "zero": [key for key in {*itertools.chain(*states)} if all(_is_zero(one.get(key)) for one in states)],
            "variables": {name: one for name, one in variables.items() if isinstance(one, bool | int | float)},
        }


def digest(tensor: Any, most: int) -> str:
    """The digest of a tensor on any device: of at most so many bytes spread over it; of a DTensor this rank's part."""
    import torch

    tensor = _local(tensor).detach()
    if tensor.is_meta:
        return "meta"
    try:
        values = tensor if tensor.nbytes <= most else tensor.reshape(-1)[:: -(-tensor.nbytes // most)]
        values = values.cpu().contiguous()
        data: Any = (values.view(torch.int16) if values.dtype is torch.bfloat16 else values).numpy()
    except (RuntimeError, TypeError, NotImplementedError):  # sparse, quantized, lazily conjugated
        buffer = io.BytesIO()
        torch.save(tensor, buffer)
        data = buffer.getvalue()
    return f"{list(tensor.shape)}{_hash(data).hexdigest()[:12]}"


def _local(tensor: Any) -> Any:
    return getattr(tensor, "_local_tensor", tensor)


def _parameters(optimizer: Any) -> list[Any]:
    return [one for group in getattr(optimizer, "param_groups", ()) for one in group["params"]]


def _leaves(value: Any, name: str = "", depth: int = 6) -> Iterator[tuple[str, Any]]:
    """The values in nested containers, each with the innermost key above it."""
    if depth and isinstance(value, Mapping):
        for key, one in value.items():
            yield from _leaves(one, str(key), depth - 1)
    elif depth and isinstance(value, list | tuple):
        for one in value:
            yield from _leaves(one, name, depth - 1)
    else:
        yield name, value


def tensors_within(value: Any) -> Iterator[Any]:
    """The tensors in containers."""
    import torch

    return (one for _, one in _leaves(value) if isinstance(one, torch.Tensor))


def _is_zero(value: Any) -> bool:
    import torch

    if isinstance(value, torch.Tensor):
        local = _local(value)
        return not local.is_meta and not local.count_nonzero().item()
    return value is None or value == 0


def _plain(value: Any, most: int = SMALL_BYTES) -> Any:
    """A value as JSON has it, alike in two processes."""
    import torch

    if isinstance(value, torch.Tensor):
        local = _local(value)
        return local.item() if local.numel() == 1 and not local.is_meta else digest(local, most)
    if isinstance(value, Mapping):
        return {str(key): _plain(one, most) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one, most) for one in value]
    if isinstance(value, bool | int | float | str) or value is None:
        return value
    return float(value) if hasattr(value, "__float__") else type(value).__name__


def _generators() -> Iterator[tuple[str, str]]:
    import torch

    found: dict[str, Any] = {"python": pickle.dumps(random.getstate()), "torch": torch.get_rng_state().numpy()}
    if "numpy" in sys.modules:
        found["numpy"] = pickle.dumps(sys.modules["numpy"].random.get_state(legacy=False))
    kind = str(torch.accelerator.current_accelerator() or "cuda")  # neither this nor the next line asks a driver
    if getattr(device := getattr(torch, kind), "is_initialized", bool)():
        found |= {f"{kind}:{n}": device.get_rng_state(n).numpy() for n in range(device.device_count())}
    return ((name, _hash(one).hexdigest()[:12]) for name, one in found.items())


def _rank() -> int:
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return int(dist.get_rank())
    return int(os.environ.get("RANK", "0"))


def variables_of_the_script(modules: list[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """The variables of its functions that run, and the attributes of the objects of its classes there, and of ``modules``."""
    objects = {id(one): (name, one) for name, one in modules}
    for frame, _ in traceback.walk_stack(sys._getframe()):
        if not frame.f_code.co_filename.startswith(_LIBRARIES):
            for name, one in list(frame.f_locals.items()):
                if not isinstance(one, ModuleType | type):
                    objects.setdefault(id(one), (name, one))
                    if not name.startswith("_"):
                        yield name, one
    for name, one in objects.values():
        if is_of_the_script(type(one)):
            yield from ((f"{name}.{key}", value) for key, value in vars(one).items() if not key.startswith("_"))


def is_of_the_script(kind: type) -> bool:
    """Whether a class is none of an installed package."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return bool(file) and not str(file).startswith(_LIBRARIES) and hasattr(kind, "__dict__")


_PLAIN = (Mapping, list, tuple, str, bytes, bool, int, float, type(None))


def _copies(variables: Mapping[str, Any], parameters: list[Any], most: int) -> Iterator[tuple[str, list[str]]]:
    """Variables with all the shapes of the trained parameters that are not those: an average of the weights, for example."""
    shapes, own = Counter(tuple(one.shape) for one in parameters), {_local(one).data_ptr() for one in parameters}
    # What holds a module, an optimizer or the like is the list of what is saved: its parts may be copies.
    left, limit = list(variables.items()), 100 + 10 * len(parameters)  # what has more parts is the data
    seen: set[int] = set()
    for name, value in left:
        if id(value) in seen or not isinstance(value, Mapping | list | tuple) or len(value) > limit:
            continue
        seen.add(id(value))
        parts = list(value.items() if isinstance(value, Mapping) else enumerate(value))
        if not all(isinstance(part, _PLAIN) or hasattr(part, "data_ptr") for _, part in parts):
            left += [(f"{name}.{key}", part) for key, part in parts]
        elif len(value) >= len(parameters):
            # In the order of the keys: a checkpoint of JSON may have another than the run.
            inside = list(tensors_within([part for _, part in sorted(parts, key=lambda item: str(item[0]))]))
            whole = not shapes - Counter(tuple(one.shape) for one in inside)
            if whole and own.isdisjoint(_local(one).data_ptr() for one in inside if not one.is_sparse):
                yield name, [digest(one, most) for one in inside]
