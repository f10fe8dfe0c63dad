"""What every command prints, and its exit status. Commands run in this process; a terminal is tested with a real one."""

import json
import os
import pty
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from fuzz.hostile import manifest_of
from safe_ckpt import Checkpointer
from safe_ckpt.adapters.one_shot import save_archive
from safe_ckpt.core.formats.manifest import read_manifest
from safe_ckpt.core.home.file_home import FileHome
from safe_ckpt.errors import DirectoryInUseError
from safe_ckpt.tools.cli.app import app
from support import flip_bit, run_script


def run(*args):
    return CliRunner().invoke(app, list(map(str, args)))


def save(folder, *steps, metrics=None):
    with Checkpointer(folder) as ckpt:
        for step in steps:
            ckpt.save(step, {"w": {"t": torch.ones(10) * step}}, metrics=metrics or {"loss": step}).result(timeout_s=20)


def test_list_shows_the_newest_first_and_verify_names_a_damaged_file(tmp_path):
    """Newest first, damaged and quarantined ones included; verify names the bad file and exits with 1."""
    save(tmp_path, 1, 2)
    (tmp_path / ".safe_ckpt/quarantine/old").mkdir(parents=True)
    rows = json.loads(run("list", tmp_path, "--json").stdout)
    assert [(row["name"], row["state"]) for row in rows] == [
        ("step-00000002", "valid"),
        ("step-00000001", "valid"),
        (".safe_ckpt/quarantine/old", "quarantined"),
    ]
    assert "loss=2" in run("list", tmp_path).stdout
    good = run("verify", tmp_path / "step-00000001")
    assert (good.exit_code, good.stdout.split()[0]) == (0, "valid")
    flip_bit(tmp_path / "step-00000002/w.safetensors", 4100)
    bad = run("verify", tmp_path / "step-00000001", tmp_path / "step-00000002")
    assert bad.exit_code == 1
    assert "w.safetensors" in bad.stdout


def test_list_shows_the_first_four_metrics_and_how_many_more(tmp_path):
    """A Trainer gives a dozen. Programs get all, and so does who inspects one."""
    metrics = {f"eval_{letter}": 0.5 for letter in "fedcba"}
    save(tmp_path, 1, metrics=metrics)
    assert "eval_f=0.5, eval_e=0.5, eval_d=0.5, eval_c=0.5, +2 " in run("list", tmp_path).stdout
    assert json.loads(run("list", tmp_path, "--json").stdout)[0]["metrics"] == metrics
    assert "eval_a=0.5" in run("inspect", tmp_path / "step-00000001").stderr


def test_every_state_of_a_checkpoint_is_listed(tmp_path):
    """valid, unverified, damaged, partial, quarantined: each with its reason, and programs get all that is known."""
    save(tmp_path, 1, 2)
    torch.save({"w": torch.ones(1)}, tmp_path / "epoch=1-step=7.ckpt")
    for name in (".safe_ckpt/pending/x", ".safe_ckpt/quarantine/y", "step-00000009"):
        (tmp_path / name).mkdir(parents=True)
    flip_bit(tmp_path / "step-00000001/manifest.json", 30)
    done = run("list", tmp_path, "--json")
    assert done.exit_code == 0
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    assert {name: row["state"] for name, row in rows.items()} == {
        "step-00000002": "valid",
        "epoch=1-step=7.ckpt": "unverified",
        "step-00000001": "damaged",
        "step-00000009": "damaged",
        ".safe_ckpt/pending/x": "partial",
        ".safe_ckpt/quarantine/y": "quarantined",
    }
    best = rows["step-00000002"]
    assert set(best) == {
        "name", "step", "sequence", "created_at", "size_bytes", "shared_bytes", "world_size", "metrics", "written_by", "reason",
        "held_by",
        "state",
    }  # fmt: skip
    assert (best["step"], best["metrics"], best["world_size"]) == (2, {"loss": 2}, 1)
    assert best["sequence"] == read_manifest(tmp_path / "step-00000002").sequence
    assert best["size_bytes"] == (tmp_path / "step-00000002/w.safetensors").stat().st_size
    assert best["written_by"]["pid"] == os.getpid()
    assert all(row["reason"] for row in rows.values() if row["state"] in ("damaged", "partial", "quarantined"))
    assert (tmp_path / ".safe_ckpt/pending/x").exists()


