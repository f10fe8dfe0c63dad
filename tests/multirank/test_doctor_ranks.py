"""The doctor on several ranks: what they see of each other, and that a rank that is missing or different is named."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from safe_ckpt.errors import CoordinationError
from safe_ckpt.testing import spawn_ranks, values
from safe_ckpt.tools.doctor import Options, diagnose, world_of


def _doctor(path, timeout_s):
    """What was found, check by check, or what another rank than 0 raised; and how long it took."""
    begun = time.monotonic()
    found, said = {}, ""
    try:
        report = diagnose(path, Options(probe_bytes=0, timeout_s=timeout_s), world_of(os.environ))
        found = {finding.check: finding for finding in report.findings} if report else {}
    except CoordinationError as error:
        said = str(error)
    return found, said, time.monotonic() - begun


def test_under_torchrun_one_speaks(tmp_path):
    """Two ranks of torchrun: one report, of both; they see one directory, and nothing is left."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [
        sys.executable,
        *launch,
        "-m",
        "safe_ckpt.tools.cli",
        "doctor",
        str(tmp_path),
        "--json",
        "--mebibytes",
        "8",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    found = {finding["check"]: finding for finding in report["findings"]}
    names = ("ranks", "same versions", "same settings", "same directory", "process group", "lock")
    assert {name: found[name]["state"] for name in names} == dict.fromkeys(names, "ok")
    assert report["ranks"] == 2
    assert os.listdir(tmp_path) == []


def _different(rank, tmp_path):
    if rank == 2:
        (tmp_path / "settings.yaml").write_text("max_in_flight: 2")
        os.environ["SAFE_CKPT_CONFIG"] = str(tmp_path / "settings.yaml")
    return _doctor(tmp_path / ("elsewhere" if rank == 1 else "exp"), timeout_s=6)


def test_what_differs_is_named(tmp_path):
    """One rank is given another directory, one has other settings: each is named, the others not."""
    for name in ("exp", "elsewhere"):
        (tmp_path / name).mkdir()
    (found, _, _), *others = values(spawn_ranks(_different, 3, tmp_path, init=False))
    assert found["same directory"].measured.startswith("rank 1 does not see what rank 0 created")
    assert str(tmp_path / "elsewhere") in found["same directory"].measured
    assert found["same settings"].state == "fail"
    assert found["same settings"].measured == "ranks 0, 1: the defaults; rank 2: max_in_flight=2"
    assert found["process group"].state == "ok"
    assert [other[:2] for other in others] == [({}, "")] * 2
    assert os.listdir(tmp_path / "exp") == os.listdir(tmp_path / "elsewhere") == []


def _come_or_not(rank, gate, path, missing, how):
    from safe_ckpt.tools.doctor import ranks as peers

    if rank == missing:
        if how == "absent":
            return None
        peers._look = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    (gate / str(rank)).touch()
    while len(os.listdir(gate)) < (2 if how == "absent" else 3):
        time.sleep(0.01)  # the short deadline is for the rank that is missing, not for the start of a process
    return _doctor(path, timeout_s=3)


@pytest.mark.parametrize(("missing", "how"), [(0, "absent"), (2, "absent"), (2, "killed")])
def test_a_rank_that_is_missing_is_named(tmp_path, missing, how):
    """One that never comes, or is killed on the way: within --timeout-s and a little, on all others; rank 0 reports on."""
    gate, path = tmp_path / "gate", tmp_path / "exp"
    gate.mkdir()
    path.mkdir()
    outcomes = spawn_ranks(_come_or_not, 3, gate, path, missing, how, init=False)
    for rank in {0, 1, 2} - {missing}:
        found, said, seconds = outcomes[rank].value
        assert seconds < 20
        told = found["ranks"].measured if rank == 0 else said
        assert f"{'missing' if how == 'absent' else 'lost'} ranks" in told.replace(":", "")
        assert f"[{missing}]" in told
        assert rank or found["lock"].state == "ok"
    assert os.listdir(path) == []
