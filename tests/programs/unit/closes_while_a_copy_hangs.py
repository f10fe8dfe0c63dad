"""Saves what did not change to URL again, and closes within a second: prints the error. ``frozen_jobs`` lies in MODULES."""

import sys

sys.path.insert(0, sys.argv[2])
from frozen_jobs import Job, store_config

from safe_ckpt import Checkpointer, Timeouts

job = Job()
times = Timeouts(lengthy_s=60, barrier_s=20, shutdown_s=1)
ckpt = Checkpointer(sys.argv[1], store_config(request_timeout_s=40, timeouts=times))
ckpt.save(1, job.state).result()
job.step()
ckpt.save(2, job.state)
try:
    ckpt.close()
except Exception as error:
    print(type(error).__name__)
