"""One start of a program, in a process of its own: its optimizer steps are told, and it may be killed.

Run as a script: ``start.py KIND FILE``, where the file is JSON of what ``processes.start`` gives. The kind's module has
``start(draw, here)``, which builds the program that the draw says and runs it to its end.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import numpy
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from programs_of.draw import Draw
from safe_ckpt.tools.audit import recorder


class Here:
    """What a program knows of its start.

    Args:
        given: see ``processes.start``.
        rank: of this process.

    Attributes:
        out: the folder for its checkpoints; the same at each start.
        number: how many starts were before this one.
        stock: whether the stock part is to be used in the place of ours.
        more: what the kind's ``run`` has for its ``start``.
    """

    def __init__(self, given: dict[str, Any], rank: int) -> None:
        self.out, self.rank, self.stock = Path(given["out"]), rank, bool(given["stock"])
        self.number, self.more = int(given["number"]), given["more"]
        self.records = Path(given["records"])
        self._kill = {} if given["kill"] is None or given["kill"]["rank"] != rank else given["kill"]
        self._pid, self._met, self._lock = os.getpid(), {}, threading.Lock()  # type: ignore[var-annotated]
        self._told = (self.records / f"told-{rank}.jsonl").open("w", encoding="utf-8")

    def meets(self, what: str) -> None:
        """Something happens at which a start may be killed: a hook, a batch. Counted by its name."""
        with self._lock:
            self._met[what] = self._met.get(what, 0) + 1
        if self._kill.get("what") == what and self._kill["number"] == self._met[what] and os.getpid() == self._pid:
            os.kill(self._pid, signal.SIGKILL)

    def event(self, position: int, text: str) -> None:
        """In the order in which they come, those behind a resume are those of the whole run. Position: optimizer steps done."""
        self._tell({"position": position, "event": text})

    def result(self, name: str, value: Any) -> None:
        """A value at the end, which is that of the whole run."""
        self._tell({"result": name, "value": value})

    def note(self, name: str, value: Any) -> None:
        """For the kind's ``run``; not compared."""
        self._tell({"note": name, "value": value})

    def _tell(self, line: dict[str, Any]) -> None:
        self._told.write(json.dumps(line) + "\n")
        self._told.flush()

    def kill_within_saves(self) -> None:
        """A rename and an unlink are such moments: ``rename`` and ``remove``, of whatever thread of this process."""

        def hook(event: str, _: Any) -> None:
            if event in ("os.rename", "os.remove"):
                self.meets(event.partition(".")[2])

        sys.addaudithook(hook)


def main() -> None:
    """Returns when the program is over."""
    kind, file = sys.argv[1:3]
    given = json.loads(Path(file).read_text(encoding="utf-8"))
    here = Here(given, int(os.environ.get("RANK", "0")))
    here.kill_within_saves()
    kill = given["kill"] or {}
    is_behind_steps = kill.get("what") == "step" and kill["rank"] == here.rank
    watching = recorder.Recorder(str(here.records), kill["number"] if is_behind_steps else 0)
    watching.register()
    for name, (owner, method) in recorder.LOGGERS.items():
        if name in sys.modules:
            watching.listen(getattr(sys.modules[name], owner), method)
    random.seed(given["seed"])
    numpy.random.seed(given["seed"])
    torch.manual_seed(given["seed"])
    importlib.import_module(f"programs_of.{kind}").start(Draw(given["seed"], given["fixed"]), here)


if __name__ == "__main__":
    main()
