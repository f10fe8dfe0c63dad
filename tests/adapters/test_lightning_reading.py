"""A resume under Lightning verifies every file once, over all ranks."""

from collections import Counter

import pytest
from lightning_scripts import run


@pytest.mark.timeout(200)
@pytest.mark.parametrize("kind", ["file", "sharded"], ids=["one file", "sharded"])
def test_a_resume_verifies_each_file_once(tmp_path, kind):
    """One rank reads it for all: a single file, and each file of a sharded directory."""
    ended = run("counts_what_a_resume_reads", tmp_path / "exp", kind)
    assert ended.returncode == 0, ended.stderr[-3000:]
    lines = [line.split() for line in ended.stdout.splitlines() if line.startswith("READ")]
    assert {line[2] for line in lines} <= {"4", "6"}, "it did not resume"
    counts = Counter(line[1] for line in lines)
    assert counts, ended.stdout
    assert set(counts.values()) == {1}, counts
    if kind == "sharded":
        assert (
            len(counts) == len(list((tmp_path / "exp/epoch=1.ckpt").rglob("*"))) - 1
        )  # the manifest has its own digest
