"""Imports the package, each of its names and all modules of the core: prints which of the MODULES are imported then."""

import importlib
import pkgutil
import sys

import safe_ckpt

assert "torch" not in sys.modules, "importing the package alone must stay cheap"
for name in safe_ckpt.__all__:
    getattr(safe_ckpt, name)
core = importlib.import_module("safe_ckpt.core")
for module in pkgutil.walk_packages(core.__path__, "safe_ckpt.core."):
    importlib.import_module(module.name)
print([name for name in sys.argv[1:] if name in sys.modules])
