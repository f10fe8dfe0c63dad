"""Saves into FOLDER as another user, who may not write there for a while: prints what came of it."""

import os
import sys

from safe_ckpt import Checkpointer
from safe_ckpt.errors import DirectoryError

exp = sys.argv[1]
os.mkdir(exp)
os.chown(exp, 65534, 65534)
os.setegid(65534)
os.seteuid(65534)
with Checkpointer(exp) as ckpt:
    ckpt.save(1, {"x": 1}).result()
    os.chmod(exp, 0o500)
    try:
        ckpt.save(2, {"x": 2}).result()
    except DirectoryError as error:
        print(error.errno, exp in error.path)
    os.chmod(exp, 0o700)
    print(ckpt.save(3, {"x": 3}).result().step, sorted(p for p in os.listdir(exp) if p.startswith("step")))
