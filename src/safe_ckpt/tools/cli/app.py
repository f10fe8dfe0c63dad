"""Look at the checkpoints of a run: list, verify, show, delete, convert them; check a disk, a lock or settings.

Exit status: 0 no problem found; 1 a checkpoint is damaged, the directory is held, or the command failed; 2 wrong usage; 3 no
damage found, but part of the data has no checksums. Results go to stdout, warnings to stderr; --json prints one JSON document.
No command runs a pickle from a checkpoint, and none takes the lock of a live job.
"""

from __future__ import annotations

import typer

from safe_ckpt.tools.audit.command import audit
from safe_ckpt.tools.cli import config
from safe_ckpt.tools.cli.beside.follow import follow_run
from safe_ckpt.tools.cli.convert import convert
from safe_ckpt.tools.cli.doctor import doctor
from safe_ckpt.tools.cli.gc import gc
from safe_ckpt.tools.cli.inspect import inspect
from safe_ckpt.tools.cli.list import list_checkpoints
from safe_ckpt.tools.cli.report import report, watch
from safe_ckpt.tools.cli.resume_path import resume_path
from safe_ckpt.tools.cli.unlock import unlock
from safe_ckpt.tools.cli.verify import verify

# One file per command; ``watch`` lives beside ``report``.
app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__, rich_markup_mode=None)
app.command("list")(list_checkpoints)
app.command("follow")(follow_run)
for command in (verify, inspect, resume_path, gc, convert, unlock, doctor, audit, report, watch):
    app.command()(command)  # its name is that of the function
app.add_typer(config.app, name="config")
