"""Checks for what torch's ``load_state_dict`` would refuse after it has applied a part, or would only warn of."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from safe_ckpt.core.formats.refusals import refuse_meta, refuse_short
from safe_ckpt.core.sharding import dtensor
from safe_ckpt.core.sharding.dtensor import is_extra_state
from safe_ckpt.core.state.overlap import KNOWN

_NO_OP = ".*copying from a non-meta parameter in the checkpoint to a meta parameter"


def refuse_target(key: str, value: Any) -> None:
    """Refuse what nothing can be written to. To be asked before a byte is.

    Args:
        key: what an error calls it.
        value: tensors, in whatever they are.

    Raises:
        StateError: a tensor has no memory, or what lies there is somebody else's; names it.
    """
    for path, leaf in dtensor.placed(value, tuples=True):
        if isinstance(leaf, torch.Tensor):
            where = "".join([key, *(f"[{name!r}]" for name in path)])
            for part in dtensor.parts_of(leaf) if dtensor.is_sharded(leaf) else [leaf]:
                refuse_meta(where, part)
                refuse_short(where, part)


def refuse_module(key: str, module: torch.nn.Module) -> None:
    """The same of what a module would restore.

    Raises:
        StateError: as above, or its values are kept apart from it.
    """
    dtensor.refuse_partitioned(module)
    state = module.state_dict()  # FSDP2 puts back what a forward pass has left
    # One that loads in another way may put others in their place.
    if not (dtensor.any_sharded(dtensor.leaves_of(state)) or loads_as_torch_does(module)):
        state = {name: one for name, one in state.items() if not getattr(one, "is_meta", False)}
    refuse_target(key, state)


@contextlib.contextmanager
def nothing_lost() -> Iterator[None]:
    """Raise where torch would drop loaded values in silence: for a tensor that has no memory."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", _NO_OP, UserWarning)
        yield


def check_same_names(own: Mapping[str, Any], loaded: Mapping[str, Any]) -> None:
    """Refuse the names that torch refuses, in its words."""
    missing, besides = sorted(own.keys() - loaded.keys()), sorted(map(str, loaded.keys() - own.keys()))
    told = [f"the checkpoint has nothing for {missing} (Missing key(s), as torch says it)"] if missing else []
    told += [f"the module has no place for {besides} (Unexpected key(s), as torch says it)"] if besides else []
    if told:
        raise ValueError(", and ".join(told))


def check_module(own: Mapping[str, Any], loaded: Any) -> None:
    """Refuse what ``Module.load_state_dict`` would refuse after it has copied what fits."""
    if not isinstance(loaded, Mapping):
        raise TypeError(f"expected a module's state, the checkpoint has {type(loaded).__name__}")
    then, now = (getattr(state, "_metadata", None) or {} for state in (loaded, own))
    if any(then[part] != now[part] for part in then.keys() & now.keys()):
        return  # of other versions of its classes: they know what has changed
    check_same_names(own, loaded)
    for name, mine in own.items():
        saved = loaded[name]
        if isinstance(mine, torch.Tensor) and not is_extra_state(name):
            if not isinstance(saved, torch.Tensor):
                raise TypeError(f"{name} is a tensor, the checkpoint has {type(saved).__name__}")
            if saved.shape != mine.shape and (mine.dim(), saved.dim()) != (0, 1):
                raise ValueError(f"size mismatch for {name}: {described(mine)}, the checkpoint has {described(saved)}")
            dtensor.refuse_lost(mine, saved)


_LOADING = ("load_state_dict", "_load_from_state_dict", "state_dict", "_save_to_state_dict")
_LOADING_HOOKS = ("_load_state_dict_pre_hooks", "_state_dict_hooks", "_state_dict_pre_hooks")


def loads_as_torch_does(module: torch.nn.Module) -> bool:
    """Whether the names in its state are those that it loads: no class and no hook has ways of its own."""
    for part in module.modules():
        ways = (getattr(part, way) for way in _LOADING)
        if any(getattr(part, hooks) for hooks in _LOADING_HOOKS) or not all(map(dtensor.is_torchs, ways)):
            return False
    return True


def check_optimizer(optimizer: torch.optim.Optimizer, loaded: Any) -> None:
    """Refuse what ``Optimizer.load_state_dict`` would refuse, and state of other shapes, which only a step would refuse."""
    if not dtensor.is_torchs(optimizer.load_state_dict) or optimizer._optimizer_load_state_dict_pre_hooks:
        return
    saved = [len(group["params"]) for group in loaded["param_groups"]]
    own = [len(group["params"]) for group in optimizer.param_groups]
    if saved != own:
        raise ValueError(f"it steps groups of {own} parameters, the checkpoint has groups of {saved}")
    if type(optimizer) not in KNOWN or isinstance(optimizer, torch.optim.Adafactor):
        return
    for number, mine in dtensor.by_number(optimizer, loaded).items():
        for key, value in loaded["state"].get(number, {}).items():
            if isinstance(value, torch.Tensor) and value.numel() > 1 and value.shape != mine.shape:
                raise ValueError(f"{key} of parameter {number} is {described(value)} there, it is {described(mine)}")


def described(tensor: torch.Tensor) -> str:
    """Describe a tensor, for errors: equal for two only if one can take the values of the other."""
    layout = "" if tensor.layout is torch.strided else f" {tensor.layout}"
    return f"{dtensor.shape_of(tensor)} {tensor.dtype}{layout}"
