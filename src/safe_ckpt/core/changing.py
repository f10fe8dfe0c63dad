"""A state that another thread changes while it is read for a save."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from safe_ckpt.errors import StateError

_PACKAGE = __name__.partition(".")[0]


@contextlib.contextmanager
def unchanging(key: str) -> Iterator[None]:
    """Within this block what is called ``key`` is read.

    Raises:
        StateError: it was changed meanwhile; says what to do.
    """
    try:
        yield
    except (LookupError, RuntimeError) as error:
        changed = changed_meanwhile(error, key)
        if changed is None:
            raise
        raise changed from error


def changed_meanwhile(error: BaseException, key: str) -> StateError | None:
    """What ``error`` means, if it is that ``key`` lost or got entries while it was read; None for another error."""
    if isinstance(error, RuntimeError):
        is_that = type(error) is RuntimeError and "during iteration" in str(error)
    else:  # an entry was there a moment ago; where other code raises this it may mean anything
        is_that = isinstance(error, LookupError) and _raised_by(error).partition(".")[0] == _PACKAGE
    if not is_that:
        return None
    message = (
        f"it was changed while it was being saved ({type(error).__name__}: {error}). Another thread adds or removes "
        "entries: change it on the thread that saves only, hold a lock of yours around both, or save a copy of it"
    )
    return StateError(key=key, message=message)


def _raised_by(error: BaseException) -> str:
    trace, name = error.__traceback__, ""
    while trace is not None:
        name = str(trace.tb_frame.f_globals.get("__name__", ""))
        trace = trace.tb_next
    return name
