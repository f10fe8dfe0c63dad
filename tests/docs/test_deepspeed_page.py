"""The page about DeepSpeed, for ``make test-deepspeed``: it is not installed for the other tests."""

import pytest
from blocks import ROOT, needs, pages
from docstrings import package_of
from public import with_examples
from running import run_examples, run_page

pytest.importorskip("deepspeed")


@pytest.mark.parametrize("page", [page for page in pages() if needs(page) == "deepspeed"])
def test_every_block_of_a_page_runs_with_deepspeed(page, tmp_path):
    """Pasted in order into an empty folder, the blocks of the page work, and their output is the output shown."""
    done = run_page(ROOT / page, tmp_path, warm=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_example_of_the_adapter_runs(tmp_path):
    """The examples in the docstrings of the adapter's public names work."""
    names = [name for name in with_examples() if package_of(name) == "deepspeed"]
    done = run_examples(names, tmp_path)
    assert names
    assert done.returncode == 0, done.stdout + done.stderr
