"""Sends each line of its input ten times to PORT: prints whether all of that came back, and the seconds, or the error."""

import socket
import sys
import time

with socket.create_connection(("localhost", int(sys.argv[1])), timeout=20) as one:
    print(one.recv(6).decode(), flush=True)
    for line in sys.stdin:
        begun = time.monotonic()
        try:
            one.sendall(line.encode() * 10)
            got = b""
            while len(got) < 10 * len(line):
                got += one.recv(1000)
        except OSError as error:
            print(type(error).__name__, flush=True)
            break
        print(got == line.encode() * 10, time.monotonic() - begun, flush=True)
