"""How fast bytes go to this disk and come back unchanged."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import time
from dataclasses import dataclass
from pathlib import Path

import xxhash

from safe_ckpt.core.storage import durable
from safe_ckpt.core.storage.direct_io import create_file
from safe_ckpt.doctor.finding import Finding, fail, ok, skipped, warn
from safe_ckpt.doctor.runner import Examined
from safe_ckpt.text import bytes_text, duration

_BLOCK_BYTES = 8 << 20
_PASS_S = 10.0
_FLUSH_BYTES = 32 << 20  # so that the last fsync is short, also where the disk is slow
_SLOW_BYTES_PER_S = 50e6


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One pass over a file.

    Attributes:
        moved_bytes: how far it came.
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


def speed(examined: Examined) -> list[Finding]:
    """Write a file directly and through the page cache, each with its fsync, and read it back from the disk."""
    free, wanted = durable.free_bytes(examined.existing), examined.options.probe_bytes
    wanted = (wanted if free is None else min(wanted, free // 10)) // _BLOCK_BYTES * _BLOCK_BYTES
    if wanted <= 0:
        return [skipped("speed", "not measured: --mebibytes 0, or too little space")]
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


def judge_speed(passes: dict[str, Pass], size: int | None) -> Finding:
    """What these passes mean for a save of ``size`` bytes."""
    words = {"direct": "written past the page cache", "cached": "through it", "read": "read back"}
    parts = [f"{passes[key].rate / 1e9:.2f} GB/s {text}" for key, text in words.items() if key in passes]
    moved = max(done.moved_bytes for done in passes.values())
    text = f"{', '.join(parts)} ({bytes_text(moved)}, fsync included)"
    fastest = max(done.rate for key, done in passes.items() if key != "read")
    figures = {f"{key}_bytes_per_s": round(done.rate) for key, done in passes.items()}
    if size:
        text += f"; a save of {bytes_text(size)} takes {duration(size / fastest)} in the background"
    if fastest < _SLOW_BYTES_PER_S:
        advice = (
            "save less often, or to a faster disk: training goes on meanwhile, but the next save waits for the last"
        )
        return warn("speed", text, advice, **figures)
    return ok("speed", text, **figures)


def _may_go_on(examined: Examined, begun: float) -> bool:
    limit_s = min(_PASS_S, examined.options.timeout_s / 6)
    return time.monotonic() - begun < limit_s and not examined.stop.is_set()


def _write(examined: Examined, path: Path, block: mmap.mmap, wanted: int, *, direct: bool) -> Pass | None:
    """None where this file system cannot write directly."""
    fd, is_direct = create_file(str(path), direct)
    hasher, moved, begun, hashing_s = xxhash.xxh3_128(), 0, time.monotonic(), 0.0
    try:
        if direct and not is_direct:
            return None
        while moved < wanted and _may_go_on(examined, begun):
            block[:8] = moved.to_bytes(8, "little")  # so that no two blocks are alike
            try:
                written = os.write(fd, block)
            except OSError as error:
                if direct and not moved and error.errno == errno.EINVAL:
                    return None
                raise
            since = time.monotonic()
            hasher.update(memoryview(block)[:written])
            hashing_s += time.monotonic() - since
            moved += written
            if not direct and moved % _FLUSH_BYTES == 0:
                os.fdatasync(fd)
        os.fsync(fd)
        return Pass(moved_bytes=moved, seconds=time.monotonic() - begun - hashing_s, digest=hasher.hexdigest())
    finally:
        os.close(fd)


def _read(examined: Examined, path: Path, length: int) -> Pass:
    fd = _open_past_cache(path)
    buffer = mmap.mmap(-1, _BLOCK_BYTES)
    hasher, moved, begun, hashing_s = xxhash.xxh3_128(), 0, time.monotonic(), 0.0
    try:
        with memoryview(buffer) as view:
            while moved < length and _may_go_on(examined, begun):
                count = _read_block(fd, buffer)
                if not count:
                    break
                since = time.monotonic()
                hasher.update(view[:count])
                hashing_s += time.monotonic() - since
                moved += count
    finally:
        os.close(fd)
    return Pass(moved_bytes=moved, seconds=time.monotonic() - begun - hashing_s, digest=hasher.hexdigest())


def _read_block(fd: int, buffer: mmap.mmap) -> int:
    try:
        return os.readv(fd, [buffer])
    except OSError as error:
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        if error.errno != errno.EINVAL or not flags & os.O_DIRECT:
            raise
        fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)  # taken at the open, refused here
        return os.readv(fd, [buffer])


def _open_past_cache(path: Path) -> int:
    with contextlib.suppress(OSError):
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    return fd
