"""Which releases of the frameworks this package works with, and the check that every adapter makes when it is imported.

The table is what ``pyproject.toml`` allows and what was run; ``docs/compatibility.md`` says how, and a test compares all three.
Versions are read from the metadata of what is installed: nothing is imported for it.
"""

from __future__ import annotations

import logging
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Literal

from safe_ckpt.errors import UnsupportedVersionError

logger = logging.getLogger(__name__)

Verdict = Literal["too old", "reduced", "allowed", "newer release", "newer series"]
_told: set[str] = set()


@dataclass(frozen=True, kw_only=True)
class Supported:
    """The releases of one package.

    Attributes:
        lowest: the oldest that is supported; an older one is refused.
        newest: the newest that was run. All from ``lowest`` to it are allowed, not all of them were run.
        because: why no older one is.
        extra: the extra of ours that installs it; "" for what is always installed.
        reduced_below: with releases older than this one, something does not work; "" for none.
        reduced: what.
    """

    lowest: str
    newest: str
    because: str
    extra: str = ""
    reduced_below: str = ""
    reduced: str = ""


SUPPORTED: Mapping[str, Supported] = {
    "python": Supported(lowest="3.10", newest="3.13", because="it is written for that one"),
    "torch": Supported(
        lowest="2.6",
        newest="2.15.0",
        because="older releases were not run",
        reduced_below="2.9",
        reduced="with gloo a raised timeout has no effect there, so that lengthy_timeouts has none",
    ),
    "lightning": Supported(
        lowest="2.5.3", newest="2.6.6", because="ModelCheckpoint has no save_on_exception", extra="lightning"
    ),
    "pytorch-lightning": Supported(
        lowest="2.5.3", newest="2.6.6", because="ModelCheckpoint has no save_on_exception", extra="lightning"
    ),
    "accelerate": Supported(lowest="1.8", newest="1.15.0", because="older releases were not run", extra="accelerate"),
    "transformers": Supported(
        lowest="4.50", newest="5.23.0", because="older releases were not run", extra="transformers"
    ),
    "deepspeed": Supported(
        lowest="0.17.5",
        newest="0.19.8",
        because="older releases were not run",
        extra="deepspeed",
    ),
}


def check(*packages: str) -> None:
    """Refuse releases that are too old for an adapter. Called when the adapter is imported, on every rank.

    A newer release than was run is logged: as information, or once as a warning where its series is newer too.

    Args:
        packages: their names on the package index; Python and torch are checked besides.

    Raises:
        UnsupportedVersionError: an ``ImportError``: one is too old, or not installed.
    """
    _compare("python", ".".join(platform.python_version_tuple()[:2]))
    for package in ("torch", *packages):
        _compare(package, _found(package))


def check_either(*packages: str) -> None:
    """As ``check``, where one of ``packages`` is enough; every one that is installed must fit.

    Raises:
        UnsupportedVersionError: one of them is too old, or none is installed.
    """
    check(*([package for package in packages if _is_there(package)] or packages[:1]))


def judge(found: str, supported: Supported) -> Verdict:
    """What is to be thought of a release. Pure.

    A pre-release counts as its release. A series is what stands before the first dot, and for 0.x before the second.
    """
    here, newest = numbers(found), numbers(supported.newest)
    if here < numbers(supported.lowest):
        return "too old"
    if here < numbers(supported.reduced_below):
        return "reduced"
    if here <= newest:
        return "allowed"
    return "newer series" if _series(here) > _series(newest) else "newer release"


def numbers(found: str) -> tuple[int, ...]:
    """The release as numbers: ``"2.13.0+cpu"`` is ``(2, 13)``, for zeros at the end mean nothing; ``()`` for no version."""
    head = re.match(r"v?(?:\d+!)?(\d+(?:\.\d+)*)", found)
    parts = [int(part) for part in head.group(1).split(".")] if head else []
    while parts and parts[-1] == 0:
        parts.pop()
    return tuple(parts)


def _series(release: tuple[int, ...]) -> tuple[int, ...]:
    return release[:1] if release[:1] > (0,) else release[:2]


def _compare(package: str, found: str | None) -> None:
    supported = SUPPORTED[package]
    if found is None:
        raise UnsupportedVersionError(package=package, lowest=supported.lowest, remedy=_remedy(package))
    if not numbers(found):
        logger.info("the release of %s is not known, %s to %s were run", package, supported.lowest, supported.newest)
        return
    verdict = judge(found, supported)
    if verdict == "too old":
        raise UnsupportedVersionError(
            package=package, found=found, lowest=supported.lowest, because=supported.because, remedy=_remedy(package)
        )
    if verdict == "allowed" or package in _told:
        return
    _told.add(package)
    if verdict == "reduced":
        logger.warning("%s %s is older than %s: %s", package, found, supported.reduced_below, supported.reduced)
        return
    level = logging.WARNING if verdict == "newer series" else logging.INFO
    logger.log(
        level, "%s %s is newer than what this release of safe_ckpt was run with, %s", package, found, supported.newest
    )


def _found(package: str) -> str | None:
    """The release that is installed; "" for one that can be imported and says nothing of itself, None for none."""
    try:
        return version(package) or ""
    except PackageNotFoundError:
        return "" if find_spec(package.replace("-", "_")) is not None else None


def _is_there(package: str) -> bool:
    return _found(package) is not None


def _remedy(package: str) -> str:
    supported = SUPPORTED[package]
    if package == "python":
        return f"use Python {supported.lowest} or later"
    what = f'"safe-ckpt[{supported.extra}]"' if supported.extra else "safe-ckpt"
    return f'pip install --upgrade {what} "{package}>={supported.lowest}"'
