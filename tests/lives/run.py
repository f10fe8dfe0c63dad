"""Runs lives made from seeds, and cuts one that went wrong down to the steps that it needs."""

from __future__ import annotations

import contextlib
import itertools
import logging
import random
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from kit.inside import upload_at_once
from kit.memory_store import MemoryStore
from lives.life import Life
from safe_ckpt.testing import inline_saves

Step = tuple[str, int]
"""What is done, and the seed of what it draws."""

_MEMORY = Path("/dev/shm")
_OFTEN = {
    "save": 12, "resume": 6, "resume_named": 3, "close": 4, "damage": 3, "load": 2, "remove": 2, "down": 2, "glitch": 3,
    "lose": 1, "elsewhere": 4, "rename": 1, "hold": 1, "release": 1, "export": 1, "publish": 1,
}  # fmt: skip
_LENGTH = 9


@dataclass(frozen=True)
class Failure:
    """What went wrong, and the steps that lead there."""

    seed: int
    steps: tuple[Step, ...]
    error: BaseException

    def __str__(self) -> str:
        return f"seed {self.seed}: {' '.join(f'{name}:{draws}' for name, draws in self.steps)}\n  {self.error!r}"


def steps_of(seed: int) -> tuple[Step, ...]:
    """The history of a seed."""
    draw = random.Random(seed)
    names = draw.choices(list(_OFTEN), weights=list(_OFTEN.values()), k=_LENGTH)
    return tuple((name, draw.randrange(1 << 30)) for name in ["save", *names, "resume", "close"])


def problem_of(steps: Sequence[Step]) -> Exception | None:
    """Live through these steps. What was wrong; None where all is as promised."""
    logger = logging.getLogger("safe_ckpt")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    folder = Path(tempfile.mkdtemp(prefix="life-", dir=_MEMORY if _MEMORY.is_dir() else None))
    try:
        with pytest.MonkeyPatch.context() as patch, inline_saves():
            upload_at_once(patch)
            life = Life(folder, MemoryStore(patch))
            try:
                for name, seed in steps:
                    getattr(life, name)(random.Random(seed))
                    life.check()
            finally:
                life.store.before = life.store.after = None
                for job in [*life.inner.values(), *([life.ckpt] if life.ckpt is not None else [])]:
                    with contextlib.suppress(Exception):
                        job.close()
    except Exception as error:
        return error
    finally:
        logger.setLevel(level)
        shutil.rmtree(folder, ignore_errors=True)
    return None


def failures(seeds: Sequence[int], most: int = 3) -> list[Failure]:
    """Those of these lives that went wrong, cut down; at most so many."""
    wrong = ((seed, steps) for seed in seeds if problem_of(steps := steps_of(seed)) is not None)
    return [cut_down(seed, steps) for seed, steps in itertools.islice(wrong, most)]


def cut_down(seed: int, steps: tuple[Step, ...]) -> Failure:
    """Leave out steps as long as it goes wrong in a way of the same kind."""
    error = problem_of(steps)
    while True:
        for at in range(len(steps)):
            fewer = steps[:at] + steps[at + 1 :]
            found = problem_of(fewer)
            if found is not None and type(found) is type(error):
                steps, error = fewer, found
                break
        else:
            return Failure(seed, steps, error)
