"""Which tensors of a module training does not change by gradients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "module.")


def fixed_tensors(modules: Iterable[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Buffers, and parameters that need no gradient, by their names without what wrappers put into them."""
    for module in modules:
        frozen = ((name, parameter) for name, parameter in module.named_parameters() if not parameter.requires_grad)
        for name, tensor in chain(module.named_buffers(), frozen):
            plain = name
            for wrapper in _WRAPPERS:
                plain = plain.removeprefix(wrapper).replace(f".{wrapper}", ".")
            yield plain, tensor


def fixed_names(modules: Iterable[torch.nn.Module]) -> list[str]:
    """The names of buffers, and of parameters that need no gradient."""
    return sorted({name for name, _ in fixed_tensors(modules)})


def written_versions(modules: Iterable[torch.nn.Module]) -> dict[str, tuple[int, int]]:
    """Where each of them lies, and how often it was written to. Without names that two modules have."""
    found: dict[str, tuple[int, int]] = {}
    twice = set()
    for name, tensor in fixed_tensors(modules):
        if name in found:
            twice.add(name)
        found[name] = (tensor.data_ptr(), tensor._version)
    return {name: version for name, version in found.items() if name not in twice}
