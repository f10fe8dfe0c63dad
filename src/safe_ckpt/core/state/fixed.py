"""Which tensors of a module training does not change by gradients."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from safe_ckpt.core.names import plain_name, plain_names

if TYPE_CHECKING:
    import torch

    from safe_ckpt.core.health.verdict import Known
    from safe_ckpt.core.state.models import Models

logger = logging.getLogger(__name__)


def learn(known: Known, models: Models) -> None:
    """Before each save: tell ``known`` which tensors of its models may be infinite by design.

    Models may change between two saves: what came, or is trained now, is learnt with the next one. Never raises: it is on one
    rank, and the save can do without.
    """
    try:
        if models.view != known.there:
            modules = models.modules.values()
            known.fixed, known.trained, known.there = fixed_names(modules), sorted(_trained(modules)), models.view
    except Exception as error:  # from a module's own way to name what it has
        logger.warning("what may be infinite in the models is not known: %s", error)


def fixed_names(modules: Iterable[torch.nn.Module]) -> list[str]:
    """The names of buffers, and of parameters that need no gradient.

    Names that could be taken for that of a trained parameter, in whichever file, are left out.
    """
    modules = list(modules)
    fixed: set[str] = set()
    for module in modules:
        fixed |= _plain(module, [*(name for name, _ in module.named_buffers()), *_parameters(module, trained=False)])
    return sorted(fixed - {ending for name in _trained(modules) for ending in _endings(name)})


def _trained(modules: Iterable[torch.nn.Module]) -> set[str]:
    return {name for module in modules for name in _plain(module, _parameters(module, trained=True))}


def _parameters(module: torch.nn.Module, *, trained: bool) -> list[str]:
    return [name for name, parameter in module.named_parameters() if parameter.requires_grad == trained]


def _plain(module: torch.nn.Module, names: Iterable[str]) -> set[str]:
    """Their plain names: a file may have been given them with data parallelism around, or without it."""
    return {each for name, plain in plain_names(names, module).items() for each in (plain, plain_name(name))}


def _endings(name: str) -> Iterator[str]:
    """The name, and what is left of it behind each dot."""
    while name:
        yield name
        name = name.partition(".")[2]
