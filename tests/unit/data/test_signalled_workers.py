"""SIGTERM that reaches the workers of a loader, too: from a scheduler, a shell, or a container's stop."""

import os
import signal
import subprocess
import sys

import pytest

from support import program_path


@pytest.mark.timeout(120)
@pytest.mark.parametrize("more", [[], ["stay"]])
def test_workers_outlive_the_signal_until_the_save_is_committed(tmp_path, more):
    """The whole process group gets SIGTERM: the checkpoint is there, the program ends by itself, and no worker is left."""
    command = [sys.executable, program_path("stops_among_its_workers"), tmp_path / "run", "resumable", *more]
    job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert job.stdout.readline().startswith("trains")
        os.killpg(job.pid, signal.SIGTERM)
        out, err = job.communicate(timeout=90)
    finally:
        job.kill()
    assert out.splitlines()[-1:] == ["stopped"], err
    assert job.returncode == 0, err
    assert "Traceback" not in err, err
    assert [path for path in (tmp_path / "run").iterdir() if path.name.startswith("step-")]
    with pytest.raises(ProcessLookupError):
        os.killpg(job.pid, 0)
