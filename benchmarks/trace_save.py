"""Which files of ``src`` a save and a resume enter, in order: ``python benchmarks/trace_save.py``.

One rank saves a model with its optimizer through ``Checkpointer`` and resumes from it in a new one. Every call of a function
is seen with ``sys.setprofile``: on the thread that trains, on the background threads, and in the writer process. A file
counts once one of its functions ran; generated methods, such as those of dataclasses, belong to no file.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import statistics
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

SOURCE = Path(__file__).resolve().parent.parent / "src" / "safe_ckpt"
MOST = {"save": 44, "resume": 31}
MOST_CHANGES = 200
RUNS = 5
BESIDE = ("extensions/", "hooks/", "events.py")
"""What stands beside the path: extensions with what they decide by, and hooks. A save needs none of it: it is not counted."""
_BOOT = "sys.path.insert(0, {folder!r}); import trace_save; trace_save.watch_writer({target!r}); "


class Route:
    """The files that are entered while ``recorded`` is, on any thread, in the order of their first call.

    Attributes:
        files: file -> number of calls.
        changes: the calls from one room (a folder) into another, each once: the waiting for a writer asks the same again and
            again, and how often that is depends on the machine.
    """

    def __init__(self) -> None:
        self.files: dict[str, int] = {}
        self.changes: set[tuple[str, str, str]] = set()
        self._rooms: dict[int, str] = {}
        self._on = False

    def install(self) -> None:
        """Watch this thread and all that begin later."""
        threading.setprofile(self._see)
        sys.setprofile(self._see)

    @contextmanager
    def recorded(self) -> Iterator[dict[str, int]]:
        """Record what is entered within: file -> number of calls."""
        self.files, self.changes, self._rooms, self._on = {}, set(), {}, True
        try:
            yield self.files
        finally:
            self._on = False

    def _see(self, frame: FrameType, event: str, _: object) -> None:
        if not self._on or event != "call":
            return
        name = file_of(frame)
        if name is None:
            return
        self.files[name] = self.files.get(name, 0) + 1
        thread, room = threading.get_ident(), os.path.dirname(name)
        before = self._rooms.get(thread, room)
        if before != room:
            self.changes.add((before, room, f"{name}:{frame.f_code.co_firstlineno}"))
        self._rooms[thread] = room


def file_of(frame: FrameType) -> str | None:
    """The file of ``src`` whose function this is; None for other code and for the body of a module or class."""
    name = frame.f_code.co_filename
    if not frame.f_code.co_flags & inspect.CO_OPTIMIZED or not name.startswith(f"{SOURCE}{os.sep}"):
        return None
    return Path(name).relative_to(SOURCE).as_posix()


def watch_writer(target: str) -> None:
    """In the writer process: append each file that is entered to ``target``, once."""
    seen: set[str] = set()

    def see(frame: FrameType, event: str, _: object) -> None:
        name = file_of(frame) if event == "call" else None
        if name is not None and name not in seen:
            seen.add(name)
            with Path(target).open("a", encoding="utf-8") as out:
                out.write(f"{name}\n")

    threading.setprofile(see)
    sys.setprofile(see)


def traced(folder: Path, mebibytes: int) -> tuple[dict[str, dict[str, int]], int]:
    """What one save and one resume enter, and how often a save changes the room, each call once, the median of ``RUNS``.

    Returns:
        "save", "writer" and "resume" -> file -> number of calls; and the changes.
    """
    import torch

    from safe_ckpt import CheckpointConfig, Checkpointer
    from safe_ckpt.core.writer import workers

    writers = folder / "writer"
    writers.touch()
    boot = _BOOT.format(folder=str(Path(__file__).parent), target=str(writers))
    workers._BOOT = workers._BOOT.replace(
        "from safe_ckpt", boot.replace("{", "{{").replace("}", "}}") + "from safe_ckpt", 1
    )
    route, changes = Route(), []
    route.install()
    model = torch.nn.Linear(mebibytes * 256, 1024, bias=False)
    state = {"model": model, "optimizer": torch.optim.Adam(model.parameters())}
    saved: dict[str, int] = {}
    for number in range(RUNS):
        with Checkpointer(folder / f"run{number}", CheckpointConfig()) as ckpt, route.recorded() as entered:
            ckpt.save(1, state).result()
        changes.append(len(route.changes))
        saved = saved or entered
    with Checkpointer(folder / "run0", CheckpointConfig()) as ckpt, route.recorded() as resumed:
        ckpt.resume(state)
    found = {"save": saved, "writer": dict.fromkeys(writers.read_text().split(), 0), "resume": resumed}
    return found, int(statistics.median(changes))


def counted(routes: dict[str, dict[str, int]], what: str) -> tuple[list[str], list[str], list[str]]:
    """The files on the path, those beside it, and those that the writer process alone enters."""
    writer = [name for name in routes["writer"] if name not in routes[what]] if what == "save" else []
    every = [*routes[what], *writer]
    return (
        [one for one in every if not one.startswith(BESIDE)],
        [one for one in every if one.startswith(BESIDE)],
        writer,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mebibytes", type=int, default=8, help="of the model; what is small is written by a thread")
    parser.add_argument("--json", action="store_true", help="the numbers alone")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        routes, changes = traced(Path(folder), options.mebibytes)
    if options.json:
        print(json.dumps({**{what: len(counted(routes, what)[0]) for what in MOST}, "changes of room": changes}))
        return
    print(f"a save changes the room {changes} times (aimed at: {MOST_CHANGES}), the median of {RUNS}")
    for what, most in MOST.items():
        path, beside, writer = counted(routes, what)
        print(f"{what}: {len(path)} files (aimed at: {most}), and {len(beside)} beside the path")
        for name, calls in routes[what].items():
            print(f"  {name} ({calls}){' beside' if name in beside else ''}")
        for name in writer:
            print(f"  {name} (in the writer process alone){' beside' if name in beside else ''}")


if __name__ == "__main__":
    main()
