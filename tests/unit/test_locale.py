"""A process whose locale has no name outside ASCII (LC_ALL=C with Python's UTF-8 mode switched off)."""

import os
import subprocess
import sys

import pytest

from support import program_path


def said(given, kind):
    own = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, program_path("saves_to_a_name"), given, kind]
    return subprocess.run(command, env=own, check=False, capture_output=True, text=True, encoding="utf-8", timeout=60)


@pytest.mark.parametrize("name", ["läufe".encode(), b"l\xe4ufe"])
def test_a_name_that_the_shell_gives_is_taken_as_it_is(tmp_path, name):
    """Bytes that the locale does not have are a name as any other: saved to, and resumed from."""
    done = said(os.path.join(os.fsencode(tmp_path), name), "given")
    assert done.stdout == "resumed 1\n", done.stderr


def test_a_name_that_the_locale_has_not_is_an_error_that_says_what_to_do(tmp_path):
    """Written in the program: not a UnicodeEncodeError that names nothing."""
    done = said(str(tmp_path), "written")
    assert done.stdout.startswith("DirectoryError"), done.stderr
    assert "set PYTHONUTF8=1" in done.stdout
    assert "ufe" in done.stdout
