"""Holds the directory FOLDER until a line of input comes."""

import sys
from pathlib import Path

from safe_ckpt.core.home.file_home import FileHome

root = FileHome(Path(sys.argv[1]), lease_s=60)
root.open()
print("open", flush=True)
input()
