"""Builds the compiled parts of DeepSpeed that the tests use; says which of them there are."""

from __future__ import annotations

import time

from deepspeed.ops.op_builder import AsyncIOBuilder
from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

for name, builder in (("collectives in shared memory", ShareMemCommBuilder()), ("NVMe offload", AsyncIOBuilder())):
    begun = time.monotonic()
    if not builder.is_compatible(verbose=False):
        print(f"DeepSpeed: {name}: not to be had here (libaio-dev is missing?)")
        continue
    builder.load(verbose=False)
    print(f"DeepSpeed: {name}: built in {time.monotonic() - begun:.0f} s")
