"""Starts a server of this KIND with FOLDER, prints its pid and lives on."""

import sys
from pathlib import Path

from kit.object_servers import start

print(start(sys.argv[1], Path(sys.argv[2])).pid, flush=True)
sys.stdin.read()
