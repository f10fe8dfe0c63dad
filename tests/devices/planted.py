"""Bugs of order that are planted when the modules are loaded: a wait, an event or a device that is left out or is another one.

Whoever changes the modules may have to change a patch here: it says so when it fits no more. A bug that no program finds is a
finding about the programs.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from devices import runner

Patch = Callable[[str], str]
_DEVICE, _SNAPSHOT = "safe_ckpt.core.staging.device", "safe_ckpt.core.staging.snapshot"
_STAGER = "safe_ckpt.core.saving.stager"


def _swap(old: str, new: str) -> Patch:
    def patch(text: str) -> str:
        if text.count(old) != 1:
            raise ValueError(f"a planted bug does not fit any more: {text.count(old)} times {old!r}")
        return text.replace(old, new)

    return patch


_BEGUN = "            self._begun[device] = self._devices.mark(self._devices.current(device))\n"
_STARTED = """            with self._devices.on(side, device):
                self._devices.copy(move, self._buffer.bytes, non_blocking=True)
            self._done[move] = self._devices.mark(side)
"""
_COPY_NOW = """        with self._devices.at(device):
            stream = self._devices.current(device)
            if device in self._begun:
"""
_FORGET = "            for stream in [*self._streams.values(), *self._loose.values()]:\n                stream.synchronize()\n"
_STREAMED = "                self._devices.synchronize(tensor for plan in job.files for _, tensor in plan.tensors)\n"
_LET_GO = """            # Before it is over: a copy that a device has not finished would land in the next snapshot.
            self._devices.forget()
"""

PLANTED: dict[str, tuple[str, Patch]] = {
    "the side stream does not wait for the trainer": (
        _DEVICE,
        _swap("            side.wait_event(self._begun[device])\n", ""),
    ),
    "the trainer's place is asked of another stream": (
        _DEVICE,
        _swap(_BEGUN, _BEGUN.replace("self._devices.current(device)", "self._devices.stream(device)")),
    ),
    "the trainer's place is that of one device": (
        _DEVICE,
        _swap(_BEGUN, _BEGUN.replace("current(device)", "current(chosen[0].tensor.device)")),
    ),
    "started copies are copied on the trainer's stream": (
        _DEVICE,
        _swap(_STARTED, _STARTED.replace("on(side, device)", "at(device)")),
    ),
    "a copy's event is recorded before the copy": (
        _DEVICE,
        _swap(
            _STARTED,
            "            self._done[move] = self._devices.mark(side)\n"
            + _STARTED.replace("            self._done[move] = self._devices.mark(side)\n", ""),
        ),
    ),
    "a copy's event is recorded on the trainer's stream": (
        _DEVICE,
        _swap(_STARTED, _STARTED.replace("mark(side)", "mark(self._devices.current(device))")),
    ),
    "a started copy is not waited for": (_DEVICE, _swap("            event.synchronize()\n", "            pass\n")),
    "copies of two devices share a side stream": (
        _DEVICE,
        _swap("side = self._side_of(device)", "side = self._side_of(chosen[0].tensor.device)"),
    ),
    "a late copy does not wait for the trainer": (
        _DEVICE,
        _swap("                stream.wait_event(self._begun[device])\n", "                pass\n"),
    ),
    "a thread copies on device 0": (
        _DEVICE,
        _swap(
            _COPY_NOW,
            _COPY_NOW.replace("at(device)", "at(zero := torch.device(device.type, 0))").replace(
                "current(device)", "current(zero)"
            ),
        ),
    ),
    "pageable memory is taken for pinned": (
        _DEVICE,
        _swap(
            "self._devices.copy(move, self._buffer.bytes, non_blocking=pinned)",
            "self._devices.copy(move, self._buffer.bytes, non_blocking=True)",
        ),
    ),
    "asynchronous copies are not noted": (
        _DEVICE,
        _swap("                self._loose[device] = stream", "                pass"),
    ),
    "asynchronous copies are not waited for": (
        _DEVICE,
        _swap("        for stream in self._loose.values():\n            stream.synchronize()\n", ""),
    ),
    "asynchronous copies of one device alone are waited for": (
        _DEVICE,
        _swap(
            "        for stream in self._loose.values():\n", "        for stream in list(self._loose.values())[:1]:\n"
        ),
    ),
    "the step does not wait for the copies": (
        _DEVICE,
        _swap("            self._devices.current(device).wait_stream(side)\n", "            pass\n"),
    ),
    "the step waits on one device alone": (
        _DEVICE,
        _swap("in list(self._streams.items()):", "in list(self._streams.items())[:1]:"),
    ),
    "the step waits on a stream that is not the trainer's": (
        _DEVICE,
        _swap("self._devices.current(device).wait_stream(side)", "self._devices.stream(device).wait_stream(side)"),
    ),
    "a copy that was given up goes on": (_DEVICE, _swap(_FORGET, "            pass\n")),
    "a copy is over before its devices are": (
        _SNAPSHOT,
        _swap(_LET_GO, "            pass\n"),
    ),
    "the gate is open while the thread copies": (
        _SNAPSHOT,
        _swap("        if not self._over.wait(timeout_s):\n", "        if False:\n"),
    ),
    "the copies begin on the thread": (_SNAPSHOT, _swap("            self._devices.begin(self._later.moves)\n", "")),
    "files are written before what they hold is computed": (_STAGER, _swap(_STREAMED, "                pass\n")),
    "the devices of another are waited for": (
        _DEVICE,
        _swap("            self.current(device).synchronize()\n", "            self.stream(device).synchronize()\n"),
    ),
}

_TRANSPORT, _GATHER = "safe_ckpt.core.sharding.gather_transport", "safe_ckpt.core.sharding.gather"
_DEVICES = "safe_ckpt.devices"
_PLAIN_COPY = "            dtensor.cut(full, own.offsets, own.sizes).copy_(local)\n"
_TAKEN = "            dtensor.cut(full, chunk.at, chunk.sizes).copy_(piece.view(full.dtype).view(chunk.sizes))\n"
_WORK = """    _poll(work.is_completed, "gather: a round", [group], look, timeout_s)
    work.wait()
