"""What lies beside a checkpoint is none of its business: neighbours, deep trees, folders that may not be read."""

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

SCRIPT = """
    import os, sys
    from pathlib import Path
    import lightning_runs
    from safe_ckpt.core.formats.manifest import read_manifest
    from safe_ckpt.core.home.candidates import list_files, newest_first
    from safe_ckpt.lightning import SafeCheckpointCallback

    def marked(name, trainer, path):
        trainer.save_checkpoint(path)
        os.path.exists(f"/begin-{name}")
        trainer.save_checkpoint(path)
        os.path.exists(f"/end-{name}")

    def crowd(folder):
        for number in range(500):
            (folder / f"{number}.ckpt").touch()
            (folder.parent / f"{number}.ckpt").touch()
        deep = folder.joinpath(*"abcdefghijklmnop")
        deep.mkdir(parents=True)
        (deep / "x.ckpt").touch()

    pl = lightning_runs.package("lightning.pytorch")
    base = Path(sys.argv[1])
    for name in ("few", "many"):
        folder = base / name / "exp"
        model = lightning_runs.module_class(pl)()
        callback = SafeCheckpointCallback(folder)
        trainer = lightning_runs.trainer(pl, [callback], base, max_epochs=1)
        trainer.fit(model)
        if name == "many":
            crowd(folder)
        assert os.listdir(folder / ".safe_ckpt") == ["events.jsonl"]
        marked(f"{name}-fit", trainer, folder / "a.ckpt")
        trainer = lightning_runs.trainer(pl, [SafeCheckpointCallback(folder)], base)
        trainer.validate(model, verbose=False)
        marked(f"{name}-validate", trainer, folder / "b.ckpt")
        names = ("a", "b", Path(callback.best_model_path).stem)
        newest = sorted(names, key=lambda name: read_manifest(folder / f"{name}.ckpt").sequence)
        assert newest == [names[2], "a", "b"], newest
    lightning_runs.trainer(pl, [SafeCheckpointCallback(folder, resume="auto")], base, max_epochs=2).fit(model)
    print("done")
"""
TOOLS = ("strace", "setpriv")
CALLS = "trace=%file,getdents64"


def calls_between(lines, name):
    """The system calls of one save on the thread that trains."""
    start = next(number for number, line in enumerate(lines) if f"/begin-{name}" in line)
    end = next(number for number, line in enumerate(lines) if f"/end-{name}" in line)
    thread = lines[start].split()[0]
    return [line for line in lines[start + 1 : end] if line.split()[0] == thread]


@pytest.mark.skipif(not all(map(shutil.which, TOOLS)) or os.geteuid() != 0, reason="needs strace and setpriv, as root")
def test_a_save_looks_at_nothing_but_its_own_file(tmp_path):
    """save_checkpoint after fit, and without one: as many system calls among 500 neighbours and deep trees as among none; no
    folder is listed. fit takes, and resumes, a dirpath with a folder that this user may not read. The files go on in the order
    of commits, whoever saved them.
    """
    trace = tmp_path / "trace"
    for name in ("few", "many"):
        theirs = tmp_path / name / "exp/lost+found"
        theirs.mkdir(parents=True, mode=0o700)
        os.chown(theirs, 12345, 12345)
    # Root that may no longer read what belongs to others.
    command = [
        "setpriv",
        "--bounding-set",
        "-dac_override,-dac_read_search",
        sys.executable,
        "-c",
        textwrap.dedent(SCRIPT),
    ]
    command = ["strace", "-f", "--seccomp-bpf", "-qq", "-o", str(trace), "-e", CALLS, *command, str(tmp_path)]
    here = str(Path(__file__).parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110, check=False)
    assert done.stdout.endswith("done\n"), done.stderr
    assert "lost+found is passed over" in done.stderr
    lines = trace.read_text().splitlines()
    for how in ("fit", "validate"):
        few, many = calls_between(lines, f"few-{how}"), calls_between(lines, f"many-{how}")
        assert 0 < len(few) < 150
        assert len(few) == len(many), "\n".join([*few, "against", *many])
        assert not [line for line in many if "getdents" in line]
