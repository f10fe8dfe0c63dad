"""``make test-versions``: run the tests with the oldest and with the newest of everything that pyproject.toml allows.

Each end has an environment in ``.venv/versions``, made once: torch alone is some GB. ``--make`` makes what is missing and runs
nothing; ``--last`` says what was run last, and when. What was run is written to docs/reference/versions_run.json, whatever came
of it, and the tables of docs/limits.md are made of that.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from versions_page import ENDS, NAMED, RECORD, ROOT
from versions_page import main as make_page

from safe_ckpt.versions import SUPPORTED

try:
    import tomllib
except ImportError:  # Python 3.10
    from pip._vendor import tomli as tomllib

PLACE = ROOT / ".venv" / "versions"
# What the tests of an end need of the development tools; the others only look at the sources.
NO_TOOLS = {"build", "hatchling", "import-linter", "mkdocs-material", "mkdocstrings", "mypy", "ruff", "types-pyyaml"}
# Their oldest release is what our code was written for, though it is only the tests that install it.
OURS_TOO = {"datasets", "torchdata", "peft"}
NOT_LOWEST = {"typing-extensions"}  # the tests' tools need a newer one
DEEPSPEED = ("setuptools", "wheel", "ninja", "py-cpuinfo", "griffe")  # the last reads the examples that are run
AFTERWARDS = ("test_both_ends_of_the_table_were_run", "test_the_page_says_what_was_run")  # of what is written down here
SUITES = {
    "unit": ["tests/unit", *(f"--deselect=tests/unit/test_versions.py::{name}" for name in AFTERWARDS)],
    "several ranks": ["tests/multirank"],
    "quick starts": ["tests/docs/test_code_blocks.py", "-k", "runs_and_prints and (README or start)"],
    "contracts": ["tests/adapters/test_contracts.py", "tests/adapters/test_lightning_contract.py"],
}
THIRD = ["tests/multirank", "--third"]  # of the oldest end
DEEPSPEED_SUITES = {"deepspeed": ["tests/adapters/test_deepspeed_contracts.py", "tests/docs/test_deepspeed_page.py"]}


def main() -> int:
    """See above."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ends", nargs="*", default=ENDS, help="oldest, newest")
    parser.add_argument("--only", choices=[*SUITES, *DEEPSPEED_SUITES], help="run this alone; what else was run stays")
    parser.add_argument("--make", action="store_true", help="make the environments, run nothing")
    parser.add_argument("--last", action="store_true", help="print what was run last, and when")
    options = parser.parse_args()
    if options.last:
        return last()
    for end in options.ends:
        environment(end)
    if options.make:
        return 0
    failed = [name for end in options.ends for name in run(end, options.only)]
    if set(ENDS) <= _record().keys():
        make_page()
    return 1 if failed else 0


def _record() -> dict[str, Any]:
    return json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}


def last() -> int:
    """Print what was run last, and when."""
    record = _record()
    for end in ENDS:
        if end not in record:
            print(f"{end}: never run")
            continue
        one = record[end]
        versions = ", ".join(
            f"{name} {one['packages'][name]}" for name in ("python", *NAMED) if name in one["packages"]
        )
        failed = sum(len(suite["failed"]) for suite in one["suites"].values())
        passed = sum(suite["passed"] for suite in one["suites"].values())
        dates = sorted({suite["date"] for suite in one["suites"].values()})
        print(
            f"{end}: run on {' to '.join(dates[:1] + dates[1:][-1:])} with {versions}: {passed} passed, {failed} failed"
        )
    return 0


def requirements(end: str) -> list[str]:
    """What pip is to install for an end: all that a user may, and what the tests need besides."""
    ours = _ours()
    found = {name: row for row in _project()["optional-dependencies"]["dev"] if (name := _name(row)) not in NO_TOOLS}
    if end == "oldest":
        ours += [row for name, row in found.items() if name in OURS_TOO]
    for row in ours:
        wanted = Requirement(row)
        if wanted.marker is None or wanted.marker.evaluate():
            found[_name(row)] = _lowest(wanted) if end == "oldest" and _name(row) not in NOT_LOWEST else row
    return sorted(found.values())


def _project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def _ours() -> list[str]:
    """What a user may install with this package, but DeepSpeed, torchtitan and Ray: they have environments of their own."""
    extras = _project()["optional-dependencies"]
    rows = [
        row
        for name in extras
        if name not in ("dev", "docs", "bench", "deepspeed", "torchtitan", "ray")
        for row in extras[name]
    ]
    (lightning,) = extras["lightning"]
    return [*_project()["dependencies"], *rows, f"pytorch-{lightning}"]


def _name(row: str) -> str:
    return Requirement(row).name.lower()


def _lowest(wanted: Requirement) -> str:
    (lowest,) = (one.version for one in wanted.specifier if one.operator in (">=", "=="))
    return f"{wanted.name}=={lowest}"


def python_of(end: str) -> str:
    """The Python of an end: ``OLDEST_PYTHON`` and ``NEWEST_PYTHON``, or what is on the path; else this one."""
    supported = SUPPORTED["python"]
    wanted = supported.lowest if end == "oldest" else supported.newest
    given = os.environ.get(f"{end.upper()}_PYTHON")
    for name in [given] if given else [f"python{wanted}", sys.executable]:
        program = shutil.which(name)
        if program and subprocess.run([program, "-c", ""], check=False, capture_output=True).returncode == 0:
            return program
    raise SystemExit(f"{given} is no Python that runs")


