"""The files that a page of the documentation shows, so that a test runs what a reader would."""

import os
import sys
from pathlib import Path

from docs.blocks import blocks_of


def write_files(page, folder, *names):
    """Write files of these names into a folder, with what the page shows as their contents."""
    shown = {block.title: block.code for block in blocks_of(page) if block.title}
    for name in names:
        path = folder / name
        path.write_text(shown[name])
        path.chmod(0o755)


def activated():
    """What activating the virtual environment of this interpreter puts into the environment."""
    return {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}", "PYTHONUNBUFFERED": "1"}


__all__ = ["activated", "write_files"]
