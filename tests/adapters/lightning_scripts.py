"""Programs that train with Lightning, each started as a process, on one or several ranks."""

import os
import sys
import time
from pathlib import Path

from kit import warm
from kit.patience import scaled
from support import kill_group, program_path, start_script


def run(program, *args, timeout_s=100):
    environment = {**os.environ, "RES_OPTIONS": "timeout:1"}
    return warm.run(
        [sys.executable, str(program_path(program)), *map(str, args)],
        capture_output=True, text=True, timeout=scaled(timeout_s), check=False, env=environment,
    )  # fmt: skip


def killed(program, folder, *args, commits, chance):
    """Start it and kill it, with its ranks, soon after so many commits in ``folder``. Returns the events of this start."""
    events = Path(folder) / ".safe_ckpt/events.jsonl"
    before, said = len(events.read_text()) if events.exists() else 0, ""
    process = start_script(program_path(program), str(folder), *map(str, args))
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline and process.poll() is None and said.count('"committed"') < commits:
        said = events.read_text()[before:] if events.exists() else ""
        time.sleep(0.01)
    time.sleep(chance.random() * 0.1)
    assert process.poll() is None, "the run ended before it could be killed"
    kill_group(process)
    process.stdout.close()
    assert said.count('"committed"') >= commits, "the run was too slow to be killed behind its commits"
    return said


def fingerprints(output):
    return {line.split()[2] for line in output.splitlines() if line.startswith("RANK")}
