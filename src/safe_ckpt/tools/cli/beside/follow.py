"""``safe-ckpt follow``: each new checkpoint to a command, or as a folder that servers load."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from safe_ckpt.core.storage.objects.options import is_url
from safe_ckpt.errors import ConfigError, SafeCheckpointError
from safe_ckpt.tools.cli.output import DAMAGED, ending_on_signals, failing, say, tell

if TYPE_CHECKING:
    from safe_ckpt.following import Followed

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def follow_run(
    directory: Annotated[str, typer.Argument(help="A directory of checkpoints, or an address.", metavar="DIR")],
    command: Annotated[
        str,
        typer.Option("--exec", help="Run this for each: {path}, {step} and {name} are filled in.", metavar="COMMAND"),
    ] = "",
    export: Annotated[
        str, typer.Option("--export", help="Put each there as a Hugging Face folder, in one step.", metavar="OUT")
    ] = "",
    dtype: Annotated[str, typer.Option(help="With --export: the type of floating-point tensors, as in bf16.")] = "",
    item: Annotated[str, typer.Option(help="With --export: the part that is the weights, keys joined by dots.")] = "",
    every: Annotated[
        int | None, typer.Option(min=1, help="Each n-th alone, which retention keeps until it is taken.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="With --every: how many may wait at most.")] = 10,
    newest_only: Annotated[bool, typer.Option("--newest-only", help="When several are new, the newest alone.")] = False,
    after: Annotated[int | None, typer.Option(help="Leave out what is there of this step and before.")] = None,
    timeout_s: Annotated[
        float | None, typer.Option(min=0, help="End when no new one came for so long; without it never.")
    ] = None,
) -> None:
    """Take each checkpoint in DIR once, those that are there and each new one, and hold it until that is done.

    Beside a live job, without its lock. Without --exec and --export their paths are printed. --export replaces OUT by one
    rename: whoever loads it gets one checkpoint as a whole. Files in OUT that are no weights, such as config.json and a
    tokenizer, stay. A command that fails is said, and the next checkpoint is taken. Exit status: 0; 1 if a command failed or
    an export did.
    """
    failed = False
    with failing(), ending_on_signals():
        out = _target(export, dtype)
        for one in _each(directory, every, limit, newest_only=newest_only, after=after, timeout_s=timeout_s):
            for name in one.missed:
                say(f"missed {name}: it was deleted before its turn came")
            if not command and out is None:
                tell(str(one.path))
            if out is not None:
                failed |= not _exported(one, out, item, dtype)
            if command:
                failed |= not _run(command, one)
    if failed:
        raise typer.Exit(DAMAGED)


def _each(
    directory: str,
    every: int | None,
    limit: int,
    *,
    newest_only: bool,
    after: int | None,
    timeout_s: float | None,
) -> Iterator[Followed]:
    from safe_ckpt.following import follow as each

    return each(
        directory,
        every=every,
        limit=limit,
        newest_only=newest_only,
        after=after,
        timeout_s=timeout_s,
        reader="safe-ckpt follow",
    )


def _target(export: str, dtype: str) -> Path | None:
    if dtype and not export:
        raise ConfigError(key="--dtype", message="it is for --export")
    if not export:
        return None
    if is_url(export):
        raise ConfigError(key="--export", message="servers load from a file system: give a directory")
    from safe_ckpt.tools.convert.target import dtype_named

    dtype_named(_DTYPES.get(dtype, dtype))
    return Path(export).absolute()


def _exported(one: Followed, out: Path, item: str, dtype: str) -> bool:
    from safe_ckpt.tools.convert.swap import export

    try:
        info = export(one.path, out, item=item, dtype=_DTYPES.get(dtype, dtype))
    except (SafeCheckpointError, OSError) as error:
        say(f"{one.path} was not exported: {error}")
        return False
    tell(f"{one.path} -> {info}")
    return True


def _run(command: str, one: Followed) -> bool:
    line = command
    for name, value in (("path", str(one.path)), ("step", str(one.step)), ("name", one.name)):
        line = line.replace(f"{{{name}}}", shlex.quote(value))
    status = subprocess.run(line, shell=True, check=False).returncode  # noqa: S602 - the user's own command
    if status:
        say(f"exit status {status} for {one.path}: {line}")
    return status == 0
