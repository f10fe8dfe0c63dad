"""What one rank adds to a save, planned before anything is written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from safe_ckpt.core.saving.request import Content, Snapshot, Unplanned

if TYPE_CHECKING:
    from safe_ckpt.core.formats.file_plan import FilePlan
    from safe_ckpt.core.staging.overlap import OverlapPlan
    from safe_ckpt.core.storage.copier import FileCopy


@dataclass(frozen=True, kw_only=True)
class Planned:
    """Files of one rank. ``folders`` and ``notes`` are the same on all ranks.

    Attributes:
        images: the files to write.
        copies: the files that are copied as they are.
        folders: below the checkpoint, for both.
        notes: what the manifest says besides.
        error: why this rank could not plan; every rank raises it.
    """

    images: Sequence[FilePlan] = ()
    copies: Sequence[FileCopy] = ()
    folders: Sequence[str] = ()
    notes: Mapping[str, Any] = field(default_factory=dict)
    error: Exception | None = None

    def content(self, *, overlap: OverlapPlan | None = None) -> Content:
        """What a ``SaveRequest`` says of it.

        Args:
            overlap: which tensors may be copied after the save has returned; None for none.
        """
        if self.error is not None:
            return Unplanned(error=self.error)
        return Snapshot(files=self.images, copies=self.copies, folders=self.folders, overlap=overlap)

    @classmethod
    def joined(cls, parts: Iterable[Planned]) -> Planned:
        """Several as one. Of images of one name the last counts, of errors the first."""
        images: dict[str, FilePlan] = {}
        copies: list[FileCopy] = []
        notes: dict[str, Any] = {}
        folders: set[str] = set()
        error: Exception | None = None
        for part in parts:
            images.update((image.path, image) for image in part.images)
            copies += part.copies
            folders.update(part.folders)
            for key, value in part.notes.items():
                notes[key] = {**notes.get(key, {}), **value}
            error = error or part.error
        return cls(images=list(images.values()), copies=copies, folders=sorted(folders), notes=notes, error=error)
