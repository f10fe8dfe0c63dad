"""Lightning's FSDPStrategy (FSDP 1) on two ranks: sharded directories and full files, a kill, and what stock reads."""

import os
import random

import pytest
import torch
from lightning_scripts import fingerprints, killed, run

from safe_ckpt.core.formats.manifest import read_manifest
from safe_ckpt.core.formats.verify import verify_files

pytestmark = pytest.mark.timeout(300)
PROGRAM = "trains_with_lightning_fsdp1"


def ended(folder, kind, epochs, devices=2):
    done = run(PROGRAM, folder, kind, epochs, devices)
    assert done.returncode == 0, done.stderr[-3000:]
    return sorted(line for line in done.stdout.splitlines() if line.startswith("RANK"))


def test_a_killed_run_goes_on_bit_for_bit_and_stock_lightning_reads_it(tmp_path):
    """A sharded run that is killed ends as an uninterrupted full one, weights and moments; the stock strategy reads both forms.

    The sharded run asks for overlapped snapshots. Three ranks take both, whole. A full file and a sharded directory replace
    each other.
    """
    expected = ended(tmp_path / "reference", "full", 4)
    full = tmp_path / "reference/last.ckpt"
    state = torch.load(full, weights_only=True)
    assert state["state_dict"]["net.0.weight"].shape == (64, 4)
    assert sorted(state["optimizer_states"][0]["state"]) == list(range(6))
    exp, seed = tmp_path / "exp", int.from_bytes(os.urandom(2))
    killed(PROGRAM, exp, "sharded", 4, commits=3, chance=random.Random(seed))
    assert ended(exp, "sharded", 4) == expected, f"random seed {seed}"
    last = exp / "last.ckpt"
    verify_files(last, read_manifest(last))
    for form, folder in (("sharded", exp), ("full", tmp_path / "reference")):
        assert ended(folder, "stock", 4) == expected, "stock, which finds nothing left to train"
        whole = {line.split()[-1] for line in expected}
        on_three = ended(folder, form, 4, devices=3)
        assert len(on_three) == 3
        assert {line.split()[-1] for line in on_three} == whole, "weights and moments on three ranks"
    assert len(fingerprints("\n".join(ended(exp, "full", 5)))) == 2
    assert last.is_file()
