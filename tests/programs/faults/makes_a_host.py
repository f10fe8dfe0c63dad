"""Makes a host with a shared folder below FOLDER, stops its processes, prints the pids of it and of its hub, and waits."""

import signal
import sys
from pathlib import Path

from kit.hosts import Hosts

hosts = Hosts(1, Path(sys.argv[1])).__enter__()
hosts.share("bindfs")
hosts[0].start(["sleep", "1000"])
hosts[0].signal(signal.SIGSTOP)
print(hosts[0].pid, hosts.hub.pid, flush=True)
sys.stdin.readline()
