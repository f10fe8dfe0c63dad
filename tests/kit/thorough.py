"""The one switch between samples and whole sweeps: ``pytest --all``, or SAFE_CKPT_THOROUGH=1, which says the same."""

import os

_VARIABLE = "SAFE_CKPT_THOROUGH"
THOROUGH = bool(os.environ.get(_VARIABLE))


def turn_on():
    """For this process, for the workers of pytest, and for what tests start."""
    global THOROUGH  # noqa: PLW0603 - test modules, which come later, import the name
    os.environ[_VARIABLE] = "1"
    THOROUGH = True
