"""Functions in the place of methods of one object, none of which goes along when that object is copied or pickled."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any


class StandIn:
    """Stands in for a method of one object. A copy of the object, and one that was pickled, has the method itself.

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
        # Whoever copies the owner has begun the copy already, and has not filled it yet: the class's own method is found.
        return getattr, (self._owner, self._name)


def put(owner: Any, name: str, function: Callable[..., Any]) -> None:
    """Let ``function`` stand in for a method of ``owner`` until ``take_away``."""
    owner.__dict__[name] = StandIn(owner, name, function)


def take_away(owner: Any, *names: str) -> None:
    """Give ``owner`` the methods of these names back; harmless where nothing stands in."""
    for name in names:
        if isinstance(owner.__dict__.get(name), StandIn):
            del owner.__dict__[name]


def once(owner: Any, name: str, function: Callable[..., Any]) -> None:
    """Let ``function`` stand in for the next call. It gets what was there before as its first argument."""
    before = owner.__dict__.get(name)

    def run(*args: Any, **kwargs: Any) -> Any:
        _put_back(owner, name, before)
        return function(getattr(owner, name), *args, **kwargs)

    put(owner, name, run)


@contextlib.contextmanager
def within(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """While this is entered ``function`` stands in."""
    before = owner.__dict__.get(name)
    put(owner, name, function)
    try:
        yield
    finally:
        _put_back(owner, name, before)


def _put_back(owner: Any, name: str, before: Any) -> None:
    if before is None:
        owner.__dict__.pop(name, None)
    else:
        owner.__dict__[name] = before
