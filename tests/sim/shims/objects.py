"""``obstore`` of the simulated processes."""

from __future__ import annotations

import types


def modules() -> dict[str, types.ModuleType]:
    """The modules, by name."""
    return {}
