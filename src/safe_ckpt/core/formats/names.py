"""The plain name of a parameter: without what wraps its modules. The one place that knows of wrappers' names.

``torch.compile``, FSDP and activation checkpointing have names of their own, which nobody else gives a module. Data parallelism
says ``module``, as users do: that is left out only where the type of a module, or every name, shows that it is a wrapper's.
"""

from __future__ import annotations

import re
import sys
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_OWN = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
_OWN_NAMES = re.compile(rf"(?<![^.])(?:{'|'.join(_OWN)})\.")
_PARALLEL = "module."
_COMPILED = {"OptimizedModule": "torch._dynamo.eval_frame"}
_PARALLEL_KINDS = {
    "DistributedDataParallel": "torch.nn.parallel.distributed",
    "DataParallel": "torch.nn.parallel.data_parallel",
    "DeepSpeedEngine": "deepspeed.runtime.engine",
}


def plain_name(name: str) -> str:
    """A name without what can only be a wrapper's."""
    return _OWN_NAMES.sub("", name) if "_" in name else name


def is_parallel(module: object) -> bool:
    """Whether a module is another one, with data parallelism, which is its ``module``."""
    return _is_one(module, _PARALLEL_KINDS)


def wrapped(module: torch.nn.Module) -> str:
    """The name under which a wrapper has the module that it wraps; "" of any other module."""
    parts = dict(module.named_children())
    return "module" if is_parallel(module) else next((name for name in _OWN if name in parts), "")


def _is_one(module: object, kinds: Mapping[str, str]) -> bool:
    """Whether it is of one of these classes: name -> where it is from. Not imported: else there are no such modules."""
    homes = ((sys.modules.get(home), name) for name, home in kinds.items())
    return isinstance(module, tuple(kind for home, name in homes if (kind := getattr(home, name, None)) is not None))


def plain_names(names: Iterable[str], module: torch.nn.Module | None = None) -> dict[str, str]:
    """The plain name of each of these. Names that would become one keep what tells them apart.

    Args:
        names: of tensors, such as the keys of a state dict.
        module: whose they are; None where that is not known.
    """
    around: list[str] = []  # where wrappers of data parallelism are, with the dot behind it; the innermost first
    if module is not None:
        named = module.named_modules(remove_duplicate=False)
        found = {plain_name(f"{path}.") if path else "" for path, part in named if is_parallel(part)}
        around = sorted(found, key=len, reverse=True)
    plain = {name: _without(plain_name(name), around) for name in names}
    counts = Counter(plain.values())
    return {name: short if counts[short] == 1 else name for name, short in plain.items()}


def _without(name: str, around: Iterable[str]) -> str:
    for path in around:
        if name.startswith(path + _PARALLEL):
            name = path + name[len(path) + len(_PARALLEL) :]
    return name


def matched(own: Iterable[str], saved: Iterable[str], module: torch.nn.Module | None = None) -> dict[str, str]:
    """Which saved name is that of a tensor, whatever wrapped the modules then and wraps them now.

    Args:
        own: the names of today.
        saved: the names in a checkpoint.
        module: whose those of today are; None where that is not known.

    Returns:
        Names of today -> saved ones. Without those that fit none, or more than one.
    """
    mine, theirs = set(own), set(saved)
    if mine == theirs:
        return {name: name for name in mine}
    known, then = plain_names(mine, module), {name: plain_name(name) for name in theirs}
    bare, bare_then = _bare(known), _bare(then)
    for of_mine, of_theirs in ((known, then), (bare, bare_then)):
        pairs = _pairs(_single(of_mine), _single(of_theirs))
        if len(pairs) == len(mine) == len(theirs):  # else one name could be taken for another
            return pairs
    same = {name: name for name in mine & theirs}
    rest = [{name: short for name, short in one.items() if name not in same} for one in (known, then)]
    return same | _pairs(*map(_single, rest))


def _bare(names: Mapping[str, str]) -> dict[str, str]:
    """Without each ``module`` beside which there is nothing: it may have been a wrapper's, and no two names become one."""
    beside: dict[str, set[str]] = {}
    for name in names.values():
        parts = name.split(".")
        for number, part in enumerate(parts):
            beside.setdefault(".".join(parts[:number]), set()).add(part)
    found = {}
    for key, name in names.items():
        parts = name.split(".")
        kept = [
            part
            for number, part in enumerate(parts)
            if part != "module" or number == len(parts) - 1 or len(beside[".".join(parts[:number])]) > 1
        ]
        found[key] = ".".join(kept)
    return found


def _single(keyed: Mapping[str, str]) -> dict[str, str]:
    """Key -> the only name that has it."""
    counts = Counter(keyed.values())
    return {short: name for name, short in keyed.items() if counts[short] == 1}


def _pairs(mine: Mapping[str, str], theirs: Mapping[str, str]) -> dict[str, str]:
    return {mine[key]: theirs[key] for key in mine.keys() & theirs.keys()}


def as_named(module: torch.nn.Module, loaded: Any) -> Any:
    """A module's saved state dict with the names that the module's tensors have today; as it is where these are the same.

    Args:
        module: that will load it.
        loaded: what its ``state_dict`` was.
    """
    if not isinstance(loaded, dict) or not all(isinstance(key, str) for key in loaded):
        return loaded
    wrapped = any(_is_one(part, _PARALLEL_KINDS | _COMPILED) for part in module.modules())
    if not wrapped and not any(plain_name(key) != key or _PARALLEL in key for key in loaded):
        return loaded  # the usual case: a module's state dict may be expensive, or a collective
    found = matched(module.state_dict(), loaded, module)
    if all(name == saved for name, saved in found.items()):
        return loaded
    today = {saved: name for name, saved in found.items()}
    renamed: Any = OrderedDict((today.get(key, key), value) for key, value in loaded.items())
    versions = getattr(loaded, "_metadata", None)
    if versions is not None:  # by the paths of modules
        paths = {name.rpartition(".")[0]: saved.rpartition(".")[0] for name, saved in found.items()}
        known = {name: versions[saved] for name, saved in paths.items() if saved in versions}
        renamed._metadata = type(versions)({**versions, **known})
    return renamed
