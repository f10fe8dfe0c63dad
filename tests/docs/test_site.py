"""The site that ``make docs`` builds."""

import os
import re
import subprocess
import sys

import pytest
from blocks import ROOT


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_page_and_every_anchor_that_is_linked_is_there(site):
    """``mkdocs build --strict`` has nothing to say, and every page below docs/ is on the site."""
    there = {path.relative_to(site).with_suffix("").as_posix() for path in site.rglob("*.html")}
    assert {
        path.relative_to(ROOT / "docs").with_suffix("").as_posix() for path in (ROOT / "docs").rglob("*.md")
    } <= there


def test_a_page_fetches_nothing_from_elsewhere(site):
    """No font, script, style or image comes from another host: the site reads offline and tells nobody who reads it."""
    fetched = re.compile(r'<(?:script|img|link|iframe|source)\b[^>]*\b(?:src|href)="?((?:https?:)?//[^\s">]+)')
    for page in site.rglob("*.html"):
        assert fetched.findall(page.read_text(encoding="utf-8")) == [], page


def test_hidden_blocks_do_not_show(site):
    """A block in an HTML comment prepares a page and is not read by anybody."""
    text = re.sub(r"<!--.*?-->", "", (site / "run-died.html").read_text(encoding="utf-8"), flags=re.DOTALL)
    assert "resume-path" in text
    assert "somebody" not in text
    assert "write_bytes" not in text
