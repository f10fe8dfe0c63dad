"""Python runs this at its start where the folder is on ``PYTHONPATH``: an audited process, and each that it starts."""

import importlib.machinery
import importlib.util
import os
import sys

_here = os.path.dirname(os.path.abspath(__file__))


def _run(name: str, path: str) -> object:
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    sys.modules[name] = module
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    return module


_other = importlib.machinery.PathFinder.find_spec("sitecustomize", [one for one in sys.path if one != _here])
if _other is not None and _other.origin:  # what the machine has under this name
    _run("sitecustomize", _other.origin)
if os.environ.get("SAFE_CKPT_AUDIT"):
    _run("safe_ckpt_audit_recorder", os.path.join(os.path.dirname(_here), "recorder.py")).register_hooks()  # type: ignore[attr-defined]
