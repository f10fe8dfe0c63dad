"""Saves to FOLDER and resumes while obstore cannot be imported: prints the step, and what an address in a store is told."""

# ruff: noqa: E402 - obstore is taken away before
import sys

sys.modules["obstore"] = None
from safe_ckpt import Checkpointer

with Checkpointer(sys.argv[1]) as ckpt:
    ckpt.save(1, {"x": 1}).result()
    print(ckpt.resume({"x": 0}).step)
try:
    Checkpointer("s3://bucket/run")
except Exception as error:
    print(type(error).__name__, error)
