"""From data to a file plan: which bytes lie where in the file, before a single one of them is copied.

A plan is header bytes at offsets plus tensors at offsets. The shared buffer is filled with them and then *is* the file.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from safe_ckpt.core.formats import zip_archive
from safe_ckpt.core.formats.zip_archive import Record
from safe_ckpt.core.storage.reader import crc32

if TYPE_CHECKING:
    import torch

ITSELF = ""
"""Stands for the path of a checkpoint that is a single file."""
LEAST_SHARED_BYTES = 1 << 20
"""Smaller files are written, although an earlier checkpoint has them: a look gains nothing, and people edit such files in
place, under all their names."""
FROZEN_BYTES = 1 << 30
"""How large a file of tensors that are not trained becomes at most: an object store must copy it within one request's time."""


def is_unresolved(tensor: torch.Tensor) -> bool:
    """Whether torch has yet to conjugate or negate what lies in memory: the bytes there are not the values."""
    return tensor.is_conj() or tensor.is_neg()


def values_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or where it ``is_unresolved`` a copy, whose memory holds its values. Without gradients."""
    return tensor.detach().resolve_conj().resolve_neg()


def lies_as_written(tensor: torch.Tensor) -> bool:
    """Whether its bytes lie in memory as they do in a file: in the order of its shape, with nothing left to compute."""
    return tensor.is_contiguous() and not is_unresolved(tensor)


def view_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return what is equal for two tensors of one memory only if they are the same values."""
    kind = tensor.dtype, tensor.is_conj(), tensor.is_neg()
    return tensor.storage_offset(), tuple(tensor.size()), tensor.stride(), *kind


@dataclass(frozen=True, kw_only=True)
class LazyTensor:
    """A tensor that is fetched when its turn comes to be written, and let go again.

    Attributes:
        dtype: its type.
        shape: its shape.
        fetch: returns it; called on the background thread, so it may take part in no collective.
        release: called there when its bytes have been taken.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    fetch: Callable[[], torch.Tensor]
    release: Callable[[], None] | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class FilePlan:
    """One file, planned.

    Attributes:
        path: relative to the checkpoint.
        length: bytes of the file; the writer appends manifest and directory to a zip archive.
        pieces: offset -> bytes that are known now.
        tensors: offset -> tensor whose bytes go there, in its own order of elements if it is contiguous.
        lazies: offset -> tensor that is fetched for it; such a file can only be streamed.
        records: the members of a zip archive; None for a plain file.
        manifest: of a file that carries its manifest inside.
        layout: equal for plans whose tensors have the same addresses and places; None where that is not known.
        fixed: how many of the ``pieces``, from the first on, are the same in every plan of that layout.
        floats: where in the last piece the floats of the state lie; None if that is not known.
        names: of the ``tensors``; None where the file itself says them.
        frozen: whether none of its tensors is trained, so that it probably is as it was at the save before.

    Example:
        ```python
        plan = torch_file("model.pt", model.state_dict())
        print(plan.path, plan.total_bytes > sum(tensor.nbytes for _, tensor in plan.tensors))
        ```

        ```text
        model.pt True
        ```
    """

    path: str
    length: int
    pieces: Sequence[tuple[int, bytes]]
    tensors: Sequence[tuple[int, torch.Tensor]] = ()
    lazies: Sequence[tuple[int, LazyTensor]] = ()
    records: tuple[Record, ...] | None = None
    manifest: Mapping[str, Any] | None = field(default=None)
    layout: object = None
    fixed: int = 0
    floats: Sequence[int] | None = ()
    names: Sequence[str] | None = None
    frozen: bool = False

    @functools.cached_property
    def total_bytes(self) -> int:
        """An upper bound of the file's size."""
        if self.records is None:
            return self.length
        names = sum(len(record.name) for record in self.records)
        return self.length + 8192 + 200 * len(self.records) + 2 * names

    def gaps(self) -> Iterator[tuple[int, int]]:
        """From where to where nothing is placed: zeros in the file, but for what the writer puts there."""
        parts = [(at, len(data)) for at, data in self.pieces]
        parts += [(at, tensor.numel() * tensor.element_size()) for at, tensor in self.tensors]
        at = 0
        for start, size in sorted([*parts, (self.length, 0)]):
            if start > at:
                yield at, start
            at = max(at, start + size)


class KnownBytes:
    """A file of which only some pieces are at hand, to be read like memory.

    Args:
        length: of the file.
        pieces: offset -> bytes.
    """

    def __init__(self, length: int, pieces: Sequence[tuple[int, bytes]]) -> None:
        self._length = length
        self._pieces = pieces

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, where: slice) -> bytes:
        begin, end, _ = where.indices(self._length)
        for at, data in self._pieces:
            if at <= begin and end <= at + len(data):
                return data[begin - at : end - at]
        raise ValueError(f"bytes {begin} to {end} are not at hand")


def json_plan(path: str, data: object) -> FilePlan:
    """A JSON file."""
    return bytes_plan(path, json.dumps(data, allow_nan=False).encode())


def bytes_plan(path: str, data: bytes) -> FilePlan:
    """A file whose content is known."""
    return FilePlan(path=path, length=len(data), pieces=[(0, data)])


