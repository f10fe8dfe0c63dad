"""Takes the job lock in FOLDER, with a lease of LEASE_S seconds and PATIENCE_S if that is given, and holds it."""

import sys
from pathlib import Path

from safe_ckpt.core.home.file_lock import JobLock

folder, lease_s = Path(sys.argv[1]), float(sys.argv[2])
lock = JobLock(folder, subject=folder, lease_s=lease_s)
lock.acquire(*map(float, sys.argv[3:]))
print("held", flush=True)
sys.stdin.read()
