"""Which tensors of a module training does not change by gradients."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

from torch.utils.weak import WeakIdKeyDictionary

from safe_ckpt.core.names import plain_name, plain_names

if TYPE_CHECKING:
    import torch

    from safe_ckpt.core.health.verdict import Known
    from safe_ckpt.core.state.models import Models

logger = logging.getLogger(__name__)

_count = itertools.count()
_numbers: Any = WeakIdKeyDictionary()  # tells objects apart without keeping them


def learn(known: Known, models: Models, *, recheck: bool) -> None:
    """Before each save: tell ``known`` which tensors of its models may be infinite by design, and which were written to.

    Models may change between two saves: what came, or is trained now, is learnt with the next one. Never raises: it is on one
    rank, and the save can do without.
    """
    try:
        if models.view != known.there:
            modules = models.modules.values()
            known.fixed, known.trained, known.there = fixed_names(modules), sorted(_trained(modules)), models.view
        if recheck:
            known.versions = written_versions(models.modules.values())
    except Exception as error:  # from a module's own way to name what it has
        logger.warning("what may be infinite in the models, or may not change, is not known: %s", error)


def _named(
    module: torch.nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[set[str], torch.Tensor]]:
    """Tensors with their plain names: a file may have been given them with data parallelism around, or without it."""
    by_name = dict(tensors)
    for name, plain in plain_names(by_name, module).items():
        yield {plain, plain_name(name)}, by_name[name]


def fixed_tensors(modules: Iterable[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Buffers, and parameters that need no gradient, by name.

    Names that could be taken for that of a trained parameter, in whichever file, are left out.
    """
    modules = list(modules)
    taken = {ending for name in _trained(modules) for ending in _endings(name)}
    for module in modules:
        frozen = ((name, parameter) for name, parameter in module.named_parameters() if not parameter.requires_grad)
        for names, tensor in _named(module, chain(module.named_buffers(), frozen)):
            yield from ((name, tensor) for name in sorted(names) if name not in taken)


def _trained(modules: Iterable[torch.nn.Module]) -> set[str]:
    return {
        name
        for module in modules
        for names, p in _named(module, module.named_parameters())
        if p.requires_grad
        for name in names
    }


def _endings(name: str) -> Iterator[str]:
    """The name, and what is left of it behind each dot."""
    while name:
        yield name
        name = name.partition(".")[2]


def fixed_names(modules: Iterable[torch.nn.Module]) -> list[str]:
    """The names of buffers, and of parameters that need no gradient."""
    return sorted({name for name, _ in fixed_tensors(modules)})


def written_versions(modules: Iterable[torch.nn.Module]) -> dict[str, tuple[int, int, int]]:
    """Which tensor each of them is, where it lies, and how often it was written to.

    Left out are names that two modules have, and the statistics of a normalization in training, which torch does not count.
    """
    modules = list(modules)
    uncounted = {id(buffer) for module in modules for part in _normalizing(module) for buffer in part.buffers()}
    found: dict[str, tuple[int, int, int]] = {}
    left_out = set()
    for name, tensor in fixed_tensors(modules):
        local = getattr(tensor, "_local_tensor", tensor)  # of a DTensor only its part counts what is written to it
        if name in found or id(tensor) in uncounted or tensor.is_inference():
            left_out.add(name)
            continue
        number = _numbers.setdefault(tensor, next(_count))
        try:
            found[name] = number, local.data_ptr(), local._version
        except RuntimeError:  # it has no memory of its own
            left_out.add(name)
    return {name: version for name, version in found.items() if name not in left_out}


def _normalizing(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    return (part for part in module.modules() if part.training and getattr(part, "track_running_stats", False))
