"""Changes in a framework's objects: made whole or not at all, and taken back together, the last change first."""

from __future__ import annotations

import contextlib
import enum
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from typing_extensions import Self

logger = logging.getLogger(__name__)

MARK = "_safe_ckpt"
"""The attribute of ours on a framework's object: names the handle on it, or that a class was changed already."""


class _Absent(enum.Enum):
    """Stands for an attribute that was not there. A member stays itself when it is copied or pickled."""

    ABSENT = enum.auto()


_ABSENT = _Absent.ABSENT


class Patch:
    """Changes of a framework's objects. As a context manager it takes them back at the end.

    Args:
        owner: an object, class or module whose attributes are replaced at once; None for nothing yet.
        replacements: see ``put``.

    Example:
        ```python
        with Patch(trainer, {"save": lambda: print("replaced")}):
            trainer.save()
        trainer.save()
        ```

        ```text
        replaced
        saved by the trainer
        ```
    """

    def __init__(self, owner: Any = None, replacements: Mapping[str, Any] | None = None) -> None:
        self._changes: list[_Change] = []
        if replacements:
            self.put(owner, replacements)

    def put(self, owner: Any, replacements: Mapping[str, Any]) -> None:
        """Replace attributes: all of them, or none where one cannot be replaced.

        Args:
            owner: the object, class or module; an object's class stays as it is.
            replacements: name -> what takes its place.
        """
        made = Patch()
        with made.whole_or_nothing():
            for name, replacement in replacements.items():
                before = vars(owner).get(name, _ABSENT)
                setattr(owner, name, replacement)
                made._changes.append(_Change(owner, name, replacement, before))
        self._changes += made._changes

    def put_methods(self, owner: Any, functions: Mapping[str, Callable[..., Any]]) -> None:
        """Replace methods of one object. A copy of the object, and one that was pickled, has the original methods."""
        self.put(owner, {name: StandIn(owner, name, function) for name, function in functions.items()})

    def once(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        """Replace a method for its next call. ``function`` gets the original method as its first argument."""
        original = getattr(owner, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            if change not in self._changes:  # its call was: something that was put around it calls it again
                return original(*args, **kwargs)
            self._changes.remove(change)
            change.take_back()
            return function(original, *args, **kwargs)

        self.put_methods(owner, {name: run})
        change = self._changes[-1]

    def also(self, take_back: Callable[[], object]) -> None:
        """Have something else done, in its turn, when everything is given back."""
        self._changes.append(_Change(None, "", take_back))

    def give_back(self, owner: Any = None, *names: str) -> None:
        """Take back everything, or what was changed in ``owner``, or these attributes of it.

        An attribute that somebody else has replaced since stays, with a warning.
        """
        due = [
            one for one in self._changes if owner is None or (one.owner is owner and (not names or one.name in names))
        ]
        self._changes = [one for one in self._changes if one not in due]
        with contextlib.ExitStack() as stack:  # all of them, also where one fails
            for one in due:
                stack.callback(one.take_back)

    @contextlib.contextmanager
    def whole_or_nothing(self) -> Iterator[None]:
        """If this block fails, everything is taken back."""
        try:
            yield
        except BaseException:
            self.give_back()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.give_back()

    def state_without(self, owner: Any) -> Any:
        """The state of an object without what was replaced in it, for a copy of it."""
        of_class = getattr(type(owner), "__getstate__", None)  # before Python 3.11 few have it
        state = of_class(owner) if of_class is not None else vars(owner)
        if not isinstance(state, dict):
            return state
        state = dict(state)
        for one in reversed(self._changes):
            if one.owner is owner and state.get(one.name, _ABSENT) == one.replacement:
                del state[one.name]
                if one.before is not _ABSENT:
                    state[one.name] = one.before
        return state


@dataclass(frozen=True, eq=False)
class _Change:
    """One attribute that was replaced; without an ``owner`` something to be called."""

    owner: Any
    name: str
    replacement: Any
    before: Any = _ABSENT

    def take_back(self) -> None:
        owner, name = self.owner, self.name
        if owner is None:
            self.replacement()
        elif vars(owner).get(name, _ABSENT) != self.replacement:
            logger.warning("%s.%s was replaced by something else and stays so", type(owner).__name__, name)
        elif self.before is not _ABSENT:
            setattr(owner, name, self.before)
        else:
            delattr(owner, name)


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


def replace_for_good(kind: type[Any], name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace a method of a class, once in this process. Objects that are not ours must not notice.

    Args:
        kind: the class.
        name: of the method.
        make: gets the method; returns what takes its place.
    """
    stock = getattr(kind, name)
    if not hasattr(stock, MARK):
        made = functools.wraps(stock)(make(stock))
        setattr(made, MARK, True)
        setattr(kind, name, made)
