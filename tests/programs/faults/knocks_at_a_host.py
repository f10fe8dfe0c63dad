"""Connects to a port of HOST where nobody listens: prints whether it was refused or got no answer."""

import socket
import sys

try:
    socket.create_connection((sys.argv[1], 9), timeout=1)
except ConnectionRefusedError:
    print("refused")
except OSError:
    print("no answer")
