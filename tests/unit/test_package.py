"""What a release needs, as far as it can go stale with any change: ``make release-check`` has the rest."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_list_of_parts_is_that_of_the_project():
    """``sbom.cdx.json``, which the wheel carries, names this version and what pyproject.toml asks for."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/package/sbom.py"), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_changelog_has_a_page_about_this_version():
    """The newest version in CHANGELOG.md is this one, said in at most 30 lines."""
    from safe_ckpt._version import __version__

    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    sections = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    (section,) = (one for one in sections if one.startswith(f"[{__version__}]"))
    assert len(section.strip().splitlines()) <= 30
    assert sections.index(section) <= 1, "below another version"