def test_verify_and_inspect_as_json(tmp_path):
    """One document: verify a list of checkpoints with a judgement per file, inspect tensors and values or differences."""
    save(tmp_path, 1, 2)
    save_file({"v": torch.ones(2)}, tmp_path / "x.safetensors")
    done = run("verify", tmp_path, tmp_path / "x.safetensors", "--json")
    assert done.exit_code == 3
    ours, _, other = json.loads(done.stdout)
    assert set(ours) == {"path", "kind", "state", "size_bytes", "covered_bytes", "files", "remarks"}
    assert set(ours["files"][0]) == {"file", "state", "reason", "names", "size_bytes", "covered_bytes"}
    assert (ours["state"], ours["size_bytes"]) == ("valid", ours["covered_bytes"])
    assert (other["state"], other["covered_bytes"], other["kind"]) == ("cannot tell", 0, "safetensors file")
    shown = json.loads(run("inspect", tmp_path / "step-00000001", "--json").stdout)
    assert shown["tensors"] == [{"name": "w:t", "dtype": "float32", "shape": [10], "size_bytes": 40, "note": ""}]
    assert (shown["step"], shown["tensor_bytes"], shown["kind"]) == (1, 40, "safe_ckpt directory")
    compared = run("inspect", tmp_path / "step-00000001", tmp_path / "step-00000002", "--json")
    assert compared.exit_code == 1
    assert json.loads(compared.stdout) == {
        "tensors_compared": 1,
        "equal": False,
        "differences": [{"name": "w:t", "max_abs_difference": 1.0, "what": "values"}],
    }
    assert run("inspect", tmp_path / "step-00000001", tmp_path / "step-00000001").exit_code == 0
    assert "w:t" not in run("inspect", tmp_path / "step-00000001", "--match", "x*").stdout


def test_two_checkpoints_are_compared_in_what_matches_alone(tmp_path):
    """``--match`` holds for both: what differs elsewhere, or is in one alone, is not looked at."""
    ones = {"a.w": torch.ones(2), "a.b": torch.ones(2), "b.w": torch.ones(2)}
    save_file(ones, tmp_path / "one.safetensors")
    save_file({**ones, "b.w": torch.zeros(2), "c.w": torch.ones(1)}, tmp_path / "two.safetensors")
    pair = ("inspect", tmp_path / "one.safetensors", tmp_path / "two.safetensors")

    def compared(pattern):
        done = run(*pair, "--match", pattern, "--json")
        shown = json.loads(done.stdout)
        assert done.exit_code == (0 if shown["equal"] else 1)
        return shown["tensors_compared"], [row["name"] for row in shown["differences"]]

    assert compared("a.*") == (2, [])
    assert compared("b.*") == (1, ["b.w"])
    assert compared("*.w") == (2, ["b.w", "c.w"])


DIFFERENT = {
    "rounded": (0.1 + 0.2, 0.3),
    "int and float": (1, 1.0),
    "bool and int": (True, 1),
    "a long text": ("x" * 5000, "x" * 4999 + "y"),
    "bytes": (b"\0" * 5000, b"\0" * 4999 + b"\1"),
    "a long list": (list(range(5000)), [*range(4999), 0]),
    "nested": ({"a": {"b": [1, {"c": 2}]}}, {"a": {"b": [1, {"c": 3}]}}),
    "tuple and list": ((1, 2), [1, 2]),
    "large": (10**30, 10**30 + 1),
    "the end of a line": ("a b", "a\nb"),
    "a word": ("None", None),
    "NaN": (float("nan"), 0.0),
    "dtype": (torch.float32, torch.float16),
}


