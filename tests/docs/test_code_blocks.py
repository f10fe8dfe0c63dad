"""What the README and the pages below docs/ show is what a reader gets."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from blocks import ROOT, Block, blocks_of, commands_of, difference, needs, pages
from packaging.requirements import Requirement
from page import as_a_reader

HERE = Path(__file__).parent
ALL = [block for page in pages() for block in blocks_of(page)]
RUN = [page for page in pages() if not needs(page) and any(not (b.not_run or b.run_in) for b in blocks_of(page))]
NOT_RUN: set[tuple[str, str]] = set()


def run_page(page, folder):
    return subprocess.run(
        [sys.executable, str(HERE / "page.py"), page],
        cwd=folder,
        env={**as_a_reader(), "HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


@pytest.mark.parametrize("page", RUN)
def test_every_block_of_a_page_runs_and_prints_what_the_page_shows(page, tmp_path):
    """Pasted in order into an empty folder, the blocks of a page work, and their output is the output shown."""
    done = run_page(page, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
