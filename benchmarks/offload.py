"""Consolidating files against ``cp -r --reflink=never`` and an fsync of all that it made: the same files in the same run.

Three ways take turns in every round: ``cp`` with fsync, ``copy_files`` alone (what the writer process does with one rank's
files; the directories are synced here), and the whole call of ``consolidate_offloaded``, single process, its writer process,
hashes, manifest and rename included. The sources are in the page cache (warm), or have been dropped from it (cold).

    python benchmarks/offload.py --rounds 5
"""

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import machine
from disk import evict, sync_tree

from safe_ckpt import WriterConfig, consolidate_offloaded
from safe_ckpt.core.formats.manifest import read_manifest
from safe_ckpt.core.formats.verify import verify_files
from safe_ckpt.core.storage.copier import FileCopy, copy_files
from safe_ckpt.core.storage.direct_io import WriteOptions
from safe_ckpt.core.storage.presence import Stamp

MIB = 1 << 20
SHAPES = {"8 x 128 MiB": (8, 128 * MIB), "1 x 1 GiB": (1, 1024 * MIB), "256 x 2 MiB": (256, 2 * MIB)}
CP, COPY, CALL = "cp and fsync", "copy_files", "consolidate_offloaded"
TARGET = 0.9


class Unwatched:
    """Takes what is told of the progress."""

    def moved(self, count: int) -> None:
        pass

    def entered(self, phase: str) -> None:
        pass

    def waiting(self) -> None:
        pass


def make_files(folder: Path, count: int, size: int) -> None:
    """Random bytes, which no storage can shrink."""
    folder.mkdir(parents=True)
    for number in range(count):
        with (folder / f"{number:04}.tensor").open("wb") as stream:
            for _ in range(size // MIB):
                stream.write(os.urandom(MIB))
    sync_tree(folder)


def warm(files: list[Path]) -> None:
    """Read everything, so that it is in the page cache."""
    memory = bytearray(8 * MIB)
    for file in files:
        with file.open("rb", buffering=0) as stream:
            while stream.readinto(memory):
                pass


def cp(source: Path, target: Path) -> None:
    subprocess.run(["cp", "-r", "--reflink=never", str(source), str(target)], check=True)
    sync_tree(target)


def copy(source: Path, target: Path) -> None:
    target.mkdir()
    settings = WriterConfig()
    options = WriteOptions(
        direct=settings.direct_io == "auto",
        chunk_bytes=settings.chunk_bytes,
        flush_every_bytes=settings.flush_every_bytes,
    )
    copies = [
        FileCopy(source=str(file), path=str(target / file.name), stamp=Stamp.of(file.stat()))
        for file in sorted(source.iterdir())
    ]
    copy_files(copies, options, Unwatched())
    sync_tree_of_directories(target)


def sync_tree_of_directories(folder: Path) -> None:
    for directory in (folder, folder.parent):
        fd = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def call(source: Path, target: Path) -> None:
    consolidate_offloaded({"part": source}, target)


WAYS: dict[str, Callable[[Path, Path], None]] = {CP: cp, COPY: copy, CALL: call}


def measure(folder: Path, rounds: int, count: int, size: int, *, cached: bool) -> dict[str, list[float]]:
    """Seconds of every way in every round, in shuffled order."""
    source, target = folder / "source", folder / "target"
    files = sorted(source.iterdir())
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way in random.sample(list(WAYS), len(WAYS)):
            if cached:
                warm(files)
            else:
                evict(files)
            os.sync()  # what others left is not to be written in this one's time
            begun = time.perf_counter()
            WAYS[way](source, target)
            found[way].append(time.perf_counter() - begun)
            if way == CALL:
                verify_files(target, read_manifest(target))
            written = sum(path.stat().st_size for path in target.rglob("*.tensor"))
            if written != count * size:
                raise SystemExit(f"{way}: {written} bytes instead of {count * size}")
            shutil.rmtree(target)
            shutil.rmtree(folder / ".safe_ckpt", ignore_errors=True)
    return found


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=SHAPES, action="append")
    parser.add_argument("--folder", type=Path, default=Path("runs/bench"))
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=options.folder.resolve()))
    results: dict[str, Any] = {"machine": machine.facts(folder), "rounds": options.rounds, "seconds": {}}
    say(f"{'':28} {'median s':>9} {'MiB/s':>7} {'lowest':>8} {'highest':>8} {'speed / cp':>11}")
    try:
        for shape in options.only or SHAPES:
            count, size = SHAPES[shape]
            make_files(folder / "source", count, size)
            for cached in (True, False):
                title = f"{shape}, {'warm' if cached else 'cold'}"
                found = measure(folder, options.rounds, count, size, cached=cached)
                medians = {way: statistics.median(seconds) for way, seconds in found.items()}
                ratios = {way: medians[CP] / median for way, median in medians.items()}
                results["seconds"][title] = {"all": found, "median": medians, "speed_against_cp": ratios}
                say(title)
                for way, seconds in found.items():
                    rate = count * size / MIB / medians[way]
                    spread = f"{min(seconds):8.3f} {max(seconds):8.3f}"
                    below = "" if ratios[way] >= TARGET else f"  below {TARGET}"
                    say(f"    {way:24} {medians[way]:9.3f} {rate:7.0f} {spread} {ratios[way]:11.2f}{below}")
            shutil.rmtree(folder / "source")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
