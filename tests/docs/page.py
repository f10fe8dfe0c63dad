"""Run one page's code blocks in the current folder; by hand: ``python tests/docs/page.py --show docs/cli.md``.

Prints what differs from the page, and exits with 1 if anything does. With ``--show`` it works in a fresh folder and prints what
every block printed.
"""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from blocks import Block, blocks_of, commands_of, difference, is_install
from running import as_a_reader

from safe_ckpt.versions import SUPPORTED

_LIMIT_S = 90.0 * float(os.environ.get("RANKS_PATIENCE", "1"))  # as kit.patience measured it


class Page:
    """What the blocks of one page share: a folder, a namespace, and the output of the block before."""

    def __init__(self, *, show: bool) -> None:
        self.namespace: dict[str, Any] = {"__name__": "__main__"}
        self.printed: str | None = None
        self.problems: list[str] = []
        self._show = show

    def run(self, block: Block) -> None:
        """Run one block and note what is wrong with it."""
        if block.not_run:
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
        lines = [line for line in block.code.splitlines() if not is_install(line)]
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
        except Exception as error:
            return f"does not parse: {error!r}"
        return ""

    def _diff(self, block: Block) -> str:
        """Both sides are Python, which the quick start of its page runs."""
        for sides in ("- ", "+ "):
            side = "\n".join(line[1:] for line in block.code.splitlines() if line[:1] in sides)
            try:
                compile(side, block.page, "exec")
            except SyntaxError as error:
                return f"the side of {sides[0]!r} is no Python: {error}"
        return ""

    def _printed(self, block: Block, output: str) -> None:
        # What safe_ckpt says of a release of torch is said once a process, and not shown.
        output = "".join(line for line in output.splitlines(keepends=True) if SUPPORTED["torch"].reduced not in line)
        self.printed = output
        if self._show:
            print(f"--- {block.where}\n{output}", flush=True)


def _parse(data: Any) -> None:
    if "trainer" in data:  # as LightningCLI takes it
        from jsonargparse import ArgumentParser
        from lightning.pytorch import Trainer

        parser = ArgumentParser(exit_on_error=False)
        parser.add_class_arguments(Trainer, "trainer")
        parser.parse_object(data)
        return
    from safe_ckpt import CheckpointConfig

    CheckpointConfig.from_mapping(data.get("safe_ckpt", data))


def main() -> int:
    """Run the page that the last argument names."""
    show = "--show" in sys.argv
    sys.path.append(str(Path(__file__).parents[1]))  # PYTHONPATH=tests, which a page asks for
    blocks = blocks_of(os.path.abspath(sys.argv[-1]))
    page = Page(show=show)
    if show:
        os.chdir(tempfile.mkdtemp())
        os.environ.update(as_a_reader(Path.cwd()))
    for block in blocks:
        page.run(block)
    print("\n\n".join(page.problems))
    return 1 if page.problems else 0


if __name__ == "__main__":
    sys.exit(main())
