"""Runs one measurement in a fresh process, and never lets it run for ever."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def run(script: str, *arguments: object, timeout_s: float) -> dict[str, Any]:
    """Run a script of this directory; its last line is JSON. What goes wrong is returned as ``{"error": ...}``."""
    command = [sys.executable, str(HERE / script), *map(str, arguments)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            out, err = "", f"not done within {timeout_s:.0f} s"
        finally:
            _end(process.pid)  # also the processes that it started
    os.sync()  # what it deleted is not to be given back to the disk in somebody else's time
    if process.returncode != 0 or not out.strip():
        return {"error": _last(err) or f"exit status {process.returncode}"}
    found: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
    return found


def _end(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return


def _last(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
