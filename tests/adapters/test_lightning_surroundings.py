"""What lies beside a checkpoint is none of its business: neighbours, deep trees, folders that may not be read."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support import program_path

TOOLS = ("strace", "setpriv")
CALLS = "trace=%file,getdents64"


def calls_between(lines, name):
    """The system calls of one save on the thread that trains."""
    start = next(number for number, line in enumerate(lines) if f"/begin-{name}" in line)
    end = next(number for number, line in enumerate(lines) if f"/end-{name}" in line)
    thread = lines[start].split()[0]
    return [line for line in lines[start + 1 : end] if line.split()[0] == thread]


@pytest.mark.skipif(not all(map(shutil.which, TOOLS)) or os.geteuid() != 0, reason="needs strace and setpriv, as root")
def test_a_save_looks_at_nothing_but_its_own_file(tmp_path):
    """save_checkpoint after fit, and without one: as many system calls among 500 neighbours and deep trees as among none; no
    folder is listed. fit takes, and resumes, a dirpath with a folder that this user may not read. The files go on in the order
    of commits, whoever saved them.
    """
    trace = tmp_path / "trace"
    for name in ("few", "many"):
        theirs = tmp_path / name / "exp/lost+found"
        theirs.mkdir(parents=True, mode=0o700)
        os.chown(theirs, 12345, 12345)
    # Root that may no longer read what belongs to others.
    command = [
        "setpriv",
        "--bounding-set",
        "-dac_override,-dac_read_search",
        sys.executable,
        str(program_path("saves_among_neighbours")),
    ]
    command = ["strace", "-f", "--seccomp-bpf", "-qq", "-o", str(trace), "-e", CALLS, *command, str(tmp_path)]
    here = Path(__file__).parent
    paths = [str(here), str(here.parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110, check=False)
    assert done.stdout.endswith("done\n"), done.stderr
    assert "lost+found is passed over" in done.stderr
    lines = trace.read_text().splitlines()
    for how in ("fit", "validate"):
        few, many = calls_between(lines, f"few-{how}"), calls_between(lines, f"many-{how}")
        assert 0 < len(few) < 150
        assert len(few) == len(many), "\n".join([*few, "against", *many])
        assert not [line for line in many if "getdents" in line]
