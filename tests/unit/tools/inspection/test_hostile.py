import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from typer.testing import CliRunner

from fuzz import hostile
from kit.thorough import THOROUGH
from safe_ckpt import Checkpointer
from safe_ckpt.core.sharding.dcp_read import read_metadata
from safe_ckpt.errors import CorruptCheckpointError, HostileCheckpointError, NoValidCheckpointError, RestoreError
from safe_ckpt.tools.cli.app import app

MOST_CPU_S = 10
MOST_RSS_BYTES = 1 << 30
LIMITED = Path(hostile.__file__).with_name("limited.py")
CASES = [name for name in (*hostile.CASES, *hostile.QUIET) if THOROUGH or name not in hostile.HEAVY]
# What a command need not read is no reason to refuse: the name in an index leads nowhere until somebody follows it.
HARMLESS = {("inspect", "index_that_leads_up"), ("inspect", "index_of_terabytes")}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Every case before every command, each in a process of its own with little memory. Once for all workers of a run."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    done = folder / "hostile.json"
    with FileLock(folder / "hostile.lock"):
        if not done.exists():
            done.write_text(run_all(tmp_path_factory.mktemp("hostile")))
    rows = [json.loads(line) for line in done.read_text().splitlines()]
    assert len(rows) == 4 * len(CASES)
    return {(row["command"], row["case"]): row for row in rows}


def run_all(folder):
    canary = folder / "canary"
    environment = {**os.environ, hostile.CANARY: str(canary)}
    command = [sys.executable, str(LIMITED), str(folder), *CASES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1000, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert not canary.exists(), "a payload was run"
    return done.stdout


@pytest.mark.timeout(1000)
@pytest.mark.parametrize("command", ["verify", "inspect", "list", "resume-path"])
def test_every_command_on_a_hostile_checkpoint_stays_within_bounds(runs, command):
    """No crash, no traceback, seconds of processor time and less than 1 GiB, whatever is in the checkpoint."""
    for name in CASES:
        row = runs[command, name]
        assert row["status"] in (0, 1, 3), row
        assert "Traceback" not in row["said"], row
        assert row["cpu_s"] < MOST_CPU_S, row
        assert row["rss_bytes"] < MOST_RSS_BYTES, row
        assert "\x1b" not in row["said"], row


@pytest.mark.parametrize("command", ["verify", "inspect", "resume-path"])
def test_a_hostile_checkpoint_is_refused_in_a_sentence(runs, command):
    """Exit status 1 and a few lines that say what is wrong with which file."""
    for name in CASES:
        if name in hostile.CASES and (command, name) not in HARMLESS:
            row = runs[command, name]
            assert row["status"] == 1, row
            assert 20 < len(row["said"]) < 700, row
            assert str(name) in row["said"], row  # the path


@pytest.mark.parametrize("name", [name for name in CASES if name.removeprefix("pickle_") in hostile.PAYLOADS])
def test_code_in_a_pickle_is_named_and_not_run(runs, name):
    """Code that a pickle would run is named and not run, however the pickle asks for it."""
    said = runs["inspect", name]["said"]
    assert "which is no data" in said
    assert any(call in said for call in ("system", "eval", "Popen")), said


def test_links_in_a_checkpoint_are_followed_only_when_asked_to(tmp_path):
    """--follow-symlinks reads what a hub's cache has behind links; without it the message says so."""
    (tmp_path / "blobs").mkdir()
    torch.save({"w": torch.ones(2)}, tmp_path / "blobs/x")
    place = tmp_path / "snapshot"
    place.mkdir()
    (place / "pytorch_model.bin").symlink_to("../blobs/x")
    refused = CliRunner().invoke(app, ["verify", str(place)])
    assert (refused.exit_code, "--follow-symlinks" in refused.output) == (1, True)
    assert CliRunner().invoke(app, ["verify", str(place), "--follow-symlinks"]).exit_code == 0
    assert "pytorch_model:w" in CliRunner().invoke(app, ["inspect", str(place), "--follow-symlinks"]).output


@pytest.mark.skipif(os.geteuid() != 0, reason="makes a device")
def test_a_device_is_not_read(tmp_path):
    """/dev/zero in a checkpoint never ends: it is refused, as is a path that is one."""
    place = hostile.directory_in(tmp_path, {"model.safetensors": b"\2" + bytes(7) + b"{}"})
    try:
        os.mknod(place / "optimizer.bin", 0o600 | 0o020000, os.makedev(1, 5))
    except PermissionError:
        pytest.skip("may not make devices")
    for command in ("verify", "inspect"):
        done = CliRunner().invoke(app, [command, str(place)])
        assert (done.exit_code, "not a regular file" in done.output) == (1, True)
        assert CliRunner().invoke(app, [command, "/dev/zero"]).exit_code == 1


@pytest.mark.parametrize(
    "make",
    [
        hostile.manifest_that_leads_up, hostile.deep_manifest, hostile.manifest_is_a_pipe, hostile.manifest_is_a_device,
        hostile.manifest_of_odd_values,
    ],
)  # fmt: skip
def test_a_resume_from_a_hostile_checkpoint_is_refused(tmp_path, make):
    """Checkpointer.resume goes by the same manifests: it does not hang, nor follow them out, and says what is wrong."""
    place = make(tmp_path)
    (tmp_path / "d").mkdir()
    place.rename(tmp_path / "d/step-00000001")
    with Checkpointer(tmp_path / "d") as ckpt, pytest.raises((NoValidCheckpointError, RestoreError)):
        ckpt.resume({"model": {"w": torch.zeros(2)}})


def test_the_metadata_of_a_sharded_item_runs_nothing(tmp_path):
    """Resuming sharded items reads .metadata with a pickle machine that knows DCP's records and nothing else."""
    for data in hostile.PAYLOADS.values():
        (tmp_path / ".metadata").write_bytes(data)
        with pytest.raises(CorruptCheckpointError):
            read_metadata(tmp_path)


def test_metadata_that_calls_a_function_of_dcp_is_refused_by_a_resume_and_a_command(tmp_path):
    """A record is made and filled; nothing beside DCP's records is called to make it."""
    calls = b"\x80\x02ctorch.distributed.checkpoint.filesystem\n_item_size\n)R."
    place = hostile.directory_in(tmp_path, {".metadata": calls, "__0_0.distcp": b""})
    with pytest.raises(HostileCheckpointError, match="_item_size"):
        read_metadata(place)
    done = CliRunner().invoke(app, ["verify", str(place)])
    assert done.exit_code == 1
    assert "_item_size, which has no place in a checkpoint's metadata" in " ".join(done.output.split())
