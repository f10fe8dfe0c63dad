"""Follows DIRECTORY as one pass, and writes to OUT what it took, what was torn, and what it was told that it missed.

Arguments: DIRECTORY, OUT, a seed, how many to take, the limit, the longest hold in seconds, the time to live of its pin.
"""

import os
import random
import sys
import time

import safe_ckpt
from safe_ckpt.core.formats.manifest import read_manifest
from safe_ckpt.core.formats.verify import verify_files

directory, out, seed, count, limit, longest, ttl_s = sys.argv[1:]
chance = random.Random(int(seed))


def whole(one):
    """Every byte is there, and of this very save."""
    manifest = read_manifest(one.path)
    verify_files(one.path, manifest)
    return manifest.op_id == one.op_id


with open(out, "a", encoding="utf-8", buffering=1) as said:
    follower = safe_ckpt.follow(directory, every=1, limit=int(limit), ttl_s=float(ttl_s), timeout_s=30)
    for taken, one in enumerate(follower, 1):
        if taken == 1:  # what was gone before it began is nobody's loss: its place is there by now
            said.write(f"FROM {max(found.step for found in safe_ckpt.checkpoints(directory))}\n")
        said.writelines(f"MISSED {int(name.removeprefix('step-'))}\n" for name in one.missed)
        try:
            good = one.pinned and whole(one)
            time.sleep(chance.random() * float(longest))  # the work of the reader
            good = good and whole(one)
        except Exception as error:
            said.write(f"TORN {one.step} {error!r} {os.listdir(directory)}\n")
            raise
        said.write(f"{'TAKEN' if good else 'WRONG'} {one.step}\n")
        if taken == int(count):
            break
    follower.close()
    said.write("END\n")
