"""Listens on port 5000, greets who connects, and sends back whatever comes."""

import socket

with socket.create_server(("", 5000)) as listener:
    print("ready", flush=True)
    while True:
        one = listener.accept()[0]
        one.sendall(b"hello ")
        while data := one.recv(100):
            one.sendall(data)
