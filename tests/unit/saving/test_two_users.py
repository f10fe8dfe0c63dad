"""Two users of one group save in turn into a directory that belongs to the group."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from kit.thorough import THOROUGH
from support import program_path


@pytest.fixture
def open_to_all():
    """Not pytest's own folder, which it closes to others again and again."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="needs root: it becomes two other users")
def test_two_users_of_a_group_go_on_from_each_others_checkpoints(open_to_all):
    """What is frozen and belongs to the other user is copied where it cannot be linked; every save is committed."""
    folder = open_to_all / "group"
    folder.mkdir()
    os.chown(folder, 0, 2000)
    folder.chmod(0o2775)
    users, steps = (1001, 1002, 1001, 1002) if THOROUGH else (1001, 1002), []
    for user in users:
        done = subprocess.run(
            [sys.executable, program_path("saves_as_another_user"), folder / "run", str(user)],
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert done.returncode == 0, done.stderr
        steps.append(int(done.stdout))
    assert steps == [2, 4, 6, 8][: len(users)]
    modes = {path.stat().st_mode & 0o777 for path in (folder / f"run/step-{steps[-1] - 1:08}").iterdir()}
    assert modes <= {0o664, 0o444}


@pytest.mark.skipif(os.getuid() != 0, reason="needs root: it becomes another user")
def test_a_directory_of_another_user_is_told_as_that(open_to_all):
    """First as root, then as a user, as with containers: the error names both users, and says what to do."""
    folder = open_to_all / "run"
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, program_path("saves_as_another_user"), folder, "1001"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert f"{folder} belongs to user 0 and this is user 1001" in done.stderr
    assert "chown -R" in done.stderr
