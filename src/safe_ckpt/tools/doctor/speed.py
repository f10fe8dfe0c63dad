"""Measures how fast bytes go to this disk and come back unchanged."""

from __future__ import annotations

import errno
import mmap
import os
import time
from dataclasses import dataclass
from pathlib import Path

import xxhash

from safe_ckpt.core.storage import durable
from safe_ckpt.core.storage.direct_io import create_file
from safe_ckpt.text import bytes_text, duration
from safe_ckpt.tools.doctor.check import CheckResult, Examined, fail, not_made, warn_if

_BLOCK_BYTES = 8 << 20
_PASS_S = 10.0
_FLUSH_BYTES = 32 << 20  # so that the last fsync is short, also where the disk is slow
_SLOW_BYTES_PER_S = 50e6


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One pass over a file.

    Attributes:
        moved_bytes: how many bytes it moved.
        seconds: how long it took, fsync included.
        digest: of what was moved, xxh3-128; "" where none was made.
    """

    moved_bytes: int
    seconds: float
    digest: str = ""

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return self.moved_bytes / max(self.seconds, 1e-9)


def speed(examined: Examined) -> list[CheckResult]:
    """Write a file directly and through the page cache, each with its fsync, and read it back from the disk."""
    free, wanted = durable.free_bytes(examined.existing), examined.options.probe_bytes
    wanted = (wanted if free is None else min(wanted, free // 10)) // _BLOCK_BYTES * _BLOCK_BYTES
    if wanted <= 0:
        return [not_made("speed", "not measured: --mebibytes 0, or too little space")]
    block = mmap.mmap(-1, _BLOCK_BYTES)  # page-aligned, as direct writes must be
    block.write(os.urandom(_BLOCK_BYTES))
    passes: dict[str, Pass] = {}
    folder = examined.folder("speed")
    for how in ("direct", "cached"):
        path = folder / how
        done = _write(examined, path, block, wanted, direct=how == "direct")
        if done is not None:
            passes[how] = done
            back = _read(examined, path, done.moved_bytes)
            if back.digest != done.digest and back.moved_bytes == done.moved_bytes:
                advice = "the disk changes bytes: do not keep checkpoints there, and look at dmesg"
                return [fail("speed", "what was read back is not what was written", advice)]
            passes["read"] = back
        path.unlink()
    return [judge_speed(passes, examined.state_bytes)]


def judge_speed(passes: dict[str, Pass], size: int | None) -> CheckResult:
    """Judge from these passes how long a save of ``size`` bytes takes."""
    words = {"direct": "written past the page cache", "cached": "written through it", "read": "read back"}
    parts = [f"{passes[key].rate / 1e9:.2f} GB/s {text}" for key, text in words.items() if key in passes]
    moved = max(done.moved_bytes for done in passes.values())
    text = f"{', '.join(parts)} ({bytes_text(moved)}, fsync included)"
    fastest = max(done.rate for key, done in passes.items() if key != "read")
    figures = {f"{key}_bytes_per_s": round(done.rate) for key, done in passes.items()}
    if size:
        text += f"; a save of {bytes_text(size)} takes {duration(size / fastest)} in the background"
    advice = "save less often, or to a faster disk: training continues, but a save waits for the one before it"
    return warn_if(fastest < _SLOW_BYTES_PER_S, "speed", text, advice, **figures)


class _Meter:
    """Times a pass and hashes what it moves; the time of hashing does not count."""

    def __init__(self, examined: Examined) -> None:
        self._hasher, self.moved, self._hashing_s = xxhash.xxh3_128(), 0, 0.0
        self._stop, self._begun = examined.stop, time.monotonic()
        self._limit_s = min(_PASS_S, examined.options.timeout_s / 6)

    def goes_on(self, wanted: int) -> bool:
        return self.moved < wanted and time.monotonic() - self._begun < self._limit_s and not self._stop.is_set()

    def take(self, buffer: mmap.mmap, count: int) -> None:
        since = time.monotonic()
        with memoryview(buffer) as view:
            self._hasher.update(view[:count])
        self._hashing_s += time.monotonic() - since
        self.moved += count

    def result(self) -> Pass:
        seconds = time.monotonic() - self._begun - self._hashing_s
        return Pass(moved_bytes=self.moved, seconds=seconds, digest=self._hasher.hexdigest())


def _write(examined: Examined, path: Path, block: mmap.mmap, wanted: int, *, direct: bool) -> Pass | None:
    """Write one pass; None where this file system cannot write directly."""
    fd, is_direct = create_file(str(path), direct)
    meter = _Meter(examined)
    try:
        if direct and not is_direct:
            return None
        while meter.goes_on(wanted):
            block[:8] = meter.moved.to_bytes(8, "little")  # so that no two blocks are alike
            try:
                written = os.write(fd, block)
            except OSError as error:
                if direct and not meter.moved and error.errno == errno.EINVAL:
                    return None
                raise
            meter.take(block, written)
            if not direct and meter.moved % _FLUSH_BYTES == 0:
                os.fdatasync(fd)
        os.fsync(fd)
        return meter.result()
    finally:
        os.close(fd)


def _read(examined: Examined, path: Path, length: int) -> Pass:
    meter, buffer = _Meter(examined), mmap.mmap(-1, _BLOCK_BYTES)
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # it was fsynced: all its pages can be dropped
        while meter.goes_on(length) and (count := file.readinto(buffer)):
            meter.take(buffer, count)
    return meter.result()
