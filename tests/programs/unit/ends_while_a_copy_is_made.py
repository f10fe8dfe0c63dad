"""Saves what did not change to URL again, and ends. ``frozen_jobs`` lies in MODULES."""

import sys

sys.path.insert(0, sys.argv[2])
from frozen_jobs import Job

from safe_ckpt import Checkpointer

job = Job()
ckpt = Checkpointer(sys.argv[1])
ckpt.save(1, job.state).result()
job.step()
ckpt.save(2, job.state)
