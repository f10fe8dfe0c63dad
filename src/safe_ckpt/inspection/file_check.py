"""Are the bytes of one file of another tool those that were written, as far as its format can tell.

A torch archive carries a CRC-32 of every record and says everything else twice. safetensors, JSON and plain pickles carry
nothing: there only the structure can be looked at, and the answer is "cannot tell".
"""

from __future__ import annotations

from safe_ckpt.core.formats.json_text import MOST_BYTES, parse_json
from safe_ckpt.errors import CorruptCheckpointError, UnsupportedFormatError
from safe_ckpt.inspection import dcp_reader, torch_reader
from safe_ckpt.inspection.files import Found, Window
from safe_ckpt.inspection.safetensors_reader import SUFFIX, read_safetensors
from safe_ckpt.inspection.scanning import Progress, Span, scan
from safe_ckpt.inspection.verdict import NO_CHECKSUMS, UNEQUAL, Judgement, damaged, of_error, untold, valid
from safe_ckpt.inspection.zip_reader import read_members

Metadata = dcp_reader.Directory | CorruptCheckpointError | UnsupportedFormatError | None
"""What ``.metadata`` beside a file says; the error if it is damaged or too long; None where there is none."""


def check_file(file: Found, metadata: Metadata, told: Progress | None) -> Judgement:
    """Read a file and judge it.

    Raises:
        OSError: it could not be read; that condemns nothing.
    """
    name, size = file.name, file.size_bytes
    if not size:
        tensors = file.path.suffix in (*torch_reader.SUFFIXES, SUFFIX)
        return damaged(name, "is empty") if tensors else untold(name, "is empty", size=0)
    try:
        if file.path.name == dcp_reader.METADATA:
            if isinstance(metadata, CorruptCheckpointError):
                return of_error(metadata, name)
            if isinstance(metadata, UnsupportedFormatError):
                return untold(name, metadata.message, size=size)
            return untold(name, f"its structure is in order, and it {NO_CHECKSUMS}", size=size)
        return _by_suffix(file, metadata, told)
    except CorruptCheckpointError as error:
        return of_error(error, name)


def _by_suffix(file: Found, metadata: Metadata, told: Progress | None) -> Judgement:
    suffix = file.path.suffix
    if suffix == ".distcp":
        return _check_distcp(file, metadata, told)
    if suffix == SUFFIX:
        read_safetensors(file.path)
        return untold(file.name, f"its header fits the file, and safetensors {NO_CHECKSUMS}", size=file.size_bytes)
    return _check_json(file) if suffix == ".json" else _check_torch(file, told)


def _check_json(file: Found) -> Judgement:
    if file.size_bytes > MOST_BYTES:
        return untold(file.name, "is too large to be looked at", size=file.size_bytes)
    with Window(file.path) as window:
        text = window.read(0, window.size)
    try:
        parse_json(text)
    except ValueError as error:
        return damaged(file.name, f"is no JSON: {error}", size=file.size_bytes)
    return untold(file.name, f"is JSON, which {NO_CHECKSUMS}", size=file.size_bytes)


def _check_torch(file: Found, told: Progress | None) -> Judgement:
    with Window(file.path) as window:
        if not torch_reader.looks_like_archive(window):
            return _check_old(file, window)
        try:
            archive = torch_reader.open_archive(window)
        except UnsupportedFormatError as error:
            return _check_records(file, window, error, told)
        _, bad = scan(file.path, window.size, archive.spans(), progress=told)
        torch_reader.content_of(archive)
        names = tuple(torch_reader.names_in(archive, bad)) if bad else ()
    if bad:
        return damaged(file.name, UNEQUAL, size=file.size_bytes, names=names)
    return _as_far_as_covered(file, file.size_bytes - archive.untold_bytes)


def _check_records(file: Found, window: Window, error: UnsupportedFormatError, told: Progress | None) -> Judgement:
    """An archive of which only the structure cannot be looked at: its checksums can."""
    records = torch_reader.Archive(source=window, members=read_members(window), root=None)
    _, bad = scan(file.path, window.size, records.spans(), progress=told)
    if bad:
        return damaged(file.name, UNEQUAL, size=file.size_bytes, names=tuple(torch_reader.names_in(records, bad)))
    return untold(file.name, error.message, size=file.size_bytes, covered=file.size_bytes - records.untold_bytes)


def _as_far_as_covered(file: Found, covered: int) -> Judgement:
    size = file.size_bytes
    if covered == size:
        return valid(file.name, size)
    return untold(file.name, f"{size - covered} of its bytes carry no checksums", size=size, covered=covered)


def _check_old(file: Found, window: Window) -> Judgement:
    if file.path.suffix not in torch_reader.SUFFIXES:
        return untold(file.name, f"is of no known format, and {NO_CHECKSUMS}", size=file.size_bytes)
    try:
        found = torch_reader.read_old_file(window)
    except UnsupportedFormatError as error:
        return untold(file.name, error.message, size=file.size_bytes)
    if found is None:
        return damaged(file.name, "is neither an archive nor a pickle", size=file.size_bytes)
    return untold(file.name, f"is a plain pickle, which {NO_CHECKSUMS}", size=file.size_bytes)


def _check_distcp(file: Found, metadata: Metadata, told: Progress | None) -> Judgement:
    size = file.size_bytes
    if not isinstance(metadata, dcp_reader.Directory):
        reason = "its .metadata is missing, damaged or too long, so that nothing says what is in it"
        return untold(file.name, reason, size=size)
    spans: list[Span] = []
    names: dict[int, str] = {}
    covered = 0
    with Window(file.path) as window:
        place = file.path.relative_to(metadata.folder).as_posix()
        for item, archive in dcp_reader.archives_in(metadata, place, window):
            if archive is not None:
                spans += archive.spans()
                names |= {span.start: item.name for span in archive.spans()}
                covered += item.size - archive.untold_bytes
        _, bad = scan(file.path, window.size, spans, progress=told)
    if bad:
        return damaged(file.name, UNEQUAL, size=size, names=tuple(sorted({names[span.start] for span in bad})))
    return _as_far_as_covered(file, covered)