def is_exact_json(data: object, seen: set[int] | None = None) -> bool:
    """Whether JSON gives back exactly ``data``: no tuples, no other keys than text, no NaN, no subclasses.

    Args:
        data: anything.
        seen: the lists and dicts that were met before: one that lies in two places would be two.
    """
    kind = type(data)
    if kind is not list and kind is not dict:
        return _is_exact_value(data)
    seen = set() if seen is None else seen
    if id(data) in seen:
        return False
    seen.add(id(data))
    if kind is list:
        return all(is_exact_json(value, seen) for value in data)  # type: ignore[attr-defined]
    pairs = data.items()  # type: ignore[attr-defined]
    return all(type(key) is str and _is_exact_value(key) and is_exact_json(value, seen) for key, value in pairs)


def _is_exact_value(value: object) -> bool:
    if type(value) is str:  # two lone surrogates come back as one character
        return value.isascii() or bool(json.loads(json.dumps(value)) == value)
    return value is None or type(value) in (bool, int) or (type(value) is float and math.isfinite(value))


def single(plan: FilePlan, path: str) -> FilePlan:
    """The same file as a checkpoint of its own: it gets the manifest inside."""
    return dataclasses.replace(plan, path=path, manifest={})


def parse_json(memory: mmap.mmap, length: int) -> Any:
    """A JSON file."""
    return json.loads(memory[:length])


@dataclass(frozen=True, kw_only=True)
class WriteTask:
    """One file to write.

    Attributes:
        path: where; replaced if it exists.
        offset: where its bytes start in the shared buffer, a multiple of 4096.
        length: how many there are.
        records: for a zip archive, the records in file order; None for a plain file.
        manifest_name: for a zip archive, the name of the manifest record that is appended.
        manifest: for a zip archive, the manifest; the hashes of the records are added to it.
        observed: what extensions say of it, by their names. With an ``observer`` in it, ``module:class``, one of these looks at
            the file while it is hashed: see ``content.Observer``.
    """

    path: str
    offset: int
    length: int
    records: tuple[Record, ...] | None = None
    manifest_name: str = ""
    manifest: Mapping[str, Any] | None = None
    observed: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Describe it as JSON-able data."""
        return dict(vars(self))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> WriteTask:
        """From what ``to_json`` returned."""
        rows = data["records"]
        return cls(**{**data, "records": None if rows is None else tuple(Record(*row) for row in rows)})


def closing_of(
    task: WriteTask, length: int, crcs: dict[str, int], hashes: Mapping[str, str], sections: Mapping[str, Any]
) -> bytes:
    """Return the bytes that follow the first ``length`` of an archive: its manifest record and directory, up to the comment.

    Args:
        task: what is written.
        length: of the plan.
        crcs: of the records.
        hashes: of the records.
        sections: what extensions add to the manifest.
    """
    facts = {**(task.manifest or {}), "records": dict(hashes), **sections}
    manifest = json.dumps(facts, separators=(",", ":")).encode()
    own = zip_archive.place_record(task.manifest_name, len(manifest), length)
    crcs[own.name] = crc32(manifest)
    body = zip_archive.local_header(own) + manifest + zip_archive.descriptor(crcs[own.name], own.size)
    return body + zip_archive.closing([*(task.records or ()), own], crcs, own.end)


@dataclass(frozen=True, kw_only=True, eq=False)
class FileTemplate:
    """A planned file without its tensors: the same file again, with the tensors of today. It keeps no tensor alive.

    Attributes:
        plan: the file; all that ``filled`` returns has its layout.
        places: where its tensors go.
        numbers: which of the tensors at hand they are.
    """

    plan: FilePlan
    places: Sequence[int]
    numbers: Sequence[int]

    @classmethod
    def of(cls, plan: FilePlan, among: Sequence[torch.Tensor]) -> FileTemplate | None:
        """Make a template of a plan whose tensors are ``among`` these; None if they are not.

        Args:
            plan: planned. Its pieces from ``plan.fixed`` on may be others in the next file.
            among: in an order that will be the same next time.
        """
        numbers = numbers_of([tensor for _, tensor in plan.tensors], among)
        if numbers is None:
            return None
        known = dataclasses.replace(plan, tensors=(), layout=object())
        return cls(plan=known, places=[place for place, _ in plan.tensors], numbers=numbers)

    @classmethod
    def of_all(
        cls, plans: Sequence[FilePlan], among: Sequence[torch.Tensor]
    ) -> tuple[Sequence[FileTemplate], Sequence[FilePlan]]:
        """The templates of several files, and the files with their layouts; none, and the files as given, if one has none."""
        templates = [found for plan in plans if (found := cls.of(plan, among)) is not None]
        if len(templates) < len(plans):
            return (), plans
        pairs = zip(templates, plans, strict=True)
        return templates, [dataclasses.replace(one.plan, tensors=plan.tensors) for one, plan in pairs]

    def filled(self, tensors: Sequence[torch.Tensor], last: Sequence[bytes] | None = None) -> FilePlan:
        """The file again.

        Args:
            tensors: in the order of ``among``, with the same types, shapes and addresses.
            last: in the place of the pieces that may change, as long as they are.
        """
        pieces, fixed = self.plan.pieces, self.plan.fixed
        if last is not None:
            changed = zip(pieces[fixed:], last, strict=True)
            pieces = [*pieces[:fixed], *((place, data) for (place, _), data in changed)]
        chosen = map(tensors.__getitem__, self.numbers)
        return dataclasses.replace(self.plan, pieces=pieces, tensors=list(zip(self.places, chosen, strict=True)))


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
