"""Connects to a store while no descriptor is left: prints the error."""

import os
import resource

from safe_ckpt.core.coordination import network, rendezvous

listening = network.listen("127.0.0.1", 0)
connect = rendezvous._Connector(["127.0.0.1"], listening.getsockname()[1], "token", "secret")
network.CONNECT_S = 1.0
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
held = []
try:
    while True:
        held.append(os.dup(0))
except OSError:
    pass
try:
    connect()
except Exception as error:
    text = str(error)
for one in held:
    os.close(one)
print(text)
