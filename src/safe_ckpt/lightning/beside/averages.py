"""Averaged weights that stand in the module while it is validated, and are not to be saved as the trained ones."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from safe_ckpt.adapters import Patch


def watch(trainer: Any, undo: Patch) -> list[Callable[[Any], None]]:
    """Note from now on which WeightAveraging callbacks have swapped: the module has their weights, and they the trained ones.

    Returns:
        How each of them takes them back; it changes as they swap.
    """
    swapped: list[Callable[[Any], None]] = []

    def noting(swap: Callable[[Any], None]) -> Callable[[Any], None]:
        def swap_models(module: Any) -> None:
            swap(module)
            swapped.remove(swap) if swap in swapped else swapped.append(swap)

        return swap_models

    for callback in trainer.callbacks:
        kinds = {base.__name__ for base in type(callback).__mro__}
        if "WeightAveraging" in kinds and hasattr(callback, "_swap_models"):
            undo.put_methods(callback, {"_swap_models": noting(callback._swap_models)})
    return swapped


@contextlib.contextmanager
def in_their_places(swapped: list[Callable[[Any], None]], module: Any) -> Iterator[None]:
    """Have the trained weights in the module within this block. Else a callback saves both, each under the other's names."""
    due = list(swapped)
    for swap in due:
        swap(module)
    try:
        yield
    finally:
        for swap in reversed(due):
            swap(module)
