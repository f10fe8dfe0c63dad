"""Programs that train with Lightning, each started as a process, on one or several ranks."""

import os
import sys

from kit import warm
from kit.patience import scaled
from support import program_path


def run(program, *args, timeout_s=100):
    environment = {**os.environ, "RES_OPTIONS": "timeout:1"}
    return warm.run(
        [sys.executable, str(program_path(program)), *map(str, args)],
        capture_output=True, text=True, timeout=scaled(timeout_s), check=False, env=environment,
    )  # fmt: skip


def fingerprints(output):
    return {line.split()[2] for line in output.splitlines() if line.startswith("RANK")}
