"""One sharded item of a state, on its way to be planned."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def is_extra_state(name: str) -> bool:
    """Whether ``torch.nn.Module`` saves under this name what ``get_extra_state`` returns: of any kind, type and size."""
    return name.rpartition(".")[2] == "_extra_state"


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


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """An item of a checkpoint that was compared with where it goes. Nothing of it was applied yet.

    Attributes:
        apply: applies it, and returns the object that has the value now. It gets those of ``besides`` that no rank has a
            place for.
        besides: names in the checkpoint for which this rank has no place: another may have one.
        refusal: the error's words where no rank has a place for such names; "" where they are added.
    """

    apply: Callable[[Collection[str]], Any]
    besides: Sequence[str] = ()
    refusal: str = ""
