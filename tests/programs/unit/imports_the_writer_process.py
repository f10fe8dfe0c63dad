"""Imports what the writer process does: prints which of the MODULES are imported then."""

import importlib
import pkgutil
import sys

import safe_ckpt.core.writer.process  # noqa: F401
from safe_ckpt.core import storage
from safe_ckpt.core.formats import file_plan, zip_archive  # noqa: F401
from safe_ckpt.extensions.health import examine  # noqa: F401

for module in pkgutil.walk_packages(storage.__path__, storage.__name__ + "."):
    importlib.import_module(module.name)
print([name for name in sys.argv[1:] if name in sys.modules])
