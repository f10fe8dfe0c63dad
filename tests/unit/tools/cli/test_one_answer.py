"""One table of directories, and everybody who asks what a resume takes there: their answers are equal."""

import json
import shutil

import pytest
import torch
from typer.testing import CliRunner

from kit.manifests import rewrite
from safe_ckpt import CheckpointConfig, Checkpointer, Retention, Timeouts
from safe_ckpt.core.home.places import home_at
from safe_ckpt.core.home.standing import standing_of
from safe_ckpt.errors import NoValidCheckpointError
from safe_ckpt.tools.cli.app import app
from safe_ckpt.tools.doctor.check import CheckOptions, known_size
from safe_ckpt.tools.inspection.listing import list_existing

STEPS = (1, 2, 3)
QUICK = Timeouts(barrier_s=2)  # half of it is waited for a manifest that is missing


def made(folder, *tampering):
    with Checkpointer(folder, CheckpointConfig(timeouts=QUICK)) as ckpt:
        for step in STEPS:
            ckpt.save(step, state(step)).result(timeout_s=30)
    for tamper in tampering:
        tamper(folder)


def state(step):
    return {"w": {"t": torch.full((10,), float(step))}, "n": step}


def of(step):
    return f"step-{step:08d}"


def marked(step):
    def tamper(folder):
        health = {"healthy": False, "marked": True, "files": {}}
        rewrite(folder / of(step), lambda data: data.update(health=health))

    return tamper


def bad_manifest(step):
    return lambda folder: (folder / of(step) / "manifest.json").write_bytes(b"{}garbage")


def uncommitted(step):
    return lambda folder: (folder / of(step) / "manifest.json").unlink()


def older_number(step):
    """A job went back: what has the highest step was committed first."""
    return lambda folder: rewrite(folder / of(step), lambda data: data.update(sequence=1))


def copied(step):
    return lambda folder: shutil.copytree(folder / of(step), folder / "backup")


def weights(folder):
    shutil.copytree(folder / of(3), folder / "weights")
    rewrite(folder / "weights", lambda data: data.update(notes={"adapter": "weights"}, sequence=10**15))


CASES = {
    "all in order": ((), 3),
    "the newest is marked": ((marked(3),), 2),
    "the manifest of the newest is damaged": ((bad_manifest(3),), 2),
    "the newest was never committed": ((uncommitted(3),), 2),
    "marked, and the one before damaged": ((marked(3), bad_manifest(2)), 1),
    "a job went back": ((older_number(3),), 2),
    "a copy under another name": ((copied(3),), 3),
    "weights alone are newer": ((weights,), 3),
    "nothing is usable": ((marked(1), bad_manifest(2), uncommitted(3)), None),
}


def run(*args):
    done = CliRunner().invoke(app, [str(arg) for arg in args])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done


def standing(folder):
    order = standing_of(home_at(folder, lease_s=60.0).look()).order
    return order[0].manifest.step if order else None


def resumed(folder):
    into = state(0)
    with Checkpointer(folder, CheckpointConfig(timeouts=QUICK)) as ckpt:
        try:
            return ckpt.resume(into).step
        except NoValidCheckpointError:
            return None


def shown_first(folder):
    rows = json.loads(run("list", folder, "--json").stdout)
    usable = [row for row in rows if row["state"] == "valid" and not row["reason"]]
    return usable[0]["step"] if usable else None


def path_printed(folder):
    path = json.loads(run("resume-path", folder, "--json").stdout)["path"]
    return None if path is None else json.loads((type(folder)(path) / "manifest.json").read_text())["step"]


def kept_by_gc(folder):
    run("gc", folder, "--keep-last", "1")
    return standing(folder)


def kept_by_retention(folder):
    """Of the rules that keep one: what a resume took before is there until the next one is committed, and that one then."""
    before = standing(folder)
    with Checkpointer(folder, CheckpointConfig(timeouts=QUICK, retention=Retention(keep_last=1))) as ckpt:
        ckpt.save(9, {"w": {"t": torch.full((10,), float("nan"))}}).result(timeout_s=30)  # marked: nothing goes for it
    assert standing(folder) == before
    return before


def reported(folder):
    rows = [row for row in list_existing(folder)[0] if row.state == "valid" and not row.reason]
    return rows[0].step if rows else None


def examined(folder):
    _, how = known_size(folder, CheckOptions())
    name = how.removeprefix("as ").removesuffix(" is")
    return json.loads((folder / name / "manifest.json").read_text())["step"] if name else None


@pytest.mark.parametrize("case", CASES)
def test_all_commands_and_a_resume_agree_on_the_checkpoint_taken(tmp_path, case):
    """Standing, resume, list, resume-path, gc, retention and report of nine directories: what a resume takes is one thing."""
    tampering, expected = CASES[case]
    made(tmp_path / "run", *tampering)
    answers = {}
    for ask in (standing, shown_first, path_printed, reported, kept_by_gc, kept_by_retention, resumed):
        folder = tmp_path / ask.__name__
        shutil.copytree(tmp_path / "run", folder)
        answers[ask.__name__] = ask(folder)
    assert answers == dict.fromkeys(answers, expected)
    if expected is not None and "marked" not in case:
        assert examined(tmp_path / "run") == expected  # of an unhealthy one the size is as good
