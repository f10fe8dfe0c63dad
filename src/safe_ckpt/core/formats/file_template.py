"""A planned file without its tensors: the same file again, with the tensors of today and whatever else has changed in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from safe_ckpt.core.formats.file_plan import FilePlan

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True, eq=False)
class FileTemplate:
    """See above. It keeps no tensor alive.

    Attributes:
        image: the file; all that ``filled`` returns has its layout.
        places: where its tensors go.
        numbers: which of the tensors at hand they are.
    """

    image: FilePlan
    places: Sequence[int]
    numbers: Sequence[int]

    @classmethod
    def of(cls, image: FilePlan, among: Sequence[torch.Tensor]) -> FileTemplate | None:
        """What is kept of a plan whose tensors are ``among`` these; None if they are not.

        Args:
            image: planned. Its pieces from ``image.fixed`` on may be others in the next file.
            among: in an order that will be the same next time.
        """
        numbers = numbers_of([tensor for _, tensor in image.tensors], among)
        if numbers is None:
            return None
        known = dataclasses.replace(image, tensors=(), layout=object())
        return cls(image=known, places=[place for place, _ in image.tensors], numbers=numbers)

    @classmethod
    def of_all(
        cls, images: Sequence[FilePlan], among: Sequence[torch.Tensor]
    ) -> tuple[Sequence[FileTemplate], Sequence[FilePlan]]:
        """The templates of several files, and the files with their layouts; none, and the files as given, if one has none."""
        templates = [found for image in images if (found := cls.of(image, among)) is not None]
        if len(templates) < len(images):
            return (), images
        pairs = zip(templates, images, strict=True)
        return templates, [dataclasses.replace(one.image, tensors=image.tensors) for one, image in pairs]

    def filled(self, tensors: Sequence[torch.Tensor], last: Sequence[bytes] | None = None) -> FilePlan:
        """The file again.

        Args:
            tensors: in the order of ``among``, with the same types, shapes and addresses.
            last: in the place of the pieces that may change, as long as they are.
        """
        pieces, fixed = self.image.pieces, self.image.fixed
        if last is not None:
            changed = zip(pieces[fixed:], last, strict=True)
            pieces = [*pieces[:fixed], *((place, data) for (place, _), data in changed)]
        chosen = map(tensors.__getitem__, self.numbers)
        return dataclasses.replace(self.image, pieces=pieces, tensors=list(zip(self.places, chosen, strict=True)))


def numbers_of(tensors: Iterable[torch.Tensor], among: Sequence[torch.Tensor]) -> list[int] | None:
    """Which of ``among`` have the very bytes of ``tensors``; None if some have not."""
    numbers: dict[object, int] = {}
    for number, tensor in enumerate(among):
        numbers.setdefault(_bytes_of(tensor), number)
    found = [numbers.get(_bytes_of(tensor)) for tensor in tensors]
    return None if None in found else found  # type: ignore[return-value]


def _bytes_of(tensor: torch.Tensor) -> object:
    if tensor.is_contiguous():
        return tensor.data_ptr(), tensor.numel() * tensor.element_size()
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