"""
_STANDING = "[module_of(stream.device.type).stream(stream) for stream in streams]"

OF_PAIRS: dict[str, tuple[str, Patch]] = {
    "a round is neither polled nor waited for": (_TRANSPORT, _swap(_WORK, "    del work, look, timeout_s\n")),
    "a reduction begins before what the trainer has queued": (
        _TRANSPORT,
        _swap("                for place in here:\n", "                for place in here[:0]:\n"),
    ),
    "a reduction stands on the device of another": (
        _TRANSPORT,
        _swap("([tensor.device for tensor in devices_of])", "()"),
    ),
    "the caller's stream is taken for a new one": (
        _DEVICES,
        _swap(_STANDING, _STANDING.replace("stream(stream)", "stream(torch.Stream(device=stream.device))")),
    ),
    "what rank 0 has itself is copied on another stream": (
        _GATHER,
        _swap(
            _PLAIN_COPY,
            "            with torch.Stream(device=local.device if not local.is_cpu else 'late'):\n    " + _PLAIN_COPY,
        ),
    ),
    "a part is sent from a stream that does not wait": (
        _GATHER,
        _swap(
            "            parts.append(piece.to(self._device))\n",
            "            with torch.Stream(device=piece.device if not piece.is_cpu else 'late'):\n"
            "                parts.append(piece.to(self._device).clone())\n",
        ),
    ),
    "the bytes of a round are copied and not waited for": (
        _GATHER,
        _swap(
            _TAKEN,
            "            held = piece.view(full.dtype).view(chunk.sizes)\n"
            "            room = torch.empty(chunk.sizes, dtype=full.dtype, device='cpu', pin_memory=not held.is_cpu)\n"
            "            dtensor.cut(full, chunk.at, chunk.sizes).copy_(room.copy_(held, non_blocking=True))\n",
        ),
    ),
    "host tensors travel on the group of the devices": (
        _TRANSPORT,
        _swap(
            "    sent = [outgoing.numel(), *[0] * (len(splits) - 1)]\n",
            "    sent = [outgoing.numel(), *[0] * (len(splits) - 1)]\n    outgoing = outgoing.cpu()\n",
        ),
    ),
}
"""In gathers, for programs of two ranks."""
PLANTED |= OF_PAIRS

_OVERLAP, _CALLBACK = "safe_ckpt.core.state.overlap", "safe_ckpt.lightning.callback"
_RESULTS = "safe_ckpt.lightning.results"
_NAMED = """            changing += [*module.buffers(), *in_forward]
            for name, parameter in module.named_parameters():
                if id(parameter) in owned:
