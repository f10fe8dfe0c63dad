"""One sharded item of a state, on its way to be planned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True, eq=False)
class ShardedItem:
    """What is known of it before its state is asked for.

    Attributes:
        state_dict: returns what is saved. It is asked for where the plan is not known already.
        known: the same object as at the last save if names, types, shapes and addresses are the same, too; None if that
            is not known.
        tensors: this rank's parts, in an order that belongs to ``known``.
        floats: all floats of the state, as bytes.
        at: returns what lies at a path of the state dict, which is no tensor.
        frozen: returns the names of tensors that are not trained; see ``hugging_face.is_named``. It is asked where
            ``state_dict`` is.
    """

    state_dict: Callable[[], Any]
    known: object = None
    tensors: Sequence[torch.Tensor] = ()
    floats: bytes = b""
    at: Callable[[Sequence[Any]], Any] | None = None
    frozen: Callable[[], frozenset[str]] = frozenset

    @classmethod
    def of(cls, state: Any, frozen: Callable[[], frozenset[str]] = frozenset) -> ShardedItem:
        """Of a state dict."""
        return cls(state_dict=lambda: state, frozen=frozen)
