"""What programs that train with Lightning have in common. Import it first: it finds the modules of the tests."""

import signal
import sys
import warnings
from pathlib import Path

TESTS = Path(__file__).parents[2]
sys.path[:0] = [str(TESTS), str(TESTS / "adapters")]
warnings.filterwarnings("ignore")
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job starts with it ignored

from lightning_runs import package  # noqa: E402 - what is found is on the path above

from safe_ckpt import CheckpointConfig, Timeouts  # noqa: E402

pl = package("lightning.pytorch")
CONFIG = CheckpointConfig(timeouts=Timeouts(lengthy_s=60, barrier_s=30, peer_stall_s=3, shutdown_s=10))
