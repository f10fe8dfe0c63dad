"""Run one page's code blocks as a reader would: ``python tests/docs/page.py docs/cli.md``, in a folder of its own.

Prints what differs from the page, and exits with 1 if anything does; with ``--show``, prints what every block printed.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from blocks import ROOT, Block, blocks_of, commands_of, difference

_INSTALL = re.compile(r"^(?:sudo )?(pip install|apt-get install) (.+)$")
_LIMIT_S = 90.0


class Page:
    """What the blocks of one page share: a folder, a namespace, and the output of the block before."""

    def __init__(self, *, show: bool) -> None:
        self.namespace: dict[str, Any] = {"__name__": "__main__"}
        self.printed: str | None = None
        self.problems: list[str] = []
        self._show = show

    def run(self, block: Block) -> None:
        """Run one block and note what is wrong with it."""
        if block.not_run or block.run_in:
            return
        if block.title:
            Path(block.title).parent.mkdir(parents=True, exist_ok=True)
            Path(block.title).write_text(block.code)
        problem = getattr(self, f"_{block.language}")(block)
        if problem:
            self.problems.append(f"{block.where}: {problem}")

    def _python(self, block: Block) -> str:
        if block.title:
            return ""  # a console block below runs it
        output = io.StringIO()
        code = "\n" * block.line + block.code  # so that a traceback names the line of the page
        try:
            with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
                exec(compile(code, block.page, "exec"), self.namespace)
        except BaseException:
            return output.getvalue() + traceback.format_exc()
        self._printed(block, output.getvalue())
        return ""

    def _text(self, block: Block) -> str:
        if self.printed is None:
            return "no block before it prints anything that it could be compared with"
        printed, self.printed = self.printed, None
        return difference(block.code, printed)

    def _sh(self, block: Block) -> str:
        lines = [line for line in block.code.splitlines() if not _INSTALL.match(line)]
        return self._shell(block, "set -e\n" + "\n".join(lines), 0)

    def _console(self, block: Block) -> str:
        for command in commands_of(block):
            if problem := self._shell(block, command.command, command.status):
                return problem
            printed, self.printed = self.printed, None
            if problem := difference(command.shown, printed or ""):
                return f"$ {command.command}\n{problem}"
        return ""

    def _shell(self, block: Block, command: str, status: int) -> str:
        try:
            done = subprocess.run(
                ["bash", "-c", command],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                text=True,
                timeout=_LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"$ {command}\nis not done after {_LIMIT_S:.0f} s"
        if done.returncode != status:
            return f"$ {command}\nexits with {done.returncode}, not {status}:\n{done.stdout}"
        self._printed(block, done.stdout)
        return ""

    def _yaml(self, block: Block) -> str:
        import yaml

        self.printed = None
        data = yaml.safe_load(block.code)
        try:
            _parse(data)
        except BaseException as error:  # jsonargparse raises SystemExit
            return f"does not parse: {error!r}"
        return ""

    def _printed(self, block: Block, output: str) -> None:
        self.printed = output
        if self._show:
            print(f"--- {block.where}\n{output}", flush=True)


def _parse(data: Any) -> None:
    if "trainer" in data:
        from jsonargparse import ArgumentParser
        from lightning.pytorch import Trainer

        parser = ArgumentParser()
        parser.add_class_arguments(Trainer, "trainer")
        parser.instantiate_classes(parser.parse_object(data))
        return
    from safe_ckpt import CheckpointConfig

    CheckpointConfig.from_mapping(data.get("safe_ckpt", data))


def as_a_reader() -> dict[str, str]:
    """The environment of somebody who has just activated a virtual environment on a machine without a GPU."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "SAFE_CKPT", "PYTHON"))}
    return {
        **own,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{own.get('PATH', '')}",
        "PYTHONUNBUFFERED": "1",  # stdout and stderr in the order in which a terminal shows them
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "HOME": os.getcwd(),
        "RES_OPTIONS": "timeout:1",
        "OMP_NUM_THREADS": "1",
        "TORCH_EXTENSIONS_DIR": own.get("TORCH_EXTENSIONS_DIR", f"{ROOT}/.venv/torch_extensions"),
    }


def main() -> int:
    """Run the page named by the first argument in the current folder, or in a fresh one with ``--show``."""
    show = "--show" in sys.argv
    page = Page(show=show)
    if show:
        os.chdir(tempfile.mkdtemp())
    os.environ.update(as_a_reader())
    for block in blocks_of(sys.argv[1]):
        page.run(block)
    print("\n\n".join(page.problems))
    return 1 if page.problems else 0


if __name__ == "__main__":
    sys.exit(main())