def test_values_are_compared_and_not_what_is_shown_of_them(tmp_path):
    """Values that differ where no line has room for it are a difference; a value equals itself, NaN too."""
    for number, name in enumerate(("one.pt", "other.pt")):
        torch.save({key: pair[number] for key, pair in DIFFERENT.items()} | {"n": float("nan")}, tmp_path / name)
    done = run("inspect", tmp_path / "one.pt", tmp_path / "other.pt", "--json")
    assert done.exit_code == 1
    assert {row["name"].partition(".")[0] for row in json.loads(done.stdout)["differences"]} == DIFFERENT.keys()
    for name in ("one.pt", "other.pt"):
        assert run("inspect", tmp_path / name, tmp_path / name).exit_code == 0


def test_json_is_json_whatever_the_values(tmp_path):
    """NaN, infinity and integers of thousands of digits are no JSON: their text is there, the value is null."""
    values = {
        "nan": float("nan"),
        "inf": float("inf"),
        "big": 1 << 20_000,
        "list": [1.5, float("nan")],
        "plain": [1, "x"],
    }
    torch.save({**values, "bytes\x1b[2J\ud800": b"\xff"}, tmp_path / "x.pt")
    done = run("inspect", tmp_path / "x.pt", "--json")

    def refuse(text):
        raise AssertionError(text)

    found = {row["name"]: row["value"] for row in json.loads(done.stdout, parse_constant=refuse)["values"]}
    assert [found[name] for name in values] == [None, None, None, None, [1, "x"]]
    shown = run("inspect", tmp_path / "x.pt")
    assert shown.exit_code == 0
    assert "\x1b" not in shown.stdout
    assert "bytes\\x1b[2J\\ud800" in shown.stdout


def test_a_checkpoint_without_checksums_is_not_called_valid(tmp_path):
    """A torch archive is verified by its CRC-32s; a pickle of before them: "cannot tell", status 3."""
    torch.save({"a": 1}, tmp_path / "x.ckpt")
    done = run("verify", tmp_path / "x.ckpt")
    assert (done.exit_code, done.stdout.split()[0]) == (0, "valid")
    torch.save({"a": 1}, tmp_path / "y.ckpt", _use_new_zipfile_serialization=False)
    done = run("verify", tmp_path / "y.ckpt")
    assert done.exit_code == 3
    assert done.stdout.startswith("cannot tell")


