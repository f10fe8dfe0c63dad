"""The one way from a name that was read to a path: of a manifest, an index, a pointer, a note, a head, of ``.metadata``.

Whoever writes such a file chooses the names in it. Joined without a look, one leads anywhere.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TypeVar

from safe_ckpt.core.storage.objects.place import ObjectPath, Place
from safe_ckpt.errors import HostileCheckpointError

_Place = TypeVar("_Place", Path, ObjectPath)
_ABSOLUTE = re.compile(r"[/\\]|[A-Za-z]:[/\\]")


def checked_name(name: object, of: Place | str = "", file: str = "") -> str:
    """A name that was read, if it leads to something within the folder that it is read for.

    Args:
        name: relative, with forward slashes.
        of: the checkpoint or directory, for the error.
        file: where the name stands, for the error.

    Raises:
        HostileCheckpointError: it is absolute, empty, no text, has ``..`` or an empty part, or is no name for any file.
    """
    if isinstance(name, str) and "\0" not in name and not _ABSOLUTE.match(name):
        parts = name.split("/")
        if all(parts) and ".." not in re.split(r"[/\\]", name) and any(part != "." for part in parts):
            return name
    message = f"a name that is read from it leads out of it: {name!r:.200}"
    raise HostileCheckpointError(path=str(of), file=file, message=message)


def inside(folder: _Place, name: object, file: str = "") -> _Place:
    """The path of a name that was read, in ``folder``. Links on the way to it are not looked at.

    Raises:
        HostileCheckpointError: see ``checked_name``.
    """
    return folder / checked_name(name, folder, file)


def really_inside(folder: Path, name: object, file: str = "") -> Path:
    """As ``inside``, for what is then opened, linked or removed: no link on the way to it leads out of ``folder`` either.

    Raises:
        HostileCheckpointError: it leads out.
        OSError: it could not be looked at.
    """
    path = inside(folder, name, file)
    if path.parent == folder:
        return path
    home = os.path.realpath(folder)
    if os.path.commonpath([home, os.path.realpath(path.parent)]) != home:
        message = f"a name that is read from it leads out of it, through a link: {name!r:.200}"
        raise HostileCheckpointError(path=str(folder), file=file, message=message)
    return path
