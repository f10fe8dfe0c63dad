"""``safe-ckpt convert``: the same checkpoint for another tool."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from safe_ckpt.core.formats.manifest import read_manifest
from safe_ckpt.core.storage.objects.options import is_url
from safe_ckpt.core.storage.source import in_files, in_store
from safe_ckpt.errors import ConfigError, CorruptCheckpointError, UnsupportedFormatError
from safe_ckpt.text import bytes_text
from safe_ckpt.tools.cli.output import CHECKPOINT, AsJson, FollowSymlinks, ending_on_signals, failing, print_json, say
from safe_ckpt.tools.inspection.check import judge, plan
from safe_ckpt.tools.inspection.fetch import fetch
from safe_ckpt.tools.inspection.files import Window, place_of
from safe_ckpt.tools.inspection.listing import one_of
from safe_ckpt.tools.inspection.zip_reader import is_archive

if TYPE_CHECKING:
    from safe_ckpt.core.formats.manifest import CheckpointInfo

_FORMS = ("safetensors", "lightning", "torch", "dcp", "safe_ckpt")


def convert(
    source: Annotated[
        str, typer.Argument(parser=CHECKPOINT, help="A checkpoint of any tool, or an address of ours.", metavar="SRC")
    ],
    destination: Annotated[str, typer.Argument(help="What is to be written; nothing may be there.", metavar="DST")],
    to: Annotated[str, typer.Option(help=f"One of {', '.join(_FORMS)}; without it DST's ending says.")] = "",
    item: Annotated[str, typer.Option(help="Only this part, keys joined by dots, as in 'state_dict'.")] = "",
    max_shard_size: Annotated[str, typer.Option(help="safetensors: how large a file may become.")] = "5GB",
    dtype: Annotated[str, typer.Option(help="safetensors: the type of floating-point tensors, as in 'bfloat16'.")] = "",
    step: Annotated[int | None, typer.Option(help="safe_ckpt: the training step; without it the source's.")] = None,
    drop_objects: Annotated[
        bool, typer.Option("--drop-objects", help="Omit what only running SRC would build.")
    ] = False,
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Run the pickle in SRC, a file of torch.save that you trust.")
    ] = False,
    no_verify: Annotated[bool, typer.Option("--no-verify", help="Do not verify SRC first.")] = False,
    follow_symlinks: FollowSymlinks = False,
    as_json: AsJson = False,
) -> None:
    """Write SRC in another format, with bounded memory; it appears at DST when all of it is on the disk.

    safetensors: a model's weights in Hugging Face's layout, which Accelerate reads too. lightning: the same weights as a file
    for load_from_checkpoint. torch: everything in one file for torch.load. dcp: everything in a directory for
    torch.distributed.checkpoint. safe_ckpt: everything as a checkpoint of Checkpointer, in the directory DST.
    """
    with failing(), ending_on_signals(), _quietly():
        target = _here(destination)
        form = _form(to, target)
        options = {"item": item, "max_shard_size": max_shard_size, "dtype": dtype, "drop_objects": drop_objects}
        options["strict"] = not allow_pickle
        with _at_hand(source, target) as given:
            if not no_verify:
                _verify(given, follow_symlinks=follow_symlinks)
            structure = _opened(given, form, allow_pickle=allow_pickle, follow_symlinks=follow_symlinks)
            info = _written(given, target, form, structure, _step_of(given, step, structure), options)
    if as_json:
        print_json(info.to_json())
    else:
        typer.echo(str(info.path))
        say(f"{form}, {bytes_text(info.size_bytes)}")


def _here(destination: str) -> Path:
    if is_url(destination):
        message = "converting writes to a file system. Convert to a directory, and copy that with the store's own tool"
        raise ConfigError(key="DST", message=message)
    return Path(destination)


@contextlib.contextmanager
def _at_hand(source: str, destination: Path) -> Iterator[Path]:
    """The source; one in an object store is fetched to where the result goes, and deleted afterwards."""
    place = place_of(source)
    if not is_url(source):
        yield in_files(place)
        return
    from safe_ckpt.tools.convert import target

    destination = destination.absolute()
    target.refuse_existing(destination)
    with target.scratch_beside(destination) as scratch:
        yield fetch(in_store(one_of(place)), scratch)


def _verify(source: Path, *, follow_symlinks: bool) -> None:
    for bad in judge([plan(source, follow_symlinks=follow_symlinks)])[0].damaged:
        raise CorruptCheckpointError(path=str(source), file=bad.file, message=f"{bad.reason}; nothing was converted")


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Without the log of a save, which is written for the checkpoints of a run. The error of the command is enough."""
    logger = logging.getLogger("safe_ckpt")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _form(to: str, destination: Path) -> str:
    form = to or {".ckpt": "lightning", ".pt": "torch", ".pth": "torch"}.get(destination.suffix, "")
    if form not in _FORMS:
        raise ConfigError(key="--to", message=f"expected one of {', '.join(_FORMS)}, got {form!r}")
    return form


def _opened(source: Path, form: str, *, allow_pickle: bool, follow_symlinks: bool) -> Any:
    if not allow_pickle:
        from safe_ckpt.tools.inspection.content import read_structure

        return read_structure(source, follow_symlinks=follow_symlinks)
    if source.is_dir() or form != "torch":
        message = "is only for one file of torch.save to another (--to torch); convert that file without it"
        raise ConfigError(key="--allow-pickle", message=message)
    import torch

    with Window(source) as window:
        mmap = is_archive(window)
    try:
        options: dict[str, Any] = {"map_location": "cpu", "mmap": mmap}
        return torch.load(source, weights_only=False, **options)  # unpickles: --allow-pickle asks for it
    except Exception as error:  # the code in it may raise anything
        message = f"running its pickle failed: {type(error).__name__}: {error}"
        raise UnsupportedFormatError(path=str(source), message=message) from error


def _step_of(source: Path, given: int | None, structure: Any) -> int:
    if given is not None:
        return given
    with contextlib.suppress(UnsupportedFormatError, CorruptCheckpointError):
        return read_manifest(source).step
    step = structure.get("global_step") if isinstance(structure, Mapping) else None
    return step if isinstance(step, int) and not isinstance(step, bool) else 0


def _written(
    source: Path, destination: Path, form: str, structure: Any, step: int, options: Mapping[str, Any]
) -> CheckpointInfo:
    from safe_ckpt.tools.convert import target
    from safe_ckpt.tools.convert.source import filled, part_of, weights_of
    from safe_ckpt.tools.inspection.values import Mapped

    destination = destination.absolute()
    target.refuse_existing(destination)
    if form == "safetensors":
        entries = weights_of(structure, options["item"], source)
        kind, size = target.dtype_named(options["dtype"]), options["max_shard_size"]
        return target.write_safetensors(destination, entries, Mapped(), max_shard_size=size, dtype=kind)
    with target.scratch_beside(destination) as scratch:
        make = Mapped(scratch).tensor
        if form == "lightning":
            weights = {name: make(entry) for name, entry in weights_of(structure, options["item"], source).items()}
            return target.write_archive(destination, target.as_lightning(weights, step))
        chosen = filled(part_of(structure, options["item"], source), make, drop_objects=options["drop_objects"])
        if form == "torch":
            return target.write_archive(destination, chosen, strict=options["strict"])
        parts = target.as_items(chosen)
        return target.write_dcp(destination, parts) if form == "dcp" else target.write_steps(destination, parts, step)
