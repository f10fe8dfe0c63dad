"""Renaming, creating exclusively, links and names: on these the atomicity of a commit rests."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from safe_ckpt.core.storage import durable
from safe_ckpt.doctor.examined import Examined
from safe_ckpt.doctor.finding import Finding, fail, ok, refused, warn

_LONGEST = 255


def _folder(examined: Examined, name: str) -> Path:
    folder = examined.place() / name
    folder.mkdir()
    return folder


def renaming(examined: Examined) -> list[Finding]:
    """A rename replaces a file, moves a directory, and can exchange two."""
    folder = _folder(examined, "renamed")
    (folder / "new").write_text("new")
    (folder / "old").write_text("old")
    for name in ("a", "b"):
        (folder / name).mkdir()
    (folder / "a" / "of-a").touch()
    try:
        os.replace(folder / "new", folder / "old")
        os.rename(folder / "old", folder / "b" / "moved")
        os.rename(folder / "a", folder / "c")
        exchanged = durable.exchange(folder / "b", folder / "c")
    except OSError as error:
        return [refused("rename", error)]
    moved = folder / ("c" if exchanged else "b") / "moved"
    if (folder / "new").exists() or moved.read_text() != "new":
        return [fail("rename", "a renamed file is not what it was", "choose a directory on another file system")]
    if exchanged:
        text = "replaces a file in one step, moves directories, exchanges two names"
        return [ok("rename", text, exchange=True)]
    text = "replaces a file in one step and moves directories, but cannot exchange two names"
    advice = (
        "replacing a directory takes two renames here; what a crash leaves between them is repaired at the next start"
    )
    return [ok("rename", text, advice, exchange=False)]


def exclusive(examined: Examined) -> list[Finding]:
    """Of two that create one name, one is refused: the lock of a job rests on that."""
    path = examined.place() / "exclusive"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    os.close(os.open(path, flags))
    try:
        os.close(os.open(path, flags))
    except FileExistsError:
        return [ok("exclusive creation", "the second one is refused")]
    advice = "two jobs could hold one directory: choose a directory on another file system"
    return [fail("exclusive creation", "the second one is not refused", advice)]


def links(examined: Examined) -> list[Finding]:
    """Hard and symbolic links, which further names of a checkpoint are made of."""
    folder = _folder(examined, "links")
    (folder / "file").write_text("x")
    hard = _works(lambda: os.link(folder / "file", folder / "hard"))
    soft = _works(lambda: os.symlink("file", folder / "soft"))
    figures = {"hard": hard, "symbolic": soft}
    if hard and soft:
        return [ok("links", "hard and symbolic links work", **figures)]
    names = " and ".join(name for name, works in (("hard", hard), ("symbolic", soft)) if not works)
    advice = "a further name of a checkpoint, such as last.ckpt, is a copy here and takes its space again"
    if not soft:
        advice += '; do not use save_last="link"'
    return [warn("links", f"no {names} links", advice, **figures)]


def _works(action: Callable[[], object]) -> bool:
    try:
        action()
    except OSError:
        return False
    return True


def names(examined: Examined) -> list[Finding]:
    """Capitals and small letters, and the longest name."""
    folder = _folder(examined, "names")
    (folder / "case").touch()
    insensitive = (folder / "CASE").exists()
    longest = min(_LONGEST, os.pathconf(folder, "PC_NAME_MAX"))
    long_works = _works((folder / ("n" * longest)).touch)
    figures = {"case_sensitive": not insensitive, "longest_bytes": longest if long_works else None}
    if insensitive:
        advice = "names of checkpoints that differ in that alone are one: do not rely on it in file names or metrics"
        return [warn("names", "capitals and small letters are not told apart", advice, **figures)]
    if longest < _LONGEST or not long_works:
        advice = "keep the names of checkpoints short, those that contain metrics too"
        return [warn("names", f"names of {longest} bytes {'at most' if long_works else 'fail'}", advice, **figures)]
    return [ok("names", f"capitals and small letters differ, names of {longest} bytes", **figures)]


def unlinking(examined: Examined) -> list[Finding]:
    """A file that is deleted while it is read stays readable: retention may delete what an evaluation reads."""
    folder = _folder(examined, "unlinked")
    (folder / "file").write_text("x")
    with (folder / "file").open() as stream:
        (folder / "file").unlink()
        left = os.listdir(folder)
        readable = stream.read() == "x"
    if not readable:
        advice = "do not evaluate a checkpoint while retention may delete it: copy it first"
        return [warn("delete while open", "the file cannot be read any more", advice)]
    if left:
        text = f"readable to the end; {left[0][:12]}... stays until it is closed"
        return [ok("delete while open", text, "such files are no damage; they go when their reader does")]
    return [ok("delete while open", "readable to the end")]
