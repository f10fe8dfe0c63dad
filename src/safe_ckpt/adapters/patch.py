"""Attributes of a framework's object that we replace, and restore.

``Patch`` replaces several and restores them together. ``put`` and ``once`` replace one method; a copy of the object, and one
that was pickled, has the original method.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Mapping
from typing import Any

from typing_extensions import Self

logger = logging.getLogger(__name__)


class _Absent(enum.Enum):
    """Stands for an attribute that was not there. A member stays itself when it is copied or pickled."""

    ABSENT = enum.auto()


_ABSENT = _Absent.ABSENT


class Patch:
    """Replaces attributes of ``owner``. As a context manager it restores them at the end.

    Args:
        owner: the object, class or module; an object's class stays as it is.
        replacements: name -> what takes its place.
    """

    def __init__(self, owner: Any, replacements: Mapping[str, Any]) -> None:
        self._owner = owner
        self._replacements = dict(replacements)
        self._before = {name: vars(owner).get(name, _ABSENT) for name in replacements}
        try:
            for name, replacement in self._replacements.items():
                setattr(owner, name, replacement)
        except BaseException:
            for name, before in self._before.items():
                _put_back(owner, name, before)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.give_back()

    def give_back(self, *names: str) -> None:
        """Restore all attributes, or these. One that somebody else has replaced since stays, with a warning."""
        owner = self._owner
        for name in names or tuple(self._replacements):
            if name not in self._replacements:
                continue
            replacement, before = self._replacements.pop(name), self._before[name]
            if vars(owner).get(name, _ABSENT) != replacement:
                logger.warning("%s.%s was replaced by something else and stays so", type(owner).__name__, name)
            else:
                _put_back(owner, name, before)

    def state_without(self) -> Any:
        """The state of the object without the replacements, for a copy of it."""
        owner = self._owner
        of_class = getattr(type(owner), "__getstate__", None)  # before Python 3.11 few have it
        state = of_class(owner) if of_class is not None else vars(owner)
        if not isinstance(state, dict):
            return state
        state = dict(state)
        for name, replacement in self._replacements.items():
            if state.get(name, _ABSENT) == replacement:
                del state[name]
                if self._before[name] is not _ABSENT:
                    state[name] = self._before[name]
        return state


class StandIn:
    """Replaces a method of one object. A copy of the object, and one that was pickled, has the original method.

    Args:
        owner: the object.
        name: of the method.
        function: what is called in its place.
    """

    def __init__(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        self._owner = owner
        self._name = name
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call what stands in."""
        return self._function(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        # The copy of the owner exists by then and has no attributes yet: getattr gives the class's own method.
        return getattr, (self._owner, self._name)


def put(owner: Any, name: str, function: Callable[..., Any]) -> None:
    """Replace a method of ``owner`` by ``function`` until ``take_away``."""
    setattr(owner, name, StandIn(owner, name, function))


def take_away(owner: Any, *names: str) -> None:
    """Restore the methods of these names; harmless where none was replaced."""
    for name in names:
        if isinstance(vars(owner).get(name), StandIn):
            delattr(owner, name)


def once(owner: Any, name: str, function: Callable[..., Any]) -> None:
    """Replace a method for its next call. ``function`` gets the original method as its first argument."""
    before = vars(owner).get(name, _ABSENT)

    def run(*args: Any, **kwargs: Any) -> Any:
        _put_back(owner, name, before)
        return function(getattr(owner, name), *args, **kwargs)

    put(owner, name, run)


def _put_back(owner: Any, name: str, before: Any) -> None:
    if before is not _ABSENT:
        setattr(owner, name, before)
    elif name in vars(owner):
        delattr(owner, name)
