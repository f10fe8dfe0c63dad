"""What looking at a checkpoint's bytes came to."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from safe_ckpt.errors import CorruptCheckpointError, UnsupportedFormatError

State = Literal["valid", "damaged", "cannot tell"]
NO_CHECKSUMS = "carries no checksums"
UNEQUAL = "its bytes are not those that were written"


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What was found about one file.

    Attributes:
        file: relative to the checkpoint.
        state: ``"valid"``: a checksum covers every byte, and all agree. ``"damaged"``. ``"cannot tell"``: nothing is wrong as
            far as the format lets one see.
        reason: what is wrong, or why it cannot be told.
        names: tensors, or records, that are damaged, where that can be told.
        size_bytes: its size.
        covered_bytes: how many of them a checksum covers.
    """

    file: str
    state: State
    reason: str = ""
    names: tuple[str, ...] = ()
    size_bytes: int = 0
    covered_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What was found about a checkpoint.

    Attributes:
        path: where it is.
        kind: what wrote it.
        files: one judgement per file.
        remarks: what is no damage but should be known.
    """

    path: Path
    kind: str
    files: tuple[Judgement, ...]
    remarks: tuple[str, ...] = ()
    state: State = field(init=False)

    def __post_init__(self) -> None:
        states = {judgement.state for judgement in self.files}
        state: State = "damaged" if "damaged" in states else "cannot tell" if states != {"valid"} else "valid"
        object.__setattr__(self, "state", state)


def valid(file: str, size: int) -> Judgement:
    """A checksum covers every byte, and all agree."""
    return Judgement(file=file, state="valid", size_bytes=size, covered_bytes=size)


def damaged(file: str, reason: str, *, size: int = 0, names: tuple[str, ...] = ()) -> Judgement:
    """Something is wrong."""
    return Judgement(file=file, state="damaged", reason=reason, names=names, size_bytes=size)


def untold(file: str, reason: str, *, size: int, covered: int = 0) -> Judgement:
    """Nothing is wrong as far as can be told."""
    return Judgement(file=file, state="cannot tell", reason=reason, size_bytes=size, covered_bytes=covered)


def of_error(error: CorruptCheckpointError | UnsupportedFormatError, file: str = "") -> Judgement:
    """An error as a judgement, of the file that it names or of the one given."""
    return damaged(file or getattr(error, "file", "") or Path(error.path).name, error.message)
