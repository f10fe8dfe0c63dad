"""Becomes another user, who may only read DIRECTORY: prints the step that it loads, the epoch found, and the newest step."""

import os
import sys

import safe_ckpt

safe_ckpt.load(sys.argv[1], {"epoch": 0})  # nobody may read where these modules lie
safe_ckpt.newest(sys.argv[1])
os.setuid(65534)
state = {"epoch": 0}
print(safe_ckpt.load(sys.argv[1], state).step, state["epoch"], safe_ckpt.newest(sys.argv[1]).step)
