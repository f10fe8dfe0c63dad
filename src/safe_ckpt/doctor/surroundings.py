"""What surrounds the job: versions, the resolver, the scheduler."""

from __future__ import annotations

import contextlib
import os
import platform
import socket
import threading
import time
from collections.abc import Callable, Mapping
from importlib import metadata

from safe_ckpt.doctor.examined import Examined
from safe_ckpt.doctor.finding import Finding, fail, ok, time_text, warn
from safe_ckpt.versions import SUPPORTED, judge, numbers

PACKAGES = ("safe-ckpt", "torch", "lightning", "pytorch-lightning", "accelerate", "transformers", "deepspeed", "numpy")
_RESOLVER_S = 5.0
_SLOW_LOOKUP_S = 0.5
_SIGNALS = "save_on_signals in the settings saves before the end, within signal_grace_s"


def versions_here() -> dict[str, str]:
    """Python and the packages that matter; read without importing them."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def versions(_: Examined) -> list[Finding]:
    """What is installed."""
    return judge_versions(versions_here())


def judge_versions(found: Mapping[str, str]) -> list[Finding]:
    """Whether these releases are such as work together: one finding for each that is not, or one for all.

    Args:
        found: package to version, Python among them.
    """
    text = ", ".join(f"{name} {version}" for name, version in found.items())
    if "torch" not in found:
        return [fail("versions", text, "torch is missing: pip install torch", **found)]
    odd = []
    for name, version in found.items():
        supported = SUPPORTED.get(name)
        verdict = judge(version, supported) if supported is not None and numbers(version) else "allowed"
        if supported is not None and verdict == "too old":
            advice = f"use {name} {supported.lowest} or later; before that, {supported.because}"
            odd.append(fail("versions", f"{name} {version} is too old", advice))
        elif supported is not None and verdict == "newer series":
            advice = f"{supported.newest} is the newest that this release was run with: try a save and a resume first"
            odd.append(warn("versions", f"{name} {version} is of a newer series", advice))
    return [*odd, ok("versions", text, **found)]


def resolver(examined: Examined) -> list[Finding]:
    """How long the resolver takes for this host: torch asks it on every connection to a store."""
    host = socket.gethostname()
    # All at once: what one asks for in vain the others would wait for in turn.
    asked: dict[str, Callable[[], object]] = {
        "its full name": socket.getfqdn,
        f"the address of {host}": lambda: socket.gethostbyname(host),
        "the name of 127.0.0.1": lambda: socket.gethostbyaddr("127.0.0.1"),
    }
    limit_s = min(_RESOLVER_S, examined.options.timeout_s / 3)
    took = dict.fromkeys(asked, limit_s)

    def measure(what: str, ask: Callable[[], object]) -> None:
        begun = time.monotonic()
        with contextlib.suppress(OSError):  # only the time counts; one that fails quickly does no harm
            ask()
        took[what] = time.monotonic() - begun

    threads = [threading.Thread(target=measure, args=item, daemon=True) for item in asked.items()]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + limit_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return [judge_resolver(dict(took))]


def judge_resolver(took: Mapping[str, float]) -> Finding:
    """Whether looking up names is slow.

    Args:
        took: what was looked up, to seconds.
    """
    what, slowest = max(took.items(), key=lambda item: item[1])
    if slowest > _SLOW_LOOKUP_S:
        advice = (
            "torch looks addresses up on every connection to its stores, so every start takes that long several times: put "
            "this host's name and address into /etc/hosts, or start with RES_OPTIONS=timeout:1"
        )
        return warn("resolver", f"{time_text(slowest)} for {what}", advice, slowest_s=slowest)
    return ok("resolver", f"at most {time_text(slowest)}", slowest_s=slowest)


def scheduler(_: Examined) -> list[Finding]:
    """Who may end this job, and with how much warning."""
    return [judge_scheduler(os.environ, time.time())]


def judge_scheduler(environment: Mapping[str, str], now: float) -> Finding:
    """What a scheduler's variables say.

    Args:
        environment: of this process.
        now: seconds since 1970.
    """
    job = environment.get("SLURM_JOB_ID")
    if job:
        end = environment.get("SLURM_JOB_END_TIME", "")
        left = f", ends in {time_text(max(0.0, float(end) - now))}" if end.isdigit() else ""
        text = f"SLURM job {job} on {environment.get('SLURM_JOB_NUM_NODES', '1')} nodes{left}"
        return ok("scheduler", text, f"submit it with sbatch --signal=TERM@120; {_SIGNALS}", job=job)
    if "KUBERNETES_SERVICE_HOST" in environment:
        return ok("scheduler", "Kubernetes", f"set terminationGracePeriodSeconds to at least 90; {_SIGNALS}")
    return ok("scheduler", "none that is known")
