"""Running a page, or examples, in a fresh process, in a folder of its own, as a reader would."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

_RUNNER = Path(__file__).with_name("page.py")
_EXAMPLES = Path(__file__).with_name("docstrings.py")
_VENV = Path(sys.executable).parent
_LIMIT_S = 110.0


def as_a_reader(home: Path) -> dict[str, str]:
    """The environment of somebody who has just activated a virtual environment on a machine without a GPU."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "SAFE_CKPT", "PYTHON"))}
    return {
        **own,
        "PATH": f"{_VENV}{os.pathsep}{own.get('PATH', '')}",
        "PYTHONUNBUFFERED": "1",  # stdout and stderr in the order in which a terminal shows them
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "HOME": str(home),
        "LC_ALL": "C.UTF-8",
        "RES_OPTIONS": "timeout:1",
        "OMP_NUM_THREADS": "2",
        "OPENBLAS_NUM_THREADS": "1",
        # What DeepSpeed compiles on its first start takes a minute: it is kept where the other tests keep it.
        "TORCH_EXTENSIONS_DIR": own.get("TORCH_EXTENSIONS_DIR", str(_VENV.parent / "torch_extensions")),
    }


def run_page(page: Path, folder: Path, *, warm: bool = False) -> subprocess.CompletedProcess[str]:
    """Run a page's blocks in ``folder``. Exits with 1 and says on stdout what differs from the page.

    With ``warm`` its commands import no framework again: see ``warm_commands.py``.
    """
    if not warm:
        return _run([_RUNNER, page], folder)
    from warm_commands import warm_commands

    with warm_commands() as commands:
        return _run([_RUNNER, page], folder, commands)


def run_examples(names: Iterable[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run examples of docstrings in ``folder``, all in one process. Exits with 1 and says on stdout what is wrong."""
    return _run([_EXAMPLES, *names], folder)


def _run(arguments: Iterable[object], folder: Path, commands: str = "") -> subprocess.CompletedProcess[str]:
    from kit.patience import scaled  # a page that runs as a script imports this module without the kit

    environment = as_a_reader(folder)
    if commands:
        environment["PATH"] = f"{commands}{os.pathsep}{environment['PATH']}"
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=scaled(_LIMIT_S),
        check=False,
    )
