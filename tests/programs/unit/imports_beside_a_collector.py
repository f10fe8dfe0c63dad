"""Uses names of the package with a garbage collector that is eager, and with one that is off."""

import gc

import torch  # noqa: F401 - what is measured is the import of ours alone

import safe_ckpt

gc.set_threshold(1, 1, 1)
runs = []
gc.callbacks.append(lambda phase, info: runs.append((phase, gc.isenabled())))
before = len(runs)
safe_ckpt.Checkpointer  # noqa: B018 - it is imported here
assert gc.isenabled()
assert len(runs) - before < 20, len(runs)
gc.disable()
safe_ckpt.RngState  # noqa: B018 - and this here
assert not gc.isenabled()
