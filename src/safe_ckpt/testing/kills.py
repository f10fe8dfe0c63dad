"""Kill a program at each of its file operations, or at random moments, start it again, and compare where it ends."""

from __future__ import annotations

import os
import random
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safe_ckpt.errors import AuditError, ResumeDiffersError
from safe_ckpt.testing.faults import FaultyStorage
from safe_ckpt.tools.audit.runs import MARKER, OUT, kill_started


@dataclass(frozen=True, kw_only=True)
class Kills:
    """The results of ``kills``.

    Attributes:
        count: how often a program was killed.
        problems: where it was killed -> what was wrong with the program that was started again.

    Example:
        ```python
        print(Kills(count=3, problems={"operation 2": "it ended with 1: ValueError"}))
        ```

        ```text
        operation 2: it ended with 1: ValueError
        1 of 3 kills had a wrong end
        ```
    """

    count: int
    problems: dict[str, str]

    @property
    def equal(self) -> bool:
        """Whether each one ended as the program that nothing stopped."""
        return not self.problems

    def check(self) -> None:
        """Raise if one ended in another way, for a test.

        Raises:
            ResumeDiffersError: one did; the error says after which kill.
        """
        if not self.equal:
            raise ResumeDiffersError(message=str(self))

    def __str__(self) -> str:
        lines = [f"{where}: {problem}" for where, problem in self.problems.items()]
        return "\n".join([*lines, f"{len(lines)} of {self.count} kills had a wrong end"])


def kills(
    command: Sequence[str],
    *,
    result: Callable[[Path], Any],
    every: int = 1,
    torn: bool = False,
    times: int = 0,
    seed: int | None = None,
    timeout_s: float = 120.0,
    folder: str | os.PathLike[str] | None = None,
) -> Kills:
    """Run a program, kill it at each file operation below ``{out}``, start it again, and compare its result.

    Each time it begins in a folder of its own. A kill is SIGKILL to the process group, so it meets a writer process too, and
    then to all else that the program has started. Needs Linux and a C compiler.

    Args:
        command: of the program; ``{out}`` in it becomes the folder of each run. It must be the same each time.
        result: called with that folder when the program has ended; what it returns is compared by ``==``.
        every: kill at every so-manieth operation only.
        torn: a write at which it is killed is half done.
        times: if not 0, kill at so many random moments instead.
        seed: chooses these.
        timeout_s: for each run, in seconds.
        folder: keeps what the runs write; must be empty. Without it all that is removed.

    Returns:
        What it came to; ``check()`` raises ``ResumeDiffersError`` if one ended differently.

    Raises:
        AuditError: the program fails without a kill, does not end the same twice, or changes nothing below ``{out}``.
        RuntimeError: there is no C compiler, or this is not Linux.

    Example:
        ```python
        job = "from pathlib import Path; n = Path('{out}/n'); n.write_text(f'{int(n.read_text()) + 1 if n.exists() else 1}')"
        found = kills([sys.executable, "-c", job], result=lambda out: (out / "n").exists())
        print(found)
        ```

        ```text
        operation 2: it ended with 1: ValueError: invalid literal for int() with base 10: ''
        1 of 2 kills had a wrong end
        ```
    """
    if not any(OUT in part for part in command):
        raise AuditError(message=f"write {OUT} where the command names the folder that it writes to")
    with tempfile.TemporaryDirectory(prefix="safe-ckpt-kills-") as made:
        top = Path(folder or made).absolute()
        storage = FaultyStorage(Path(made, "kit"))  # LD_PRELOAD takes no path with blanks
        runner = _Runner(command=command, top=top, storage=storage, timeout_s=timeout_s)
        ends = []
        for name in ("whole-1", "whole-2"):
            runner.storage.watch(runner.out(name))
            began = time.monotonic()
            if problem := runner.run(name):
                raise AuditError(message=f"without a kill {problem}")
            took_s = time.monotonic() - began
            ends.append(result(runner.out(name)))
        operations = runner.storage.count
        if ends[0] != ends[1]:
            raise AuditError(message=f"two runs that nothing stopped differ: {ends[0]!r} and {ends[1]!r}")
        if not operations:
            raise AuditError(message=f"the program changes nothing below {OUT}")
        problems, count = {}, 0
        chosen = runner.at_random(times, seed, took_s) if times else runner.at_each(operations, every, torn=torn)
        for where, name in chosen:
            count += 1
            problem = runner.run(name)
            if not problem and (end := result(runner.out(name))) != ends[0]:
                problem = f"it ended with {end!r}, and not with {ends[0]!r}"
            if problem:
                problems[where] = problem
        return Kills(count=count, problems=problems)


@dataclass(frozen=True, kw_only=True)
class _Runner:
    """Starts the program, and ends it with all that it has started."""

    command: Sequence[str]
    top: Path
    storage: FaultyStorage
    timeout_s: float
    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))

    def out(self, name: str) -> Path:
        return self.top / name

    def at_each(self, operations: int, every: int, *, torn: bool) -> Iterator[tuple[str, str]]:
        """Kill it at these. Yields where, and the name of the run, when it was killed."""
        for at in range(1, operations + 1, every):
            name = f"at-{at}"
            (self.storage.tear if torn else self.storage.kill_job)(at, self.out(name))
            self.run(name)
            was_killed = self.storage.count >= at
            self.storage.off()
            if was_killed:  # the number of its operations may vary
                yield f"operation {at}", name

    def at_random(self, times: int, seed: int | None, took_s: float) -> Iterator[tuple[str, str]]:
        """Kill it so often. Yields when, and the name of the run."""
        self.storage.off()
        chance = random.Random(seed)  # noqa: S311 - moments, no secrets
        for number in range(times):
            after_s = chance.uniform(0.0, took_s)
            self.run(f"random-{number}", kill_after_s=after_s)
            yield f"after {after_s:.3f} s", f"random-{number}"

    def run(self, name: str, *, kill_after_s: float | None = None) -> str:
        """Run it to its end, or to its kill. Returns how it failed; empty if it did not."""
        out, marker = self.out(name), uuid.uuid4().hex
        out.mkdir(parents=True, exist_ok=True)
        log = self.top / f"{name}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [part.replace(OUT, str(out)) for part in self.command],
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                env={**self.environment, **self.storage.environment, MARKER: marker},
            )  # fmt: skip
            try:
                process.wait(self.timeout_s if kill_after_s is None else kill_after_s)
            except subprocess.TimeoutExpired:
                return f"it did not end in {self.timeout_s:.0f} s" if kill_after_s is None else "it was killed"
            finally:
                kill_started(process, marker)
        last = log.read_text(encoding="utf-8", errors="replace").strip().rpartition("\n")[2]
        return f"it ended with {process.returncode}: {last}" if process.returncode else ""
