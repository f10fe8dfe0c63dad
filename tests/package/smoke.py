"""``make package``: build the sdist and the wheel, look into them, install the wheel where nothing else is, and use it.

The wheel is made from the sdist. It is installed by pip with all that its metadata asks for into a new environment, which has
nothing but a link to the torch of the one that runs this: torch alone would take longer than everything else. So this proves
that safe_ckpt comes from the wheel and needs no package that it does not name; not that pip finds a torch to download.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from email.parser import Parser
from importlib.util import find_spec
from pathlib import Path

import sbom

ROOT = sbom.ROOT
WITHIN_S = 300
USE = """
import torch
from pathlib import Path
import safe_ckpt
from safe_ckpt import Checkpointer
from safe_ckpt.errors import UnsupportedVersionError

assert str(Path(safe_ckpt.__file__)).startswith({home!r}), safe_ckpt.__file__

def state():
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return {{"model": model, "optimizer": optimizer, "epoch": 1}}

if __name__ == "__main__":
    torch.manual_seed(1)
    first, second = state(), state()
    with Checkpointer("run") as checkpoints:
        assert checkpoints.resume(first) is None
        checkpoints.save(1, first)
    with Checkpointer("run") as checkpoints:
        assert checkpoints.resume(second).step == 1
    assert second["model"].weight.equal(first["model"].weight)
    for adapter in ("lightning", "accelerate", "transformers", "deepspeed", "torchtitan", "ray"):
        try:
            __import__("safe_ckpt." + adapter)
        except UnsupportedVersionError as error:
            assert "pip install --upgrade" in str(error) and adapter in str(error), error
        else:
            raise SystemExit("safe_ckpt." + adapter + " was imported without its framework")
"""


def main() -> None:
    """Everything, one after the other; the first thing that is wrong ends it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", type=Path, help="where to leave the sdist and the wheel")
    keep: Path | None = parser.parse_args().keep
    with tempfile.TemporaryDirectory() as folder:
        sdist, wheel = build(Path(folder, "dist"))
        check_sdist(sdist)
        check_wheel(wheel)
        use(wheel, Path(folder))
        leave(keep, sdist, wheel)
    print(f"{sdist.name} and {wheel.name}: built, complete, installed and used")


def leave(keep: Path | None, *made: Path) -> None:
    """Copy what was made to where it is wanted; None for nowhere."""
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        for file in made:
            shutil.copy(file, keep)


def build(folder: Path) -> tuple[Path, Path]:
    """The sdist, and the wheel that is made from it."""
    here = ["--no-isolation"] if find_spec("hatchling") else []
    run([sys.executable, "-m", "build", *here, "--outdir", str(folder), str(ROOT)])
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


def check_sdist(path: Path) -> None:
    """All that is needed to build and to test is in there, and nothing that git ignores."""
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "tests/conftest.py", "src/safe_ckpt/py.typed"}
    expect(wanted <= names, f"the sdist lacks {sorted(wanted - names)}")
    odd = [name for name in names if name.startswith((".venv", "runs", ".git/")) or "__pycache__" in name]
    expect(not odd, f"the sdist has {odd[:5]}")


def check_wheel(path: Path) -> None:
    """The package as it stands in the sources, typed, with its licence and its readme, and nothing else."""
    with zipfile.ZipFile(path) as archive:
        names = set(archive.namelist())
        (facts,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        told = Parser().parsestr(archive.read(facts).decode())
    home = facts.partition("/")[0]
    sources = {file.relative_to(ROOT / "src").as_posix() for file in (ROOT / "src").rglob("*") if file.is_file()}
    wanted = {name for name in sources if "__pycache__" not in name} | {f"{home}/licenses/LICENSE"}
    expect(wanted <= names, f"the wheel lacks {sorted(wanted - names)}")
    odd = {name for name in names - wanted if not name.startswith(f"{home}/")}
    expect(not odd, f"the wheel has {sorted(odd)[:5]}")
    expect(told["Requires-Python"] is not None, "the wheel does not say which Pythons it is for")
    expect(told["Description-Content-Type"] == "text/markdown", "the readme is not said to be Markdown")
    expect(told.get_payload().startswith("# safe_ckpt"), "the readme is not the description")
    version = sbom.version()
    expect(told["Version"] == version, f"the wheel is of {told['Version']}, the sources of {version}")


def use(wheel: Path, folder: Path) -> None:
    """Install it into a new environment: save and resume with plain torch, then the command line without and with its extra."""
    place = folder / "environment"
    venv.create(place, with_pip=True, symlinks=True)
    link_torch(place, folder / "linked")
    pip = [str(place / "bin/python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    run([*pip, str(wheel)])
    script = folder / "use.py"
    script.write_text(USE.format(home=str(place)), encoding="utf-8")
    run([str(place / "bin/python"), str(script)], cwd=folder)
    command = str(place / "bin/safe-ckpt")
    told = subprocess.run(
        [command, "list", "run"], cwd=folder, capture_output=True, text=True, timeout=WITHIN_S, check=False
    )
    expect(told.returncode != 0 and "pip install typer rich jinja2" in told.stderr, f"without the extra: {told.stderr}")
    run([*pip, f"{wheel}[cli]"])
    expect("verify" in run([command, "--help"], cwd=folder), "safe-ckpt --help names no commands")
    expect("step-00000001" in run([command, "list", "run"], cwd=folder), "safe-ckpt list does not find the checkpoint")
    run([command, "verify", "run/step-00000001"], cwd=folder)


def link_torch(place: Path, linked: Path) -> None:
    """Let the environment see the torch of this one, and nothing else of it."""
    linked.mkdir()
    torch = find_spec("torch")
    if torch is None or torch.origin is None:
        sys.exit("make package: there is no torch here to use it with")
    for found in Path(torch.origin).parents[1].iterdir():
        if found.name.partition("-")[0].partition(".")[0] in ("torch", "torchgen", "functorch"):
            (linked / found.name).symlink_to(found)
    (site,) = place.glob("lib/python*/site-packages")
    (site / "torch.pth").write_text(f"{linked}\n", encoding="utf-8")


def run(command: list[str], cwd: Path | None = None) -> str:
    """Its output; ends everything when it fails. Nothing of this environment reaches it."""
    free = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=WITHIN_S, check=False, env=free)
    expect(done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


def expect(fulfilled: object, problem: str) -> None:
    """End with the problem where it is one."""
    if not fulfilled:
        sys.exit(f"make package: {problem}")


if __name__ == "__main__":
    main()