def environment(end: str) -> None:
    """Make it, if it is not there."""
    home = PLACE / end
    if not (home / "ready").exists():
        print(f"{end}: making {home} with {python_of(end)}: several GB, once", flush=True)
        subprocess.run([python_of(end), "-m", "venv", str(home)], check=True)
        pip = [str(home / "bin/pip"), "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *requirements(end)], check=True)
        subprocess.run([*pip, "--no-deps", "-e", str(ROOT)], check=True)
        (home / "ready").touch()
    above = PLACE / f"{end}-deepspeed"
    if not (above / "ready").exists():
        subprocess.run([str(home / "bin/python"), "-m", "venv", str(above)], check=True)
        said = [str(home / "bin/python"), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
        below = subprocess.run(said, check=True, capture_output=True, text=True).stdout.strip()
        own = Path(str(above) + below.removeprefix(str(home.resolve())).removeprefix(str(home)))
        (own / "below.pth").write_text(f"import site; site.addsitedir({below!r})\n", encoding="utf-8")
        torchrun = above / "bin/torchrun"  # the one below would start the Python below
        torchrun.write_text(f'#!/bin/sh\nexec "{above}/bin/python" -m torch.distributed.run "$@"\n', encoding="utf-8")
        torchrun.chmod(0o755)
        pip = [str(above / "bin/pip"), "install", "--quiet", "--disable-pip-version-check"]
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
            "optional-dependencies"
        ]
        wanted = Requirement(extras["deepspeed"][0])
        subprocess.run([*pip, *DEEPSPEED], check=True)
        what = _lowest(wanted) if end == "oldest" else str(wanted)
        done = subprocess.run(
            [*pip, "--no-build-isolation", what], check=False, env={**os.environ, "DS_BUILD_OPS": "0"}
        )
        if done.returncode:
            print(f"{end}: {what} could not be installed: it is not run", flush=True)
        else:
            (above / "ready").touch()


def run(end: str, only: str | None) -> list[str]:
    """All suites of an end, or one. Each is written down when it is over. Returns what failed."""
    home, above = PLACE / end, PLACE / f"{end}-deepspeed"
    packages, places = _packages(home), dict.fromkeys(SUITES, home)
    if (above / "ready").exists():
        packages["deepspeed"] = _packages(above)["deepspeed"]
        places |= dict.fromkeys(DEEPSPEED_SUITES, above)
    failed = []
    for name in [only] if only else places:
        words, called = {**SUITES, **DEEPSPEED_SUITES}[name], name
        if (end, name) == ("oldest", "several ranks"):
            words, called = THIRD, f"{name}, a third"
        found = suite(places[name], called, words)
        record = _record()
        if record.get(end, {}).get("packages") != packages:  # what was run with other releases says nothing of these
            record[end] = {
                "machine": f"{platform.machine()}, no GPU",
                "packages": dict(sorted(packages.items())),
                "suites": {},
            }
        record[end]["suites"][called] = found
        RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        failed += found["failed"]
    return failed


def suite(home: Path, name: str, words: list[str]) -> dict[str, Any]:
    """One of them: how many passed and were skipped, which failed, and which of them only beside others."""
    cache = f"cache_dir={ROOT}/.pytest_cache/versions/{home.name}/{name.replace(' ', '_')}"
    command = [str(home / "bin/python"), "-m", "pytest", "-q", "-o", cache, *words]
    extensions = str(home / "torch_extensions")
    path = os.pathsep.join(
        [str(home / "bin"), str(PLACE / home.name.removesuffix("-deepspeed") / "bin"), os.environ["PATH"]]
    )
    own = {
        **os.environ,
        "PATH": path,
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "TORCH_EXTENSIONS_DIR": extensions,
    }
    print(f"{home.name}: {name}", flush=True)
    failed = _failed(said := _said([*command, "-n", "2", "--dist", "worksteal", "--cache-clear"], own))
    again: list[str] = []
    if failed:
        print(f"{home.name}: what failed is run once more, one at a time: {failed}", flush=True)
        again = _failed(_said([*command, "--last-failed"], own))
    alone = [one for one in failed if one not in again]
    counts = {kind: sum(map(int, re.findall(rf"(\d+) {kind}", said[-1]))) for kind in ("passed", "skipped")}
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "passed": counts["passed"] + len(alone),
        "skipped": counts["skipped"],
        "failed": again,
        "passed only alone": alone,
    }


def _said(command: list[str], own: dict[str, str]) -> list[str]:
    done = subprocess.run(
        command, cwd=ROOT, env=own, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    lines = done.stdout.splitlines()
    print("\n".join(lines), flush=True)
    if done.returncode not in (0, 1):
        raise SystemExit(f"pytest ended with {done.returncode}: nothing is written down")
    return lines


def _failed(said: list[str]) -> list[str]:
    begin = next((number for number, line in enumerate(said) if "short test summary info" in line), len(said))
    return sorted(
        {line.split(" - ")[0].partition(" ")[2] for line in said[begin:] if line.startswith(("FAILED ", "ERROR "))}
    )


def _packages(home: Path) -> dict[str, str]:
    code = "import importlib.metadata as m, json; print(json.dumps({d.name.lower(): d.version for d in m.distributions()}))"
    done = subprocess.run([str(home / "bin/python"), "-c", code], check=True, capture_output=True, text=True)
    there = json.loads(done.stdout)
    wanted = {Requirement(row).name.lower() for row in _ours()} | OURS_TOO | {"deepspeed"}
    version = [str(home / "bin/python"), "-c", "import platform; print(platform.python_version())"]
    python = subprocess.run(version, check=True, capture_output=True, text=True).stdout.strip()
    return {name: found for name, found in there.items() if name in wanted} | {"python": python}


if __name__ == "__main__":
    sys.exit(main())
