"""What other savers write into a folder of ``publishing``, and what ``newest`` leads to."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy
import safetensors.torch
import torch
import xxhash

import safe_ckpt
from programs_of.draw import Draw
from programs_of.runner import Verdict
from programs_of.same import difference
from programs_of.state_oracle import as_torch_has_it, config_of, refusing, state_of, values_of

_NAMES = (
    "{}.pt",
    "below/{}.pt",
    "a b/ü/{}",
    ".{}",
    "{}.json",
    "{}-00001-of-00002.bin",
    "__0_0.distcp",
    "step-00000009/{}",
)


def published(draw: Draw, folder: Path) -> Verdict:
    """Each file and link is as it was written, whatever its name; torch, safetensors and numpy read what they wrote."""
    steps = draw.among("steps", [9], [9, 10], [9, 10, 11], [10, 10])
    config, is_later = config_of(draw), draw.flag("asynchronous")
    wanted: dict[str, Any] = {}
    for number, step in enumerate(steps):
        state = {name: values_of(one) for name, one in state_of(Draw(draw.seed, draw.made), number).items()}
        one, told = safe_ckpt.publishing(folder / "run", step, config=config, asynchronous=is_later), []
        with refusing(told, _NAMES), one as inside:
            wanted = _write(draw if step == steps[-1] and number == len(steps) - 1 else None, inside, state)
            if wanted.pop("hashed", False):
                one.hashed({name: xxhash.xxh3_128_hexdigest((inside / name).read_bytes()) for name in _plain(inside)})
            wrote = _all_of(inside)
        if told:
            return Verdict(came_to="refused at the save")
        one.result(60)
    found = safe_ckpt.newest(folder / "run")
    if found is None or found.step != steps[-1]:
        return Verdict(came_to="differs", wrong=f"newest: {found} instead of step {steps[-1]}")
    there = _all_of(found.path)
    if there.pop("manifest.json", None) is None or there != wrote:
        return Verdict(came_to="differs", wrong=f"files: {sorted(there)} instead of {sorted(wrote)}")
    for name, value in wanted.items():
        if how := difference(value, torch.load(found.path / name, weights_only=False)):
            return Verdict(came_to="differs", wrong=f"{how} in {name}")
    return Verdict(came_to="published")


def _write(draw: Draw | None, inside: Path, state: dict[str, Any]) -> dict[str, Any]:
    """Files of torch by their names, and what they hold; besides others."""
    written: dict[str, Any] = {}
    if draw is None:
        torch.save(1, inside / "earlier")
        return written
    for n, (item, value) in enumerate(state.items()):
        name = draw.among(f"{n}/file", *_NAMES).format(item)
        (inside / name).parent.mkdir(parents=True, exist_ok=True)
        try:
            torch.save(value, inside / name)
            written[name] = as_torch_has_it(value)
        except Exception:  # which torch does not save
            (inside / name).write_bytes(b"")
    for n in range(draw.number("more files", 0, 3)):
        _more(draw.among(f"{n}/more", *_MORE), inside, n)
    return {**written, "hashed": draw.flag("hashed", of=3)}


def _more(kind: str, inside: Path, n: int) -> None:
    place = inside / f"more{n}"
    if kind == "numpy":
        numpy.save(place.with_suffix(".npy"), numpy.arange(n))
    elif kind == "safetensors":
        safetensors.torch.save_file({"x": torch.ones(n, 2)}, place.with_suffix(".safetensors"))
    elif kind == "long":
        place.write_bytes(bytes(range(256)) * 5000)
    elif kind == "link":
        place.symlink_to("earlier" if n else os.listdir(inside)[0])
    elif kind == "two names":
        (inside / "first").write_text("text")
        place.hardlink_to(inside / "first")
    elif kind == "folder":
        place.mkdir()
    elif kind == "runs":
        place.write_text("#!/bin/sh\n")
        place.chmod(0o755)
    else:
        place.write_bytes(b"")


_MORE = ("empty", "numpy", "safetensors", "long", "link", "two names", "folder", "runs")


def _plain(inside: Path) -> list[str]:
    return [str(one.relative_to(inside)) for one in inside.rglob("*") if one.is_file() and not one.is_symlink()]


def _all_of(inside: Path) -> dict[str, Any]:
    """Path -> what lies there; a folder counts, too."""
    found: dict[str, Any] = {}
    for one in inside.rglob("*"):
        if one.is_symlink():
            found[str(one.relative_to(inside))] = ("link", os.readlink(one))
        else:
            body = one.read_bytes() if one.is_file() else "a folder"
            found[str(one.relative_to(inside))] = (oct(one.stat().st_mode & 0o777), body)
    return found