"""

OF_FITS: dict[str, tuple[str, Patch]] = {
    "a step with a closure passes no gate": (
        _OVERLAP,
        _swap("    wrapped = _then_pass(closure)\n", "    wrapped = closure\n"),
    ),
    "buffers are copied later, as parameters are": (
        _OVERLAP,
        _swap(
            _NAMED,
            _NAMED.replace("*module.buffers(), ", "")
            .replace("module.named_parameters()", "[*module.named_parameters(), *module.named_buffers()]")
            .replace("in owned", "in owned or not isinstance(parameter, torch.nn.Parameter)"),
        ),
    ),
    "a save comes before the module's own hook": (
        _CALLBACK,
        _swap("self._saver is not None and self._saver.module_acts_at_batch_ends", "False"),
    ),
    "logged values are read before they are there": (
        _RESULTS,
        _swap("one.detach().to(device, copy=True)", "one.detach().to(device, copy=True, non_blocking=True)"),
    ),
}
"""On the ways of Lightning to a state, for runs of it."""
PLANTED |= OF_FITS

_IN_A_STAGER = ("files are written before what they hold is computed", "the devices of another are waited for")


def kind_for(name: str) -> str:
    """The kind of programs that meets it: snapshots alone have no ``Stager``, and are many in a second."""
    if name in OF_PAIRS:
        return "pair"
    if name in OF_FITS:
        return "lightning"
    return "saved" if name in _IN_A_STAGER else "staged"


class _Planting(importlib.abc.MetaPathFinder):
    """Loads one module with its source changed."""

    def __init__(self, name: str, patch: Patch) -> None:
        self._name, self._patch = name, patch

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        del target
        if fullname != self._name:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is None or not isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            raise ValueError(f"{fullname} is not there")
        spec.loader = _Changed(fullname, spec.loader.path, self._patch)
        return spec


class _Changed(importlib.machinery.SourceFileLoader):
    def __init__(self, fullname: str, path: str, patch: Patch) -> None:
        super().__init__(fullname, path)
        self._patch = patch

    def get_code(self, fullname: str) -> Any:
        del fullname
        return compile(self._patch(self.get_data(self.path).decode()), self.path, "exec")


def check(name: str) -> None:
    """Raises ValueError if it does not fit the module that it is for any more."""
    module, patch = PLANTED[name]
    package, *names = module.split(".")
    spec = importlib.util.find_spec(package)  # not the module: its framework would be loaded
    if spec is None or spec.origin is None:
        raise ValueError(f"{package} is not there")
    patch(Path(spec.origin).parent.joinpath(*names).with_suffix(".py").read_text(encoding="utf-8"))


def plant(name: str) -> None:
    """Plant it in this process, which has not loaded the package yet."""
    module, patch = PLANTED[name]
    if module in sys.modules:
        raise ValueError(f"{module} is loaded already")
    sys.meta_path.insert(0, _Planting(module, patch))


def print_table(names: list[str], most: int) -> int:
    """Find them, and print which seed finds each. Returns 1 if one was not found."""
    print("| Planted bug | Seed | Wrong |\n|---|---|---|", flush=True)
    missed = 0
    for name in PLANTED:
        if names and not any(one in name for one in names):
            continue
        check(name)
        found = runner.first_wrong(name, most, kind_for(name))
        missed += found is None
        seed, wrong = found or (f"none of {most}", "")
        print(f"| {name} | {seed} | {wrong[:90]} |", flush=True)
    return int(missed > 0)
