"""``safe-ckpt follow``: each checkpoint once, to a command or as a folder; and readers in ``list`` and ``gc``."""

import json

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import safe_ckpt
from safe_ckpt import Checkpointer
from safe_ckpt.testing import inline_saves
from safe_ckpt.tools.cli.app import app

pytestmark = pytest.mark.timeout(60)


def run(*args):
    return CliRunner().invoke(app, [*map(str, args)])


@pytest.fixture
def folder(tmp_path):
    with inline_saves(), Checkpointer(tmp_path / "d") as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, {"model": {"w": torch.ones(4, 3) * step}}, metrics={"loss": 1 / step}).result()
    return tmp_path / "d"


def test_the_paths_are_printed_in_order(folder):
    """Without a command, for a shell's loop."""
    done = run("follow", folder, "--timeout-s", "0", "--after", "1")
    assert done.exit_code == 0
    assert done.stdout.split() == [str(folder / "step-00000002"), str(folder / "step-00000003")]


def test_a_command_is_run_for_each_and_a_failure_is_said(folder, tmp_path):
    """Its placeholders are filled in; the next one is taken all the same, and the exit status tells."""
    out = tmp_path / "said"
    done = run(
        "follow", folder, "--timeout-s", "0", "--exec", f"echo {{step}} {{name}} {{path}} >> {out}; [ {{step}} != 2 ]"
    )
    assert done.exit_code == 1
    lines = [line.split() for line in out.read_text().splitlines()]
    assert lines == [[str(n), f"step-0000000{n}", str(folder / f"step-0000000{n}")] for n in (1, 2, 3)]
    assert "exit status 1" in done.stderr


def test_a_model_folder_is_swapped_by_one_rename(folder, tmp_path):
    """The newest is there in the type that is asked for; a configuration that lies there stays, and nothing else is left."""
    out = tmp_path / "serve"
    out.mkdir()
    (out / "config.json").write_text("{}")
    done = run("follow", folder, "--timeout-s", "0", "--export", out, "--dtype", "bf16")
    assert done.exit_code == 0, done.output
    assert (out / "config.json").read_text() == "{}"
    weights = load_file(out / "model.safetensors")
    assert weights["w"].dtype == torch.bfloat16
    assert weights["w"][0, 0] == 3
    assert sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith(".safe_ckpt")) == ["d", "serve"]


def test_a_damaged_one_is_not_exported(folder, tmp_path):
    """What was there stays, and the exit status tells."""
    file = folder / "step-00000003" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    done = run("follow", folder, "--timeout-s", "0", "--export", tmp_path / "serve")
    assert done.exit_code == 1
    assert "step-00000003 was not exported" in done.stderr
    assert load_file(tmp_path / "serve" / "model.safetensors")["w"][0, 0] == 2


def test_wrong_use_is_refused(folder, tmp_path):
    """Before anything is waited for."""
    for wrong in (["--dtype", "bf16"], ["--export", tmp_path / "x", "--dtype", "bf17"], ["--every", "0"]):
        assert run("follow", folder, "--timeout-s", "0", *wrong).exit_code == 2


def test_list_and_gc_say_which_reader_holds_what(folder):
    """And gc leaves it."""
    with safe_ckpt.pin(folder / "step-00000001", reader="eval"):
        rows = {row["step"]: row["held_by"] for row in json.loads(run("list", folder, "--json").stdout)}
        assert rows[1].startswith("reader eval (process ")
        assert rows[2] == rows[3] == ""
        assert "reader eval (process" in run("list", folder).stdout
        done = run("gc", folder, "--keep-last", "1")
        assert done.exit_code == 0
        assert "reader eval" in done.stderr
        assert {path.name for path in folder.glob("step-*")} == {"step-00000001", "step-00000003"}
    run("gc", folder, "--keep-last", "1")
    assert {path.name for path in folder.glob("step-*")} == {"step-00000003"}
