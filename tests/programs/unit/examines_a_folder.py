"""Runs the doctor on FOLDER: prints its status, and whether torch was imported for that."""

import sys

from typer.testing import CliRunner

from safe_ckpt.tools.cli.app import app

done = CliRunner().invoke(app, ["doctor", sys.argv[1], "--mebibytes", "0"])
print(done.exit_code, "torch" in sys.modules)
