"""What the wheel consists of, as CycloneDX: the package itself, and what it asks pip for. Nothing else is in it.

python tests/package/sbom.py            # writes sbom.cdx.json, which the wheel carries in its .dist-info/sboms
python tests/package/sbom.py --check    # says whether that file is what pyproject.toml and the version give
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from pathlib import Path
from typing import Any

try:
    import tomllib
except ImportError:  # Python 3.10
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "sbom.cdx.json"
_NAME = re.compile(r"^[A-Za-z0-9._-]+")


def version() -> str:
    """The package's."""
    text = (ROOT / "src/safe_ckpt/_version.py").read_text(encoding="utf-8")
    return next(
        ast.literal_eval(line.partition("=")[2].strip()) for line in text.splitlines() if line.startswith("__version__")
    )


def the_project() -> dict[str, Any]:
    """What pyproject.toml says of it."""
    return dict(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"])


def made() -> str:
    """The text of the file."""
    project = the_project()
    own = f"pkg:pypi/{project['name']}@{version()}"
    asked = [_component(asked) for asked in project["dependencies"]]
    facts = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {
                "type": "library",
                "bom-ref": own,
                "name": project["name"],
                "version": version(),
                "purl": own,
                "licenses": [{"license": {"id": project["license"]}}],
            }
        },
        "components": asked,
        "dependencies": [
            {"ref": own, "dependsOn": sorted(one["bom-ref"] for one in asked)},
            *({"ref": one["bom-ref"]} for one in asked),
        ],
    }
    return json.dumps(facts, indent=2) + "\n"


def _component(asked: str) -> dict[str, Any]:
    """A requirement. Which version of it there will be, pip decides: its range is a property."""
    found = _NAME.match(asked)
    if found is None:
        raise ValueError(asked)
    address = f"pkg:pypi/{found[0].lower()}"
    properties = [{"name": "python:requirement", "value": asked}]
    return {"type": "library", "bom-ref": address, "name": found[0], "purl": address, "properties": properties}


def main() -> None:
    """Write the file, or compare it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    if not parser.parse_args().check:
        FILE.write_text(made(), encoding="utf-8")
    elif not FILE.exists() or FILE.read_text(encoding="utf-8") != made():
        sys.exit(f"{FILE.name} is not what pyproject.toml gives: run python {Path(__file__).relative_to(ROOT)}")


if __name__ == "__main__":
    main()
