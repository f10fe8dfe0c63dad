"""The releases of the frameworks that this package works with, and the check that every adapter makes when it is imported.

The table says what ``pyproject.toml`` allows and what was tested; a test compares it with that and ``docs/limits.md``.
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

from packaging.version import InvalidVersion, Version

from safe_ckpt.errors import UnsupportedVersionError

logger = logging.getLogger(__name__)

Verdict = Literal["unknown", "too old", "reduced", "allowed", "newer release", "newer series"]
_reported: set[str] = set()


@dataclass(frozen=True, kw_only=True)
class Supported:
    """The releases of one package.

    Attributes:
        lowest: the oldest that is supported; an older one is refused.
        newest: the newest that was tested. Releases in between are accepted; not all of them were tested.
        because: why older ones are not supported.
        reduced_below: with releases older than this one, something does not work; "" for none.
        reduced: what.
    """

    lowest: str
    newest: str
    because: str = "older releases were not run"
    reduced_below: str = ""
    reduced: str = ""


_LIGHTNING = Supported(lowest="2.5.3", newest="2.6.6", because="ModelCheckpoint has no save_on_exception")
SUPPORTED: Mapping[str, Supported] = {
    "python": Supported(lowest="3.10", newest="3.13", because="it is written for that one"),
    "torch": Supported(
        lowest="2.8",
        newest="2.15.0",
        because="the store of 2.7 cannot listen on a socket that it is given",
        reduced_below="2.9",
        reduced="with gloo a raised timeout has no effect there, so that lengthy_timeouts has none",
    ),
    "lightning": _LIGHTNING,
    "pytorch-lightning": _LIGHTNING,
    "accelerate": Supported(lowest="1.8", newest="1.15.0"),
    "transformers": Supported(lowest="4.50", newest="5.24.0"),
    "torchtitan": Supported(
        lowest="0.3.0",
        newest="0.3.0",
        because="they have no BaseCheckpointManager that a Config chooses",
    ),
    "deepspeed": Supported(lowest="0.17.5", newest="0.19.8"),
    "ray": Supported(lowest="2.60.0", newest="2.60.0"),
}


def refuse_old_releases(*packages: str) -> None:
    """Refuse releases that are too old for an adapter. Called when the adapter is imported, on every rank.

    A newer release than was tested is logged: as information, or once as a warning where its series is newer too.

    Args:
        packages: their names on the package index; Python and torch are checked besides.

    Raises:
        UnsupportedVersionError: an ``ImportError``: one is too old, or not installed.
    """
    _compare("python", ".".join(platform.python_version_tuple()[:2]))
    for package in ("torch", *packages):
        _compare(package, _installed(package))


def check_either(*packages: str) -> None:
    """As ``refuse_old_releases``, where one of ``packages`` is enough; every one that is installed must fit.

    Raises:
        UnsupportedVersionError: one of them is too old, or none is installed.
    """
    refuse_old_releases(*([package for package in packages if _installed(package) is not None] or packages[:1]))


def judge_release(installed: str, supported: Supported) -> Verdict:
    """The verdict on a release. Pure.

    A pre-release counts as its release. A series is what stands before the first dot, and for 0.x before the second.
    """
    here, newest = release(installed), Version(supported.newest)
    if here is None:
        return "unknown"
    if here < Version(supported.lowest):
        return "too old"
    if supported.reduced_below and here < Version(supported.reduced_below):
        return "reduced"
    if here <= newest:
        return "allowed"
    return "newer series" if _series(here) > _series(newest) else "newer release"


def release(installed: str) -> Version | None:
    """``"2.13.0rc1+cpu"`` is 2.13.0, and so is ``"2.13.0-cuda"``, which is no version by the rules; None for no version."""
    try:
        return Version(Version(installed).base_version)
    except InvalidVersion:
        begins = re.match(r"\d+(\.\d+)*", installed)
        return Version(begins.group()) if begins else None


def _series(version: Version) -> tuple[int, ...]:
    return version.release[:1] if version.major else version.release[:2]


def _compare(package: str, installed: str | None) -> None:
    supported = SUPPORTED[package]
    lowest, newest = supported.lowest, supported.newest
    if installed is None:
        raise UnsupportedVersionError(package=package, lowest=lowest, remedy=_remedy(package))
    verdict = judge_release(installed, supported)
    if verdict == "too old":
        because, remedy = supported.because, _remedy(package)
        raise UnsupportedVersionError(package=package, found=installed, lowest=lowest, because=because, remedy=remedy)
    if verdict == "unknown":
        logger.info("the release of %s is not known, %s to %s were tested", package, lowest, newest)
    elif verdict != "allowed" and package not in _reported:
        _reported.add(package)
        level = logging.INFO if verdict == "newer release" else logging.WARNING
        text = f"newer than what this release of safe_ckpt was tested with, {newest}"
        if verdict == "reduced":
            text = f"older than {supported.reduced_below}: {supported.reduced}"
        logger.log(level, "%s %s is %s", package, installed, text)


_WHOLE = {"ray": "ray[train]"}
"""A package -> with the extras of its own that are used."""


def _installed(package: str) -> str | None:
    """The release that is installed; "" for an importable package without metadata, None for none."""
    try:
        return version(package) or ""
    except PackageNotFoundError:
        return "" if find_spec(package.replace("-", "_")) is not None else None


def _remedy(package: str) -> str:
    supported = SUPPORTED[package]
    if package == "python":
        return f"use Python {supported.lowest} or later"
    what = [f'"{_WHOLE.get(package, package)}>={supported.lowest}"']
    if package == "transformers":  # its Trainer needs it
        what.append(f'"accelerate>={SUPPORTED["accelerate"].lowest}"')
    return f"pip install --upgrade {' '.join(what)}"
