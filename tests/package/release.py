"""``make release-check``: what must hold before a tag is set. The first thing that is wrong ends it.

The sdist and the wheel are built twice and must be equal, byte for byte. ``check-wheel-contents`` and ``twine`` look through
them. The wheel is used as in ``make package``. On other Pythons that are found it is installed and compiled, and the writer's
modules, which need no torch, are imported: torch is not installed for each of them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import sbom
import smoke
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

ROOT = smoke.ROOT
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
MOST_LINES = 30
_LIGHT = ("safe_ckpt.errors", "safe_ckpt.events", "safe_ckpt.core.writer.process")


def main() -> None:
    """Everything, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", type=Path, help="where to leave the sdist and the wheel that were checked")
    keep: Path | None = parser.parse_args().keep
    version = sbom.version()
    check_texts(version)
    with tempfile.TemporaryDirectory() as folder:
        sdist, wheel = built_twice(Path(folder))
        smoke.check_sdist(sdist)
        smoke.check_wheel(wheel)
        smoke.run([sys.executable, "-m", "check_wheel_contents", str(wheel)])
        smoke.run([sys.executable, "-m", "twine", "check", "--strict", str(sdist), str(wheel)])
        said("check-wheel-contents and twine have no complaint")
        check_sbom(wheel, version)
        smoke.use(wheel, Path(folder))
        said(f"used on {sys.version.partition(' ')[0]}, with torch")
        for number in PYTHONS:
            on_python(number, wheel, Path(folder))
        check_interface()
        check_workflows()
        check_addresses()
        smoke.leave(keep, sdist, wheel)
    print(f"{version} can be released: CONTRIBUTING.md says how")


def said(what: str) -> None:
    """One line for what was looked at."""
    print(f"release-check: {what}", flush=True)


def check_texts(version: str) -> None:
    """The changelog has a section of this version, of a page at most; the citation names the same version."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    found = re.search(rf"^## \[{re.escape(version)}\].*?(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    smoke.expect(found, f"CHANGELOG.md has no section of {version}")
    lines = found[0].strip().splitlines() if found else []
    smoke.expect(len(lines) <= MOST_LINES, f"the section of {version} has {len(lines)} lines of {MOST_LINES}")
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    smoke.expect(f"\nversion: {version}\n" in citation, "CITATION.cff names another version")
    smoke.run([sys.executable, str(ROOT / "tests/package/sbom.py"), "--check"])
    said(f"changelog ({len(lines)} lines), citation and {sbom.FILE.name} are of {version}")


def built_twice(folder: Path) -> tuple[Path, Path]:
    """The sdist and the wheel, twice, into two folders: no byte may differ."""
    os.environ["SOURCE_DATE_EPOCH"] = last_change()
    os.umask(0o022)
    pairs = [smoke.build(folder / name) for name in ("one", "another")]
    digests = [[hashlib.sha256(file.read_bytes()).hexdigest() for file in pair] for pair in pairs]
    smoke.expect(digests[0] == digests[1], f"two builds differ: {digests}")
    for file, digest in zip(pairs[-1], digests[-1], strict=True):
        said(f"built twice, equal: {file.name} sha256 {digest}")
    return pairs[-1]


def last_change() -> str:
    """When the last commit was made, in seconds."""
    done = subprocess.run(["git", "log", "-1", "--format=%ct"], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "1700000000"


def check_sbom(wheel: Path, version: str) -> None:
    """The wheel carries its list of parts, which is valid and of this version."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if "/sboms/" in name]
        smoke.expect(len(names) == 1, f"the wheel has {len(names)} lists of its parts")
        text = archive.read(names[0]).decode()
    problem = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
    smoke.expect(problem is None, f"{names[0]}: {problem}")
    named = json.loads(text)["metadata"]["component"]["version"]
    smoke.expect(named == version, f"{names[0]} is of {named}")
    said(f"{names[0]} is valid CycloneDX")


def on_python(number: str, wheel: Path, folder: Path) -> None:
    """Install and compile it, and import what needs no torch."""
    found = python_of(number)
    if found is None:
        said(f"Python {number} is not here")
        return
    place = folder / number
    smoke.run([found, "-m", "venv", str(place)])
    python = str(place / "bin/python")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    asked = [
        one.partition(";")[0] for one in sbom.the_project()["dependencies"] if not one.startswith(("torch", "isal"))
    ]
    smoke.run([*pip, *asked])
    smoke.run([*pip, "--no-deps", str(wheel)])
    (package,) = place.glob("lib/python*/site-packages/safe_ckpt")
    smoke.run([python, "-W", "error", "-m", "compileall", "-q", "-f", str(package)])
    smoke.run([python, "-W", "error", "-c", "".join(f"import {name}\n" for name in _LIGHT)])
    said(f"Python {number}: installed and compiled, imported without torch: {', '.join(_LIGHT)}")


def python_of(number: str) -> str | None:
    """A Python of that version: in the path, or beside this one as pyenv installs them."""
    homes = sorted(Path(sys.base_prefix).parent.glob(f"{number}.*/bin/python"))
    return shutil.which(f"python{number}") if not homes else str(homes[-1])


def check_interface() -> None:
    """Nothing public has gone, or changed its arguments, since the last tag."""
    tags = subprocess.run(
        ["git", "tag", "--list", "v*", "--sort=-creatordate"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.split()
    if not tags:
        said("no tag yet: there is no earlier interface to compare with")
        return
    smoke.run([sys.executable, "-m", "griffe", "check", "safe_ckpt", "--search", "src", "--against", tags[0]], cwd=ROOT)
    said(f"the public interface of {tags[0]} is kept")


def check_workflows() -> None:
    """``zizmor`` finds nothing in the workflows. Without a network it asks nobody which actions are known to be bad."""
    command = Path(sys.executable).with_name("zizmor")
    smoke.run([str(command), "--offline", "--pedantic", "--no-progress", str(ROOT / ".github")])
    said("zizmor has no complaint")


def check_addresses() -> None:
    """The metadata leads to the project's pages; whoever releases it knows where they are."""
    missing = {"Source", "Documentation", "Changelog"} - set(sbom.the_project().get("urls", {}))
    if missing:
        said(f"TO DO by the releaser: [project.urls] in pyproject.toml lacks {', '.join(sorted(missing))}")


if __name__ == "__main__":
    main()
