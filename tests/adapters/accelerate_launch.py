"""Jobs of several gloo ranks under ``accelerate launch``."""

import os
import re
import subprocess
import sys
import textwrap

from kit import warm
from kit.patience import scaled
from kit.ranks import free_port
from support import kill_all

HEAD = f"""
    import os, sys, time
    sys.path[:0] = {sys.path!r}
    import warnings; warnings.filterwarnings("ignore")
    import torch; torch.set_num_threads(1)
    from datetime import timedelta
    from pathlib import Path
    from accelerate.utils import InitProcessGroupKwargs
    from accelerate_runs import CONFIG, Training, make, shared_memory, stateful
    from safe_ckpt import SafeCheckpointError
    from safe_ckpt.accelerate import register
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    def say(*words):
        os.write(1, (" ".join(map(str, ("RANK", rank, *words))) + "\\n").encode())
"""


def start(tmp_path, body, *args, size=2):
    """A job of ``size`` gloo ranks, in a process group of its own."""
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(HEAD) + textwrap.dedent(body))
    # With this type and cpu=True Accelerate makes gloo ranks; MULTI_CPU starts a single one.
    (tmp_path / "launch.yaml").write_text(
        f"compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nnum_machines: 1\nmachine_rank: 0\n"
        f"num_processes: {size}\nmain_process_port: {free_port()}\nmixed_precision: 'no'\nuse_cpu: false\n"
    )
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(tmp_path / "launch.yaml")]
    return warm.Popen(
        [*launch, str(script), *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "RES_OPTIONS": "timeout:1"},
    )


def run(tmp_path, body, *args, size=2, timeout_s=100):
    """Returns what each rank said, line by line, without "RANK r"."""
    process = start(tmp_path, body, *args, size=size)
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