@pytest.mark.parametrize(
    "args",
    [
        ["list", "missing"], ["verify", "missing"], ["verify"], ["inspect", "missing"], ["resume-path", "missing"],
        ["gc", "missing"], ["unlock", "missing"], ["gc", ".", "--keep-last", "0"], ["gc", ".", "--keep-best", "1"],
        ["list", ".", "--unknown"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_wrong_usage_of_a_command_ends_with_status_2_and_a_sentence(tmp_path, args):
    """What is not there, or makes no sense: status 2, a sentence on stderr, nothing on stdout."""
    done = run(*(tmp_path / arg if arg in ("missing", ".") else arg for arg in args))
    assert (done.exit_code, done.stdout) == (2, "")
    assert len(done.stderr) > 20


def test_text_for_programs_is_plain(tmp_path):
    """Without a terminal: no escape sequences, no line broken at some width, remarks on stderr."""
    name = "metric_" + "x" * 150
    save(tmp_path / "d", 1, metrics={name: 0.5})
    done = subprocess.run(
        [sys.executable, "-m", "safe_ckpt.tools.cli", "list", str(tmp_path / "d")],
        capture_output=True, text=True, timeout=60, check=True, env={**os.environ, "COLUMNS": "40", "FORCE_COLOR": ""},
    )  # fmt: skip
    head, row = done.stdout.splitlines()
    assert f"{name}=0.5" in row
    assert head.split()[:2] == ["name", "step"]
    assert "\x1b" not in done.stdout + done.stderr


def test_on_a_terminal_a_name_cannot_act(tmp_path):
    """A table on a terminal shows brackets and escape sequences in names as what they are."""
    torch.save({"[red]w[/red]\x1b]0;title\x07": torch.ones(1)}, tmp_path / "x.pt")
    parent, child = pty.openpty()
    command = [sys.executable, "-m", "safe_ckpt.tools.cli", "inspect", str(tmp_path / "x.pt")]
    environment = {**os.environ, "COLUMNS": "200", "TERM": "xterm"}
    process = subprocess.Popen(command, stdout=child, stderr=subprocess.DEVNULL, env=environment)
    os.close(child)
    shown = b""
    while True:
        try:
            piece = os.read(parent, 65536)
        except OSError:  # Linux: the other end is closed
            break
        if not piece:
            break
        shown += piece
    os.close(parent)
    assert process.wait(timeout=60) == 0
    assert b"[red]w[/red]" in shown
    assert b"\x1b]0;" not in shown


def test_unlock_break_lock_takes_a_directory_from_its_holder(tmp_path):
    """unlock names the holder; --break-lock takes the directory away: another job gets it, the old one cannot commit."""
    with Checkpointer(tmp_path) as old:
        old.save(1, {"x": 1}).result()
        said = run("unlock", tmp_path)
        assert said.exit_code == 1
        assert f"process {os.getpid()}" in said.stdout
        found = json.loads(run("unlock", tmp_path, "--json").stdout)
        assert set(found) == {"directory", "holder", "taken_away"}
        assert (found["holder"]["pid"], found["taken_away"]) == (os.getpid(), False)
        assert run("unlock", tmp_path, "--break-lock").exit_code == 0
        other = run_script(
            "import sys; from safe_ckpt import Checkpointer\n"
            "with Checkpointer(sys.argv[1]) as ckpt: print(ckpt.resume({'x': 0}).step)",
            str(tmp_path),
        )
        assert other.stdout.strip() == "1", other.stderr
        with pytest.raises(DirectoryInUseError):
            old.save(2, {"x": 2}).result()
    assert "is free" in run("unlock", tmp_path).stdout


@pytest.mark.parametrize("place", ["_safe_ckpt", "../.safe_ckpt"], ids=["transformers", "accelerate"])
def test_the_lock_is_found_wherever_an_adapter_has_it(tmp_path, place):
    """In a Trainer's output directory it is in _safe_ckpt, for Accelerate's checkpoints beside it."""
    folder = tmp_path / "project/checkpoints"
    folder.mkdir(parents=True)
    root = FileHome(folder, lease_s=60, hidden=folder / place)
    root.open()
    done = run("unlock", folder)
    assert (done.exit_code, f"process {os.getpid()}" in done.stdout) == (1, True)
    assert run("unlock", folder, "--break-lock").exit_code == 0
    assert "is free" in run("unlock", folder).stdout
    root.close()


def test_a_pipe_in_the_place_of_the_lock_is_not_waited_for(tmp_path):
    """A pipe in the place of the lock: the answer comes at once."""
    (tmp_path / ".safe_ckpt").mkdir()
    os.mkfifo(tmp_path / ".safe_ckpt/lock")
    assert "is " in run("unlock", tmp_path).stdout
    (tmp_path / ".safe_ckpt/lock").unlink()
    (tmp_path / ".safe_ckpt/lock").write_text("no record")
    assert run("unlock", tmp_path).exit_code == 1


def test_commands_name_a_manifest_of_a_newer_release_and_delete_nothing(tmp_path):
    """list, verify, resume-path and gc say so and that an upgrade helps; nothing is called damaged, nothing deleted."""
    save_archive({"w": torch.ones(1)}, tmp_path / "x.ckpt", sequence=1)
    save(tmp_path, 1)
    (tmp_path / "step-00000001/manifest.json").write_bytes(manifest_of(format_version=99))
    for command in ("list", "verify", "resume-path", "gc"):
        done = run(command, tmp_path)
        assert (done.exit_code, done.exception.__class__) == (1, SystemExit)
        assert "upgrade" in done.output
        assert "damaged" not in done.output
    assert (tmp_path / "step-00000001").exists()
