"""Connects to port 5000 of HOST; twice prints what comes and sends a line of its input."""

import socket
import sys

with socket.create_connection((sys.argv[1], 5000), timeout=20) as one:
    for line in ("connected", "again"):
        print(line, one.recv(100).decode(), flush=True)
        one.sendall(sys.stdin.readline().encode())
