"""Holds the directory FOLDER sixty times, as often as no other process has it."""

import sys
from pathlib import Path

from safe_ckpt.core.home.file_home import FileHome
from safe_ckpt.errors import DirectoryInUseError

had = 0
while had < 60:
    root = FileHome(Path(sys.argv[1]), lease_s=6)
    try:
        root.open()
    except DirectoryInUseError:
        continue
    had += 1
    root.make_pending("op")
    root.drop_pending("op")
    root.close()
