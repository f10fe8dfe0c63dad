"""The folders on a host's own disk into which checkpoints of a store are fetched."""

import os
import subprocess
import sys

from safe_ckpt.core.resuming import host_cache

_SWEEP = (
    "import sys, pathlib; from safe_ckpt.core.resuming import host_cache; host_cache._sweep(pathlib.Path(sys.argv[1]))"
)


def test_a_folder_in_use_is_not_swept_and_one_of_a_job_that_is_over_is(tmp_path):
    """Another job of the user's that begins on the host deletes what killed jobs left, and nothing that is being read."""
    folder = tmp_path / f"{host_cache._START}{os.getuid()}-1"
    used = host_cache._make(folder)
    also = host_cache._make(folder)  # another rank
    for left in (used, also):
        subprocess.run([sys.executable, "-c", _SWEEP, str(tmp_path)], check=True, timeout=60)
        assert folder.is_dir()
        os.close(left)
    subprocess.run([sys.executable, "-c", _SWEEP, str(tmp_path)], check=True, timeout=60)
    assert not folder.exists()
