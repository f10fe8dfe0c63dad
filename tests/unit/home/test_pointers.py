"""What a small file such as ``latest`` names, however it was written: by a tool, by an editor, by ``echo``."""

import json
import os

import pytest
from typer.testing import CliRunner

from kit.manifests import checkpoint, rewrite
from safe_ckpt.core.home.candidates import list_directories
from safe_ckpt.core.home.retention import decide_deletions, keep_newest
from safe_ckpt.core.home.standing import Catalog, named_by, standing_of
from safe_ckpt.layouts.judges import judges_of
from safe_ckpt.tools.cli.app import app

WRITTEN = {
    "as a tool does": "{}",
    "echo": "{}\n",
    "an editor": "{}\n\n",
    "Windows": "{}\r\n",
    "blanks": "  {} \t",
    "a line before": "\n{}",
    "all": " \r\n\t{}\t\r\n ",
}
POINTERS = ("latest", "latest_universal", "newest.txt")
ways = pytest.mark.parametrize("written", WRITTEN.values(), ids=WRITTEN)


def write(folder, written, name, pointer="latest"):
    (folder / pointer).write_bytes(written.format(name).encode())


def made(folder, numbers, **notes):
    """Tags of DeepSpeed's, in the order of their commits; the last of them is the newest."""
    for number in numbers:
        path = folder / f"global_step{number}"
        path.mkdir(parents=True)
        checkpoint(path, {"x.json": b"{}"})
        facts = {"sequence": number, "step": number, "op_id": f"op{number}"}
        rewrite(path, lambda data, facts=facts: data.update(facts, notes={"adapter": "deepspeed", **notes}))


@ways
@pytest.mark.parametrize("pointer", POINTERS)
@pytest.mark.parametrize("name", ["step-9", "global_step10", "warmup/global_step10", "with a blank", "ü"])
def test_white_space_around_a_name_is_no_part_of_it(tmp_path, written, pointer, name):
    """Whatever the pointer is called, whether it names something below, and whether that is there."""
    write(tmp_path, written, name, pointer)
    assert named_by(tmp_path / pointer) == tmp_path / name
    (tmp_path / name).mkdir(parents=True)
    assert named_by(tmp_path / pointer) == tmp_path / name


@ways
@pytest.mark.parametrize("name", ["", ".", "..", "../run", "/etc", "a/../..", "latest", ".safe_ckpt/pending"])
def test_what_leads_nowhere_within_names_nothing(tmp_path, written, name):
    """Also with white space around it; nothing at all, a folder above, itself, the hidden one."""
    write(tmp_path, written, name)
    assert named_by(tmp_path / "latest") is None


@pytest.mark.parametrize("kind", ["missing", "empty", "folder", "pipe", "long", "loop"])
def test_what_is_no_pointer_names_nothing(tmp_path, kind):
    """And is not waited for."""
    pointer = tmp_path / "latest"
    make = {
        "missing": lambda: None,
        "empty": pointer.touch,
        "folder": pointer.mkdir,
        "pipe": lambda: os.mkfifo(pointer),
        "long": lambda: pointer.write_text("x" * 5000),
        "loop": lambda: pointer.symlink_to("latest"),
    }
    make[kind]()
    assert named_by(pointer) is None


@ways
def test_what_a_pointer_names_outlives_every_commit(tmp_path, written):
    """However old it is; what no pointer names goes."""
    made(tmp_path, [8, 9, 10, 11])
    write(tmp_path, written, "global_step9")
    found = list_directories(tmp_path)
    infos = sorted((one.info for one in found), key=lambda info: info.sequence)
    catalog = Catalog((one for one in found if one.info.step != 11), pointers=[tmp_path / "latest"])
    decision = decide_deletions(infos[-1], catalog, keep_newest(1))
    assert sorted(path.name for path in decision.to_delete) == ["global_step10", "global_step8"]


@ways
@pytest.mark.parametrize("below", ["", "warmup/"])
def test_a_resume_takes_what_the_pointer_names(tmp_path, written, below):
    """And neither the newest nor one before: as an engine chooses, and as the commands say. It is not deleted."""
    made(tmp_path / below, [9, 10, 11], latest=True, **({"tag": "x"} if below else {}))
    write(tmp_path, written, f"{below}global_step10")
    if not below:
        standing = standing_of(list_directories(tmp_path), judges_of(tmp_path))
        assert [one.path.name for one in standing.order] == ["global_step10", "global_step9"]
        assert tmp_path / "global_step10" in standing.protected
    done = CliRunner().invoke(app, ["resume-path", str(tmp_path)])
    assert done.stdout.strip() == str(tmp_path / below / "global_step10")
    rows = json.loads(CliRunner().invoke(app, ["list", str(tmp_path), "--json"]).stdout)
    assert rows[0]["name"].endswith("global_step10")
    CliRunner().invoke(app, ["gc", str(tmp_path / below), "--keep-last", "1", "--no-verify"])
    assert (tmp_path / below / "global_step10").is_dir()


@ways
def test_a_pointer_to_what_is_gone_hides_nothing(tmp_path, written):
    """The tag that it names was deleted by hand: those that it was to name are still resumed from."""
    made(tmp_path, [9, 10], latest=True)
    write(tmp_path, written, "global_step77")
    standing = standing_of(list_directories(tmp_path), judges_of(tmp_path))
    assert [one.path.name for one in standing.order] == ["global_step10", "global_step9"]
