"""Jobs of several gloo ranks under ``accelerate launch``."""

import os
import re
import subprocess
import sys

from kit import warm
from kit.patience import scaled
from kit.ranks import free_port
from support import kill_all, program_path


def start(tmp_path, program, *args, size=2):
    """``program`` on ``size`` gloo ranks, in a process group of its own."""
    # With this type and cpu=True Accelerate makes gloo ranks; MULTI_CPU starts a single one.
    (tmp_path / "launch.yaml").write_text(
        f"compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nnum_machines: 1\nmachine_rank: 0\n"
        f"num_processes: {size}\nmain_process_port: {free_port()}\nmixed_precision: 'no'\nuse_cpu: false\n"
    )
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(tmp_path / "launch.yaml")]
    return warm.Popen(
        [*launch, str(program_path(program)), *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "RES_OPTIONS": "timeout:1"},
    )


def run(tmp_path, program, *args, size=2, timeout_s=100):
    """Returns what each rank said, line by line, without "RANK r"."""
    process = start(tmp_path, program, *args, size=size)
    try:
        output, _ = process.communicate(timeout=scaled(timeout_s))
    finally:
        kill_all()
        process.wait()
    said = {rank: [] for rank in range(size)}
    for number, words in re.findall(r"^RANK (\d+) (.*)$", output, re.MULTILINE):
        said[int(number)].append(words)
    assert process.returncode == 0, output[-4000:]
    return said
