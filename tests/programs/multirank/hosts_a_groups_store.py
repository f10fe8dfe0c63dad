"""Hosts the store of a process group on PORT, as a launcher does, says so and lives on."""

import sys

import torch.distributed as dist

store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=True, wait_for_workers=False)
print("up", flush=True)
sys.stdin.read()
