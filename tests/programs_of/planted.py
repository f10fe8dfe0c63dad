"""``python -m programs_of.planted``, in ``tests``: mends turned back, and which program finds each.

Whoever changes the code may have to change a bug here: a test says so when it fits no more. A bug that no program finds is a
finding about the programs.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
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
    "states": STATES,
    "loops": planted_sharded.LOOPS,
    "sharded": planted_sharded.SHARDED,
    "ranks": planted_sharded.RANKS,
    "lightning": planted_lightning.PLANTED,
    "accelerate": planted_loaders.ACCELERATE,
    "transformers": planted_loaders.TRANSFORMERS,
    "trained": planted_loaders.TRAINED,
}
"""Kind of the programs that look for it -> title -> file, old text, new text."""
PROGRAMS = {"states": 1000, "lightning": 300, "trained": 400}
"""Within how many of a kind each bug is to be found; of the others within 150."""
FIRST = {"lightning": 300}
"""From which on all options of a kind are drawn."""
FOUND_AT = {
    "the order of a mapping of tensors is that of the file": 25,
    "parameters come back as plain tensors": 25,
    "an OrderedDict comes back as a dict": 25,
    "channels last is forgotten": 25,
    "an archive forgets what is to be conjugated": 117,
    "a gradient is required before the memory is there": 547,
    "dcp.save says nothing of what a load will refuse": 97,
    "workers that would have gone on running are seeded again": 13,
    "dcp.load asks for what a fresh optimizer has": 2,
    "dcp.load wants state of parameters that had none": 52,
    "dcp.load leaves the state that torch has made for a parameter that had none": 41,
    "a flattened state begins anew with zeros": 41,
    "dcp.load puts text beside numbers that are keys": 14,
    "no resume takes a list of DTensors": 15,
    "ranks that are new draw what rank 0 draws": 8,
    "a loader of a rank that is new begins its epoch": 8,
    "an evaluation that was left is a place": 80,
    "loaders that are read side by side lose an epoch": 15,
    "persistent workers are started anew, and draw": 103,
    "a training that is over goes on by a step": 6,
    "the losses that were summed up are lost": 1,
    "a save before the next evaluation names a best that was not saved": 348,
}
"""Title -> a seed of its kind that is wrong with it, and not without."""
PLANTED = {title: bug for bugs in BY_KIND.values() for title, bug in bugs.items()}
KIND_OF = {title: kind for kind, bugs in BY_KIND.items() for title in bugs}


def planted_in() -> Path:
    """The package whose files are changed in a copy."""
    return Path(str(safe_ckpt.__file__)).parent


def found_by(title: str, first: int, count: int, limit_s: float) -> tuple[int | None, str]:
    """The first seed that is wrong with this bug, or None; and what is wrong, or how far the search came."""
    file, old, new = PLANTED[title]
    kind = KIND_OF[title]
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        package = Path(folder, "safe_ckpt")
        shutil.copytree(planted_in(), package, ignore=shutil.ignore_patterns("__pycache__"))
        text = (package / file).read_text(encoding="utf-8")
        if text.count(old) != 1:
            raise ValueError(f"{title}: it does not fit any more")
        (package / file).write_text(text.replace(old, new), encoding="utf-8")
        said = _said(kind, first, count, limit_s, {**os.environ, "PYTHONPATH": folder})
    if wrong := re.search(rf"{kind}: seed (\d+): (.*)", said):
        return int(wrong[1]), wrong[2][:90]
    if f"{kind}: {count} programs" in said:
        return None, f"not in {count} programs"
    reached = re.findall(rf"{kind}: (\d+) of", said)
    return None, f"not in {reached[-1] if reached else 0} programs, which took {limit_s:.0f} s"


def _said(kind: str, first: int, count: int, limit_s: float, env: Mapping[str, str]) -> str:
    command = [sys.executable, "-m", "programs_of", kind, "--first", str(first), "--count", str(count), "--until-wrong"]
    tests = Path(__file__).parents[1]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    one = subprocess.Popen(command, env=env, **pipes, text=True, cwd=tests, start_new_session=True)
    try:
        return one.communicate(timeout=limit_s)[0]
    except subprocess.TimeoutExpired:
        os.killpg(one.pid, signal.SIGKILL)  # its ranks, too
        return one.communicate()[0]


def main() -> int:
    """Returns 1 where one was not found."""
    parser = argparse.ArgumentParser(prog="python -m programs_of.planted", description=__doc__)
    parser.add_argument("titles", nargs="*", help="of bugs, or kinds of programs; without, all")
    parser.add_argument("--count", type=int, help="programs for each; without, as many as its kind has")
    parser.add_argument(
        "--search", action="store_true", help="from the first program on, not only the one that is known to find it"
    )
    parser.add_argument("--limit-s", type=float, default=3600.0, help="for each")
    options = parser.parse_args()
    missed = 0
    for title, kind in KIND_OF.items():
        if options.titles and not {title, kind} & set(options.titles):
            continue
        known = None if options.search else FOUND_AT.get(title)
        count = options.count or PROGRAMS.get(kind, 150)
        first = FIRST.get(kind, 0) if known is None else known
        seed, told = found_by(title, first, count if known is None else 1, options.limit_s)
        missed += seed is None
        print(f"{title}: {kind} {'NOT FOUND' if seed is None else seed}: {told}", flush=True)
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
