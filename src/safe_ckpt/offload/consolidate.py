"""Offloaded tensors of all ranks, consolidated: folders of files here and there become one directory, complete or absent.

DeepSpeed keeps optimizer states on NVMe, each rank in a folder of its own. Copying those into a checkpoint that is there
already is where ranks collide and half a copy passes for a whole one. Here every rank copies its part into a fresh pending
directory, and rank 0 gives the whole its name once every byte of every rank is durable.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from safe_ckpt.config import CheckpointConfig, Timeouts
from safe_ckpt.core.coordination.agreed_config import config_of_all
from safe_ckpt.core.coordination.process_groups import ProcessGroup
from safe_ckpt.core.formats.manifest import MANIFEST_NAME, CheckpointInfo
from safe_ckpt.core.home.home import HIDDEN
from safe_ckpt.core.saving.engine import Engine
from safe_ckpt.core.saving.names import NamedHomes, refuse
from safe_ckpt.core.saving.request import Destination, Facts, OnCommit, SaveRequest, Snapshot
from safe_ckpt.core.storage.copier import FileCopy
from safe_ckpt.core.storage.objects.options import refuse_url
from safe_ckpt.core.storage.objects.place import absolute
from safe_ckpt.core.storage.presence import Stamp
from safe_ckpt.errors import ConfigError, SourceChangedError, StateError, naming
from safe_ckpt.extensions.assemble import assemble
from safe_ckpt.machine import machine_id

ADAPTER = "offloaded"
_RACY_NS = 20_000_000  # twice the longest tick of a kernel's clock
_REST_S = 5.0


def consolidate_offloaded(
    sources: Mapping[str, str | os.PathLike[str]],
    destination: str | os.PathLike[str],
    *,
    group: ProcessGroup | None = None,
    ignore: Sequence[str] = (),
    timeout_s: float = 3600.0,
) -> CheckpointInfo:
    """Copy the folders of all ranks into one directory that appears when all of it is durable. Every rank calls this.

    The directory is replaced as a whole if an earlier call made it. What one rank could not do, every rank raises. A call
    that fails, or is killed, leaves what was there before.

    Args:
        sources: name of a sub-folder of ``destination`` -> folder that this rank reads; on a disk of its own or a shared
            one. May be empty. Nothing may write to the folders meanwhile. Where two ranks give one name for one and the same
            folder, it is copied once; where they give one name for different folders, such as node-local ones, the second is
            stored as ``<name>.rank<its number>``, and ``restore_offloaded`` gives each rank its own.
        destination: the directory, on a file system that all ranks share.
        group: the ranks; None means WORLD, or this process alone without a process group.
        ignore: glob patterns; files whose name, or path within the folder, matches are left out.
        timeout_s: the most that copying may take. Meeting the other ranks may take as much, at most 300 s, a few times over.

    Returns:
        What is there now.

    Raises:
        ConfigError: a name or pattern is not allowed, or one name, or a source and the destination, lie within each other.
        StateError: a folder holds what cannot be copied, such as a link to a directory.
        SourceChangedError: a file changed meanwhile; names it.
        NotEnoughSpaceError: the file system cannot take it; nothing was copied.
        DirectoryError: something that this did not write stands at ``destination``, or a folder cannot be read.
        DirectoryInUseError: another job consolidates into it.
        SafeCheckpointError: whatever else went wrong, on every rank.

    Example:
        ```python
        info = consolidate_offloaded({"optimizer": "nvme"}, "runs/offloaded", ignore=("*.tmp",))
        print(info.name)
        ```

        ```text
        offloaded
        ```
    """
    path = absolute(destination)
    barrier_s = min(timeout_s, Timeouts().barrier_s)
    usual = config_of_all(None, group, barrier_s=barrier_s)
    config = CheckpointConfig(
        timeouts=Timeouts(lengthy_s=timeout_s, barrier_s=barrier_s),
        record_events=False,
        mirror=usual.mirror,
        storage=usual.storage,
    )
    engine = Engine(config, group=group, extensions=assemble(config))
    try:
        must_match = {"destination": path}
        asked = functools.partial(refuse_url, destination, "destination")  # here, where all ranks learn of it
        engine.agree(
            "consolidate", must_match=must_match, local=asked, decide=lambda _: refuse(path, ADAPTER, empty=True)
        )
        home = NamedHomes(engine).hold(path)
        plan = agree_parts(engine, sources, ignore, destination=path)
        request = SaveRequest(
            destination=Destination(home=home, path=path, kind="directory"),
            payload=Snapshot(copies=plan.copies, folders=plan.folders),
            facts=Facts(step=0, notes={"adapter": ADAPTER, "parts": plan.notes}, unexamined=("*",)),
            on_commit=OnCommit(keep_foreign=lambda _: True),
        )
        info = engine.save(request).result()
        engine.release(home)
    except BaseException:
        engine.close(quiet=True, within_s=config.timeouts.shutdown_s)
        raise
    engine.close()
    return info


@dataclass(frozen=True, kw_only=True)
class OffloadPlan:
    """The plan that the ranks agreed on.

    Attributes:
        copies: what this rank copies.
        folders: every directory below the destination, parents first.
        notes: for the manifest: which part is whose, as ``own_part`` reads it.
    """

    copies: Sequence[FileCopy]
    folders: Sequence[str]
    notes: Sequence[Mapping[str, Any]]


def agree_parts(
    engine: Engine,
    sources: Mapping[str, str | os.PathLike[str]],
    ignore: Sequence[str] = (),
    prefix: str = "",
    destination: Path | None = None,
) -> OffloadPlan:
    """Look at this rank's folders and agree with the others on who copies what to where. Every rank calls this.

    Args:
        engine: where the ranks meet.
        sources: see ``consolidate_offloaded``.
        ignore: the same.
        prefix: of every path, with a slash at its end.
        destination: must not lie in a source, nor a source in it; None when that cannot be.

    Raises:
        SafeCheckpointError: see ``consolidate_offloaded``; the same on every rank.
    """
    scans: dict[str, _Scan] = {}

    def look() -> dict[str, Any]:
        if isinstance(ignore, str):
            message = f"expected several patterns, got the text {ignore!r}: put it in a list"
            raise ConfigError(key="ignore", message=message)
        with naming(rank=engine.rank, phase="looking at the folders"):
            for name, folder in sources.items():
                _refuse_nested(folder, destination)
                rest_s = min(_REST_S, engine.config.timeouts.barrier_s / 3)
                scans[_checked_name(name)] = _scan(Path(os.path.abspath(folder)), ignore, rest_s)
        return {name: {"folder": scan.identity, "folders": scan.folders} for name, scan in scans.items()}

    agreed = engine.agree("offloaded parts", must_match={"ignore": list(ignore)}, local=look, decide=_assign)
    copies: list[FileCopy] = []
    for part in agreed["parts"]:
        if part["writer"] == engine.rank:
            scan = scans[part["asked"]]
            copies += [dataclasses.replace(copy, path=f"{prefix}{part['name']}/{copy.path}") for copy in scan.copies]
    folders: set[str] = set()
    for pure in (PurePosixPath(f"{prefix}{folder}") for folder in agreed["folders"]):
        folders.update(str(one) for one in (*list(pure.parents)[:-1], pure))
    return OffloadPlan(copies=copies, folders=sorted(folders), notes=agreed["parts"])


def own_part(notes: Sequence[Mapping[str, Any]], name: str, rank: int) -> str | None:
    """The sub-folder that holds what ``rank`` gave under ``name``; None when it gave nothing."""
    return next((str(part["name"]) for part in notes if part["asked"] == name and rank in part["ranks"]), None)


@dataclass(frozen=True, kw_only=True)
class _Scan:
    identity: str
    folders: list[str]
    copies: list[FileCopy]


def _checked_name(name: str) -> str:
    pure = PurePosixPath(name)
    odd = {".", "..", HIDDEN}  # not read: an argument
    if not name or pure.is_absolute() or str(pure) != name or odd & set(pure.parts):
        raise ConfigError(key=f"sources: {name!r}", message="expected the name of a folder within the destination")
    if pure.parts[0] == MANIFEST_NAME:
        raise ConfigError(key=f"sources: {name!r}", message="that is the name of the manifest")
    return name


def _refuse_nested(folder: str | os.PathLike[str], destination: Path | None) -> None:
    if destination is None:
        return
    source, target = Path(os.path.realpath(folder)), Path(os.path.realpath(destination))
    if source == target or source in target.parents or target in source.parents:
        message = f"{folder} and the destination {destination} lie within each other: give a destination elsewhere"
        raise ConfigError(key="sources", message=message)


def _scan(folder: Path, ignore: Sequence[str], rest_s: float) -> _Scan:
    """Everything in a folder, once nothing of it changed so lately that another change would not show."""
    deadline = time.monotonic() + rest_s
    while True:
        scan, newest_ns, newest = _look_at(folder, ignore)
        age_ns = time.time_ns() - newest_ns
        if age_ns >= _RACY_NS or age_ns < -_RACY_NS:  # by the clock of another host this cannot be decided
            return scan
        if time.monotonic() > deadline:
            cause = f"{newest}: it is written to all the time: nothing may write to it until the call returns"
            raise SourceChangedError(name=folder.name, cause=cause, source=newest)
        time.sleep((_RACY_NS - age_ns) / 1e9)


def _look_at(folder: Path, ignore: Sequence[str]) -> tuple[_Scan, int, str]:
    copies: list[FileCopy] = []
    folders: list[str] = []
    newest_ns, newest = 0, ""

    def fail(error: OSError) -> None:
        raise error

    for top, below, names in os.walk(folder, onerror=fail):
        below[:] = sorted(name for name in below if not name.startswith(HIDDEN))  # ours, of other calls
        for name in below:
            path = Path(top, name)
            if path.is_symlink():
                raise StateError(key=str(path), message="is a link to a directory: what it leads to is not copied")
            folders.append(path.relative_to(folder).as_posix())
        for name in sorted(names):
            path = Path(top, name)
            relative = path.relative_to(folder).as_posix()
            if any(fnmatch.fnmatchcase(name, p) or fnmatch.fnmatchcase(relative, p) for p in ignore):
                continue
            if not path.is_file():
                raise StateError(key=str(path), message="is not a file")
            stamp = Stamp.of(path.stat())
            newest_ns, newest = max((newest_ns, newest), (max(stamp.mtime_ns, stamp.ctime_ns), str(path)))
            copies.append(FileCopy(source=str(path), path=relative, stamp=stamp))
    # Equal where two ranks name one and the same folder: the path alone tells neither nodes nor containers apart.
    status = folder.stat()
    identity = f"{machine_id()} {status.st_dev} {status.st_ino} {os.path.realpath(folder)}"
    return _Scan(identity=identity, folders=folders, copies=copies), newest_ns, newest


def _assign(answers: Mapping[int, Any]) -> dict[str, Any]:
    """Rank 0's decision: one part for every folder that is given, under a name of its own."""
    parts: dict[tuple[str, str], dict[str, Any]] = {}
    wanted = {asked for answer in answers.values() for asked in answer}
    taken: set[str] = set()
    folders: set[str] = set()
    for rank in sorted(answers):
        for asked, given in answers[rank].items():
            part = parts.get((asked, given["folder"]))
            if part is None:
                name = asked
                while name in taken or (name in wanted and name != asked):
                    name = f"{name}.rank{rank:05d}"
                part = {"name": name, "asked": asked, "writer": rank, "ranks": []}
                parts[asked, given["folder"]] = part
                taken.add(name)
                folders |= {name, *(f"{name}/{below}" for below in given["folders"])}
            part["ranks"].append(rank)
    for name in taken:
        if nested := next((str(parent) for parent in PurePosixPath(name).parents if str(parent) in taken), None):
            raise ConfigError(key=f"sources: {name!r}", message=f"lies within {nested!r}: give names beside each other")
    return {"parts": list(parts.values()), "folders": sorted(folders)}
