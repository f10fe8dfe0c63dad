"""The top level of a torch file of any size, read without loading a tensor and without running anything in its pickle.

``torch_reader`` reads more and bounds what it reads. What a resume may choose must not depend on such bounds: a checkpoint with
a large replay buffer in it is one, too.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import IO

from safe_ckpt.core.formats.pickles import Made, Names, StandIns
from safe_ckpt.core.home.home import Candidate
from safe_ckpt.core.storage.presence import ends_as_archive
from safe_ckpt.layouts.table import Layout, facts_file, lightning_layout_of


def read_layout(path: Path) -> Layout:
    """Read what a Lightning checkpoint says about itself, without loading a tensor and without running its pickle.

    Raises:
        OSError: it could not be read.
    """
    return lightning_layout_of(path).with_content(top_level(facts_file(path)))


def look_inside(candidate: Candidate, read: Callable[[Path], Layout] = read_layout) -> Candidate:
    """Lightning's checkpoint with the step in its content, and a problem if there are only weights in it.

    Raises:
        OSError: it could not be read.
    """
    if not candidate.foreign or candidate.problem:
        return candidate
    layout = read(candidate.file_path)
    return replace(candidate, step=layout.step, problem=layout.problem)


def top_level(path: Path) -> object:
    """The object in a file that ``torch.save`` wrote; what is no plain container or number in it is an empty stand-in.

    Returns:
        None for any other file.

    Raises:
        OSError: it could not be read.
    """
    try:
        if ends_as_archive(path):
            with zipfile.ZipFile(path) as archive:
                name = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
                with archive.open(name) as stream:
                    return _read(stream)
        with path.open("rb") as file:
            for _ in range(3):  # torch's format before 1.6: a magic number, a version, facts of the system, the object
                _read(file)
            return _read(file)
    except OSError:
        raise
    except Exception:  # the bytes are no pickle: any error may come of them
        return None


def _read(stream: IO[bytes]) -> object:
    made = StandIns(stream, Names()).load()
    return {} if isinstance(made, Made) else made
