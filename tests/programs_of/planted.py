"""``python -m programs_of.planted``, in ``tests``: mends turned back, and which program finds each.

Whoever changes the code may have to change a bug here: a test says so when it fits no more. A bug that no program finds is a
finding about the programs.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import safe_ckpt
from programs_of import planted_lightning, planted_loaders, planted_sharded

_SAFETENSORS, _ARCHIVE = "core/formats/safetensors.py", "core/formats/torch_archive.py"
STATES = {
    "the order of a mapping of tensors is that of the file": (
        _SAFETENSORS,
        "ORDER_KEY: places_of([*kept, *aliases], tensors),",
        "ORDER_KEY: [],",
    ),
    "parameters come back as plain tensors": (
        _SAFETENSORS,
        "GRADIENTS_KEY: {name: kind for name, kind in kinds.items() if any(kind)},",
        "GRADIENTS_KEY: {},",
    ),
    "an OrderedDict comes back as a dict": (_SAFETENSORS, "if type(tensors) is OrderedDict:", "if False:"),
    "channels last is forgotten": (
        _SAFETENSORS,
        "STRIDES_KEY: {name: list(tensors[name].stride()) for name in kept if not tensors[name].is_contiguous()},",
        "STRIDES_KEY: {},",
    ),
    "an archive forgets what is to be conjugated": (
        _ARCHIVE,
        "left = (torch._utils.get_tensor_metadata(obj),)",
        "left = ()",
    ),
    "a gradient is required before the memory is there": (
        _ARCHIVE,
        "if (self._untyped or obj.dtype not in STORAGES) and obj.requires_grad:",
        "if False:",
    ),
    "dcp.save says nothing of what a load will refuse": (
        "dcp/saver.py",
        "        warn_of_refused(state)\n",
        "",
    ),
}
BY_KIND = {
    ("states",): STATES,
    ("loops", "sharded", "ranks"): planted_sharded.PLANTED,
    ("lightning",): planted_lightning.PLANTED,
    ("accelerate", "transformers"): planted_loaders.PLANTED,
}
"""Kinds of programs, in the order in which they look -> title -> file, old text, new text."""
PLANTED = {title: bug for bugs in BY_KIND.values() for title, bug in bugs.items()}


def planted_in() -> Path:
    """The package whose files are changed in a copy."""
    return Path(str(safe_ckpt.__file__)).parent


def found_by(title: str, kinds: tuple[str, ...], count: int, limit_s: float) -> str:
    """The first program that is wrong with this bug, as ``kind seed``; empty if none of so many is."""
    file, old, new = PLANTED[title]
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        package = Path(folder, "safe_ckpt")
        shutil.copytree(planted_in(), package, ignore=shutil.ignore_patterns("__pycache__"))
        text = (package / file).read_text(encoding="utf-8")
        if text.count(old) != 1:
            raise ValueError(f"{title}: it does not fit any more")
        (package / file).write_text(text.replace(old, new), encoding="utf-8")
        env = {**os.environ, "PYTHONPATH": folder}
        for kind in kinds:
            command = [sys.executable, "-m", "programs_of", kind, "--count", str(count), "--until-wrong"]
            try:
                said = subprocess.run(
                    command, env=env, capture_output=True, text=True, timeout=limit_s, check=False
                ).stdout
            except subprocess.TimeoutExpired:
                continue  # the next kind may be quicker
            if wrong := re.search(rf"{kind}: seed (\d+): (.*)", said):
                return f"{kind} {wrong[1]}: {wrong[2][:90]}"
    return ""


def main() -> int:
    """Returns 1 where one was not found."""
    parser = argparse.ArgumentParser(prog="python -m programs_of.planted", description=__doc__)
    parser.add_argument("titles", nargs="*", help="without, all")
    parser.add_argument("--count", type=int, default=300, help="programs of a kind")
    parser.add_argument("--limit-s", type=float, default=3600.0, help="for the programs of one kind")
    options = parser.parse_args()
    missed = 0
    for kinds, bugs in BY_KIND.items():
        for title in bugs:
            if not options.titles or title in options.titles:
                by = found_by(title, kinds, options.count, options.limit_s)
                missed += not by
                print(f"{title}: {by or 'NOT FOUND'}", flush=True)
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
