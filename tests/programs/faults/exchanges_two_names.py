"""Exchanges the names of two files in FOLDER: prints what the call said, and the file that then has the first name."""

import ctypes
import os
import sys
from pathlib import Path

os.chdir(sys.argv[1])
for name in "ab":
    Path(name).write_text(name)
libc = ctypes.CDLL(None, use_errno=True)
bad = libc.renameat2(-100, b"a", -100, b"b", 2)
print(bad and os.strerror(ctypes.get_errno()), Path("a").read_text())
