"""The command ``safe-ckpt``. Needs the extra ``cli``. Nothing it does unpickles anything; ``gc`` takes the lock."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point of the console script."""
    try:
        from safe_ckpt.tools.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich", "click", "jinja2"):
            raise
        sys.exit("safe-ckpt needs typer, rich and jinja2: pip install typer rich jinja2")
    app()
