"""Something that looks like a data set where its samples are made."""

from __future__ import annotations

from typing import Any


class StandIn:
    """Attributes, length and ``isinstance`` are the data set's.

    Args:
        inner: the data set.
        own: attributes of the stand-in itself.
    """

    def __init__(self, inner: Any, **own: Any) -> None:
        self.__dict__.update(_inner=inner, **own)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_inner" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._inner, name, value)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """What ``isinstance`` in a ``worker_init_fn`` should see."""
        return type(self.__dict__.get("_inner", self))

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (type(self), dict(self.__dict__))  # a worker that was not forked makes it again

    def __len__(self) -> int:
        return len(self._inner)


def _again(kind: type[Any], state: dict[str, Any]) -> Any:
    made: Any = object.__new__(kind)
    made.__dict__.update(state)
    return made
