import json
import os
import subprocess
import sys

import pytest
import torch

from safe_ckpt import Checkpointer
from safe_ckpt.errors import DirectoryInUseError
from support import flip_bit, run_script


def run(*args):
    command = [sys.executable, "-c", "from safe_ckpt.cli import main; main()", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_list_and_verify(tmp_path):
    """Newest first, damaged and quarantined ones included; verify names the bad file and exits with 1."""
    with Checkpointer(tmp_path) as ckpt:
        for step in (1, 2):
            ckpt.save(step, {"w": {"t": torch.ones(10)}}, metrics={"loss": step}).result(timeout_s=20)
    (tmp_path / ".safe_ckpt/quarantine/old").mkdir()
    rows = json.loads(run("list", tmp_path, "--json").stdout)
    assert [(row["name"], row["state"]) for row in rows] == [
        ("step-00000002", "valid"),
        ("step-00000001", "valid"),
        (".safe_ckpt/quarantine/old", "quarantined"),
    ]
    assert "loss=2" in run("list", tmp_path).stdout
    good = run("verify", tmp_path / "step-00000001")
    assert (good.returncode, good.stdout.split()[0]) == (0, "valid")
    flip_bit(tmp_path / "step-00000002/w.safetensors", 4100)
    bad = run("verify", tmp_path / "step-00000001", tmp_path / "step-00000002")
    assert bad.returncode == 1
    assert "w.safetensors" in bad.stdout


def test_what_carries_no_checksums_is_not_called_valid(tmp_path):
    """A file of torch.save: "cannot tell"."""
    torch.save({"a": 1}, tmp_path / "x.ckpt")
    done = run("verify", tmp_path / "x.ckpt")
    assert done.returncode == 0
    assert done.stdout.startswith("cannot tell")


def test_wrong_usage(tmp_path):
    """A directory that is not there: status 2 and a sentence."""
    done = run("list", tmp_path / "missing")
    assert done.returncode == 2
    assert "does not exist" in done.stderr


def test_the_impatient_can_break_a_lock(tmp_path):
    """unlock names the holder; --break-lock takes the directory away: another job gets it, the old one cannot commit."""
    with Checkpointer(tmp_path) as old:
        old.save(1, {"x": 1}).result()
        said = run("unlock", tmp_path)
        assert said.returncode == 1
        assert f"process {os.getpid()}" in said.stdout
        assert run("unlock", tmp_path, "--break-lock").returncode == 0
        other = run_script(
            "import sys; from safe_ckpt import Checkpointer\n"
            "with Checkpointer(sys.argv[1]) as ckpt: print(ckpt.resume({'x': 0}).step)",
            str(tmp_path),
        )
        assert other.stdout.strip() == "1", other.stderr
        with pytest.raises(DirectoryInUseError):
            old.save(2, {"x": 2}).result()
    assert "is free" in run("unlock", tmp_path).stdout
