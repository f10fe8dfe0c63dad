"""The place in the order of commits of a file that is saved outside of an engine.

All numbers are at least the clock's, see ``home.sequence_after``, so that jobs that do not know of each other have comparable
numbers. Within this process each is above those before it, whatever the clock does.
"""

from __future__ import annotations

from pathlib import Path

from safe_ckpt.core.home.home import sequence_after

_given: dict[Path, int] = {}


def sequence_beside(path: Path, after: int = 0) -> int:
    """A number for a file that is saved outside of a running pipeline: above that of every file it may compete with.

    Args:
        path: the file.
        after: the last number that is known to be given out there.
    """
    _given[path.parent] = sequence_after(max(after, last_beside(path)))
    return _given[path.parent]


def last_beside(path: Path) -> int:
    """The last number that this process gave out where ``path`` is to be saved; 0 for none."""
    return _given.get(path.parent, 0)
