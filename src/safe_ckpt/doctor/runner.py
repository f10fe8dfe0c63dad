"""Running checks so that none can hang the caller: each on a daemon thread, under a deadline.

A file system whose server is gone lets a system call block for ever, and nothing in the process can end that call. So the
call is left behind, is told of, and what would touch the same disk is not tried any more.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from safe_ckpt.doctor.finding import Finding, fail, refused, skipped

if TYPE_CHECKING:
    from safe_ckpt.doctor.examined import Examined

logger = logging.getLogger(__name__)
_T = TypeVar("_T")
_LEAVE_S = 5.0


class StuckError(OSError):
    """A call did not end in time."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One entry of the list of checks.

    Attributes:
        name: what its finding is called where it cannot give one itself.
        run: does it; an ``OSError`` that it raises becomes a finding.
        needs_scratch: it writes; not run where nothing can be written.
        touches_disk: not run any more when the disk has stopped answering.
    """

    name: str
    run: Callable[[Examined], list[Finding]]
    needs_scratch: bool = False
    touches_disk: bool = True


def bounded(action: Callable[[], _T], limit_s: float) -> _T:
    """Run ``action`` on a thread of its own and wait for it, at most ``limit_s``.

    Raises:
        StuckError: it did not end in time; it goes on by itself.
        BaseException: what ``action`` raised.
    """
    outcome: queue.SimpleQueue[tuple[bool, _T | BaseException]] = queue.SimpleQueue()

    def run() -> None:
        try:
            outcome.put((True, action()))
        except BaseException as error:  # it belongs to the caller that waits
            outcome.put((False, error))

    threading.Thread(target=run, name="safe_ckpt-doctor", daemon=True).start()
    try:
        good, value = outcome.get(timeout=limit_s)
    except queue.Empty:
        raise StuckError(f"no answer within {limit_s:g} s") from None
    if not good and isinstance(value, BaseException):
        raise value
    return value  # type: ignore[return-value]


def run_checks(examined: Examined, checks: Sequence[Check]) -> list[Finding]:
    """Run the checks in their order and collect what they find. Called on the main thread.

    Args:
        examined: what is looked at.
        checks: what to do.

    Raises:
        BaseException: a check raised something other than ``OSError``, or Ctrl-C came; the check that was under way was
            told to end, and was given a few seconds for that.
    """
    findings: list[Finding] = []
    stuck = False
    for check in checks:
        if check.touches_disk and stuck:
            findings.append(skipped(check.name, "not tried: the file system has stopped answering"))
        elif check.needs_scratch and examined.scratch is None:
            findings.append(skipped(check.name, "not tried: nothing can be written there"))
        else:
            begun = time.monotonic()
            try:
                findings += _run(examined, check)
            except StuckError as error:
                stuck = stuck or check.touches_disk
                advice = "the disk or its server does not answer: look at dmesg and at the mount, before any training"
                findings.append(fail(check.name, str(error), advice if check.touches_disk else "try again later"))
            except OSError as error:
                findings.append(refused(check.name, error))
            logger.debug("%s took %.3f s", check.name, time.monotonic() - begun)
    return findings


def _run(examined: Examined, check: Check) -> list[Finding]:
    done = threading.Event()

    def run() -> list[Finding]:
        try:
            return check.run(examined)
        finally:
            done.set()

    try:
        return bounded(run, examined.options.timeout_s)
    except StuckError:
        raise
    except OSError:
        raise
    except BaseException:
        # Ctrl-C: what is still writing must end before its folder is removed.
        examined.stop.set()
        done.wait(_LEAVE_S)
        raise
