"""Training scripts that are started as a process, on one or several ranks."""

import os
import sys
import textwrap

from kit import warm
from kit.patience import scaled

HEAD = f"""
    import os, sys
    sys.path[:0] = {sys.path!r}
    import warnings; warnings.filterwarnings("ignore")
    import signal; signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job starts with it ignored
    import torch; torch.set_num_threads(1)
    from datetime import timedelta
    from pathlib import Path
    from lightning_runs import fingerprint, module_class, note_start, package, trainer, stop_at
    from safe_ckpt import CheckpointConfig, Timeouts
    from safe_ckpt.lightning import SafeCheckpointCallback, resumable
    pl = package("lightning.pytorch")
    CONFIG = CheckpointConfig(timeouts=Timeouts(lengthy_s=60, barrier_s=30, peer_stall_s=3, shutdown_s=10))
    folder = Path(sys.argv[1])
"""


def script(tmp_path, body):
    file = tmp_path / "train.py"
    file.write_text(textwrap.dedent(HEAD) + textwrap.dedent(body))
    return file


def run(file, *args, timeout_s=100):
    environment = {**os.environ, "RES_OPTIONS": "timeout:1"}
    return warm.run(
        [sys.executable, str(file), *map(str, args)],
        capture_output=True, text=True, timeout=scaled(timeout_s), check=False, env=environment,
    )  # fmt: skip


def fingerprints(output):
    return {line.split()[2] for line in output.splitlines() if line.startswith("RANK")}
