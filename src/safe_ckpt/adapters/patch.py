"""Attributes of one object of a framework that ours stand in for, until they are given back."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from typing_extensions import Self

logger = logging.getLogger(__name__)


class Patch:
    """Replaces attributes of ``owner`` and remembers what was there. As a context manager it gives them back at the end.

    Args:
        owner: the object, or a module; an object's class stays as it is.
        methods: name -> what stands in for it.
    """

    def __init__(self, owner: Any, methods: Mapping[str, Any]) -> None:
        self._owner = owner
        self._methods = dict(methods)
        self._before = {name: vars(owner).get(name) for name in methods}
        for name, method in self._methods.items():
            setattr(owner, name, method)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.give_back()

    def give_back(self, *names: str) -> None:
        """Leave the object as it was, or these of its attributes. What somebody else put there stays, with a warning."""
        owner = self._owner
        for name in names or tuple(self._methods):
            method = self._methods.pop(name, None)
            if method is None:
                continue
            before = self._before[name]
            if vars(owner).get(name) != method:
                logger.warning("%s.%s was replaced by something else and stays so", type(owner).__name__, name)
            elif before is None:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

    def state_without(self) -> Any:
        """What a copy of the object begins with if nothing of ours is to go along: its state as it was."""
        owner = self._owner
        of_class = getattr(type(owner), "__getstate__", None)  # before Python 3.11 few have it
        state = of_class(owner) if of_class is not None else vars(owner)
        if not isinstance(state, dict):
            return state
        state = dict(state)
        for name, method in self._methods.items():
            if state.get(name) == method:
                del state[name]
                if self._before[name] is not None:
                    state[name] = self._before[name]
        return state
