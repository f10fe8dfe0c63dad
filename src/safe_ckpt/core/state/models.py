"""The modules of one save, looked at once for all who want to know of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class Models:
    """The modules that a save is of.

    Args:
        find: returns them by name; "" for the only one. It may raise, and is asked once somebody wants to know.
        same: equal to that of another save only if the modules have the same names in them, and the same of them is trained;
            None to look at all of them.
    """

    def __init__(self, find: Callable[[], Mapping[str, torch.nn.Module]], same: object = None) -> None:
        self._find = find
        self._same = same

    @cached_property
    def modules(self) -> Mapping[str, torch.nn.Module]:
        """By name."""
        return self._find()

    @cached_property
    def view(self) -> object:
        """Equal for two saves only if their modules have the same names in them, and the same of them is trained."""
        if self._same is not None:
            return self._same
        return [
            (
                key,
                [(name, parameter.requires_grad) for name, parameter in module.named_parameters()],
                [name for name, _ in module.named_buffers()],
            )
            for key, module in self.modules.items()
        ]
