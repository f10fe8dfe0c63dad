"""``python limited.py FOLDER CASE...``: lets every command look at hostile checkpoints, made below FOLDER, within limits.

Each command is a process of its own, forked from here, where everything is imported already: its memory and time are its own.
Prints one line of JSON per run.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import typer

from safe_ckpt.tools.cli.app import app

sys.path.insert(0, str(Path(__file__).parents[1]))
from fuzz import hostile

MOST_ADDRESSES_BYTES = 3 << 30
MOST_S = 30
COMMANDS = typer.main.get_command(app)


def run(command: list[str], output: Path) -> dict[str, object]:
    """A command: its exit status, what it said, how long it took, and the most memory that it had."""
    began = time.monotonic()
    pid = os.fork()
    if pid == 0:
        _child(command, output)
    _, status, usage = os.wait4(pid, 0)
    said = output.read_text("utf-8", "replace")
    result = {"status": os.waitstatus_to_exitcode(status), "said": said[:100_000]}
    seconds = {"wall_s": time.monotonic() - began, "cpu_s": usage.ru_utime + usage.ru_stime}
    return {"command": command[0], "rss_bytes": usage.ru_maxrss << 10, **seconds, **result}


def _child(command: list[str], output: Path) -> None:
    code = 70
    try:
        fd = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        resource.setrlimit(resource.RLIMIT_AS, (MOST_ADDRESSES_BYTES, MOST_ADDRESSES_BYTES))
        signal.alarm(MOST_S)
        COMMANDS(command)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 71
    except BaseException as error:
        os.write(2, f"Traceback {error!r:.500}".encode("utf-8", "replace"))
    finally:
        os._exit(code)


def main() -> None:
    folder, *names = sys.argv[1:]
    with contextlib.suppress(SystemExit), contextlib.redirect_stderr(io.StringIO()):
        COMMANDS(["verify", str(Path(folder, "missing"))])  # what is imported on first use is imported here, once
    for name in names:
        shelf = Path(folder, name)
        shelf.mkdir()
        place = (hostile.CASES | hostile.QUIET)[name](shelf)
        for command in (["verify", place], ["inspect", place], ["list", shelf], ["resume-path", shelf]):
            print(json.dumps({"case": name, **run(list(map(str, command)), Path(folder, "said"))}), flush=True)
        subprocess.run(["rm", "-rf", shelf], check=True)  # shutil.rmtree is no match for some of them


if __name__ == "__main__":
    main()
