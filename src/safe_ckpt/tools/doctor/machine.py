"""This host and process: memory for snapshots, the largest file it may write, and versions."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Mapping
from importlib import metadata

from safe_ckpt import machine as host_memory
from safe_ckpt.text import bytes_text
from safe_ckpt.tools.doctor.check import CheckResult, at_a_price, fail, not_made, ok, refused, warn_if
from safe_ckpt.versions import SUPPORTED, judge_release

PACKAGES = ("safe-ckpt", "torch", "lightning", "pytorch-lightning", "accelerate", "transformers", "deepspeed", "numpy")
_PROBE_BYTES = 16 << 20
_TIGHT_BYTES = 1 << 30


def memory(state_bytes: int | None) -> list[CheckResult]:
    """The memory that a snapshot may take on this host."""
    free = host_memory.available_bytes()
    if free is None:
        return [not_made("memory", "the kernel does not report how much is free")]
    return [judge_memory(free_bytes=free, limit_bytes=host_memory.memory_limit_bytes(), size=state_bytes)]


def judge_memory(*, free_bytes: int, limit_bytes: int | None, size: int | None) -> CheckResult:
    """Judge whether a snapshot of ``size`` bytes fits into what is free, below a control group's limit."""
    limit = f", limited to {bytes_text(limit_bytes)} by a control group" if limit_bytes is not None else ""
    text = f"{bytes_text(free_bytes)} can still be taken{limit}"
    figures = {"free_bytes": free_bytes, "limit_bytes": limit_bytes}
    if size is not None and size > free_bytes:
        remedy = "set max_host_bytes, give the job more memory, or spread the state over more hosts"
        return at_a_price(
            "memory", text, f"a snapshot of {bytes_text(size)} does not fit on this host: {remedy}", **figures
        )
    advice = "that is little: set max_host_bytes, or give the job more memory"
    return warn_if(size is None and free_bytes < _TIGHT_BYTES, "memory", text, advice, **figures)


def shared_memory(_: int | None) -> list[CheckResult]:
    """The anonymous memory that holds snapshots."""
    doing, advice = "memfd_create", "a sandbox forbids it: allow the system call memfd_create"
    try:
        with os.fdopen(os.memfd_create("safe_ckpt-doctor", os.MFD_CLOEXEC), "wb") as memory:
            doing, advice = f"{bytes_text(_PROBE_BYTES)} were asked for", "give the job more memory: it holds snapshots"
            os.posix_fallocate(memory.fileno(), 0, _PROBE_BYTES)
    except OSError as error:
        return [at_a_price("shared memory", refused("shared memory", error, doing).measured, advice)]
    return [ok("shared memory", f"{bytes_text(_PROBE_BYTES)} can be taken")]


def file_size(state_bytes: int | None) -> list[CheckResult]:
    """The largest file that this process, and the writer that it starts, may write."""
    return [judge_file_size(host_memory.largest_file_bytes(), state_bytes)]


def judge_file_size(limit_bytes: int | None, size: int | None) -> CheckResult:
    """Judge whether a file of ``size`` bytes, where that is known, may be written; None for no limit."""
    if limit_bytes is None:
        return ok("file size", "unlimited")
    make = fail if size is not None and limit_bytes < size else at_a_price
    advice = "a save fails when one of its files grows beyond it: ulimit -f unlimited"
    return make("file size", f"at most {bytes_text(limit_bytes)}", advice, soft=limit_bytes)


def versions(_: int | None) -> list[CheckResult]:
    """The installed releases; read without importing them."""
    installed = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            installed[package] = metadata.version(package)
    return judge_versions(installed)


def judge_versions(installed: Mapping[str, str]) -> list[CheckResult]:
    """Judge whether these releases work together: one finding for each that does not, and one for all.

    Args:
        installed: package to version, Python among them.
    """
    text = ", ".join(f"{name} {version}" for name, version in installed.items())
    if "torch" not in installed:
        return [fail("versions", text, "torch is missing: pip install torch", **installed)]
    odd = []
    for name, version in installed.items():
        if (supported := SUPPORTED.get(name)) is None:
            continue
        verdict = judge_release(version, supported)
        if verdict == "too old":
            advice = f"use {name} {supported.lowest} or later; before that, {supported.because}"
            odd.append(fail("versions", f"{name} {version} is too old", advice))
        elif verdict == "newer series":
            advice = f"{supported.newest} is the newest release that was tested: try a save and a resume first"
            odd.append(at_a_price("versions", f"{name} {version} is of a newer series", advice))
    return [*odd, ok("versions", text, **installed)]
