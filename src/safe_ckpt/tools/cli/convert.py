"""``safe-ckpt convert``: the same checkpoint for another tool."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from safe_ckpt.core.storage.objects.options import is_url
from safe_ckpt.core.storage.source import in_files, in_store
from safe_ckpt.errors import ConfigError, CorruptCheckpointError
from safe_ckpt.text import bytes_text
from safe_ckpt.tools.cli.output import CHECKPOINT, AsJson, FollowSymlinks, ending_on_signals, failing, print_json, say
from safe_ckpt.tools.inspection.check import plan_tasks, verify_tasks
from safe_ckpt.tools.inspection.content import read_structure
from safe_ckpt.tools.inspection.fetch import fetch
from safe_ckpt.tools.inspection.files import place_given
from safe_ckpt.tools.inspection.listing import one_of

if TYPE_CHECKING:
    from safe_ckpt.core.formats.manifest import CheckpointInfo

_FORMS = ("safetensors", "torch", "dcp")


def convert(
    source: Annotated[
        str, typer.Argument(parser=CHECKPOINT, help="A checkpoint of any tool, or an address of ours.", metavar="SRC")
    ],
    destination: Annotated[str, typer.Argument(help="What is to be written; nothing may be there.", metavar="DST")],
    to: Annotated[str, typer.Option(help=f"One of {', '.join(_FORMS)}; without it DST's ending says.")] = "",
    item: Annotated[str, typer.Option(help="Only this part, keys joined by dots, as in 'state_dict'.")] = "",
    max_shard_size: Annotated[str, typer.Option(help="safetensors: how large a file may become.")] = "5GB",
    dtype: Annotated[str, typer.Option(help="safetensors: the type of floating-point tensors, as in 'bfloat16'.")] = "",
    drop_objects: Annotated[
        bool, typer.Option("--drop-objects", help="Omit what only running SRC would build.")
    ] = False,
    no_verify: Annotated[bool, typer.Option("--no-verify", help="Do not verify SRC first.")] = False,
    follow_symlinks: FollowSymlinks = False,
    as_json: AsJson = False,
) -> None:
    """Write SRC in another format, with bounded memory; it appears at DST when all of it is on the disk.

    safetensors: a model's weights in Hugging Face's layout, which Accelerate reads too. torch: everything in one file for
    torch.load. dcp: everything in a directory for torch.distributed.checkpoint.
    """
    with failing(), ending_on_signals(), _quietly():
        target = _here(destination)
        form = _form(to, target)
        options = {"item": item, "max_shard_size": max_shard_size, "dtype": dtype, "drop_objects": drop_objects}
        with _at_hand(source, target) as given:
            if not no_verify:
                for bad in verify_tasks([plan_tasks(given, follow_symlinks=follow_symlinks)])[0].damaged:
                    why = f"{bad.reason}; nothing was converted"
                    raise CorruptCheckpointError(path=str(given), file=bad.file, message=why)
            info = _written(given, target, form, read_structure(given, follow_symlinks=follow_symlinks), options)
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
    place = place_given(source)
    if not is_url(source):
        yield in_files(place)
        return
    from safe_ckpt.tools.convert import target

    destination = destination.absolute()
    target.refuse_existing(destination)
    with target.scratch_beside(destination) as scratch:
        yield fetch(in_store(one_of(place)), scratch)


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Mute the log of a save, which is written for the checkpoints of a run. The error of the command is enough."""
    logger = logging.getLogger("safe_ckpt")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _form(to: str, destination: Path) -> str:
    form = to or {".pt": "torch", ".pth": "torch"}.get(destination.suffix, "")
    if not form:
        message = (
            f"is missing: the ending of {destination.name!r} does not say the format. Give one of {', '.join(_FORMS)}"
        )
        raise ConfigError(key="--to", message=message)
    if form == "safetensors" and destination.suffix == ".safetensors":
        message = (
            f"{destination.name!r} would be a directory, in which model.safetensors lies. Name it so, "
            f"such as {destination.stem!r}"
        )
        raise ConfigError(key="DST", message=message)
    if form not in _FORMS:
        raise ConfigError(key="--to", message=f"expected one of {', '.join(_FORMS)}, got {form!r}")
    return form


def _written(source: Path, destination: Path, form: str, structure: Any, options: Mapping[str, Any]) -> CheckpointInfo:
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
        chosen = filled(part_of(structure, options["item"], source), make, drop_objects=options["drop_objects"])
        if form == "torch":
            return target.write_archive(destination, chosen)
        return target.write_dcp(destination, target.as_items(chosen))
