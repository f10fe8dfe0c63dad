"""The table of how frameworks lay out their checkpoints: list, resume-path and each adapter's own resume choose the same."""

import importlib.util
import itertools
import json
from pathlib import Path

import pytest
import torch
import xxhash
from typer.testing import CliRunner

from safe_ckpt import CheckpointConfig, Timeouts
from safe_ckpt.adapters import Saver
from safe_ckpt.adapters.one_shot import save_archive
from safe_ckpt.adapters.saver import OpenHome
from safe_ckpt.core.formats.manifest import FileEntry, Manifest
from safe_ckpt.core.formats.verify import verify_share
from safe_ckpt.core.home.file_home import FileHome
from safe_ckpt.core.resuming import one_resume
from safe_ckpt.core.resuming.candidate import FileReader
from safe_ckpt.errors import CorruptCheckpointError
from safe_ckpt.layouts import table as layouts
from safe_ckpt.tools.cli.app import app
from support import flip_bit

ORDER = itertools.count(1)
WEIGHTS = {"w": torch.arange(2000.0)}


def run(*args):
    return CliRunner().invoke(app, list(map(str, args)))


def loops(step):
    return {"state_dict": WEIGHTS, "loops": {}, "lr_schedulers": [], "global_step": step}


def commit(path, number, adapter, **notes):
    """Turn a directory into one that we committed."""
    files = [file for file in sorted(path.rglob("*")) if file.is_file()]
    entries = tuple(
        FileEntry(
            path=file.relative_to(path).as_posix(),
            size_bytes=file.stat().st_size,
            xxh3_128=xxhash.xxh3_128(file.read_bytes()).hexdigest(),
            rank=0,
        )
        for file in files
    )
    facts = {"name": path.name, "sequence": next(ORDER), "step": number, "op_id": f"op{number}", "world_size": 1}
    manifest = Manifest(**facts, metrics={}, notes={"adapter": adapter, **notes}, files=entries)
    (path / "manifest.json").write_bytes(manifest.to_bytes())


def lightning_file(home, number, *, ours, complete):
    file = home / f"epoch={number}-step={10 * number}.ckpt"
    if ours:
        save_archive(loops(10 * number), file, sequence=next(ORDER), step=10 * number)
    else:
        torch.save(loops(10 * number) if complete else WEIGHTS | {"state_dict": WEIGHTS}, file)
    return file


def lightning_sharded(home, number, *, ours, complete):
    folder = home / f"epoch={number}-step={10 * number}.ckpt"
    folder.mkdir()
    torch.save(WEIGHTS, folder / "__0_0.distcp")
    if complete:
        torch.save(loops(10 * number), folder / layouts.META)
    if ours:
        commit(folder, 10 * number, "lightning")
    return folder


def lightning_deepspeed(home, number, *, ours, complete):
    folder = home / f"epoch={number}-step={10 * number}.ckpt"
    below = folder / layouts.LIGHTNING_TAG
    below.mkdir(parents=True)
    torch.save({**loops(10 * number), "module": WEIGHTS}, below / "mp_rank_00_model_states.pt")
    torch.save(WEIGHTS, below / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    if complete:
        (folder / layouts.LATEST).write_text(layouts.LIGHTNING_TAG)
    if ours:
        commit(folder, 10 * number, "lightning")
    return folder


def accelerate(home, number, *, ours, complete):
    folder = home / "checkpoints" / f"checkpoint_{number}"
    folder.mkdir(parents=True)
    torch.save(WEIGHTS, folder / "pytorch_model.bin")
    if complete:
        torch.save({"step": number}, folder / "random_states_0.pkl")
    if ours:
        commit(folder, number, "accelerate")
    return folder


def transformers(home, number, *, ours, complete):
    folder = home / f"checkpoint-{number}"
    folder.mkdir()
    torch.save(WEIGHTS, folder / "optimizer.pt")
    if complete:
        (folder / layouts.TRAINER_STATE).write_text("{}")
    if ours:
        commit(folder, number, "transformers")
    return folder


def deepspeed(home, number, *, ours, complete):
    folder = home / f"global_step{number}"
    folder.mkdir()
    if complete:
        torch.save(WEIGHTS, folder / "mp_rank_00_model_states.pt")
        (home / layouts.LATEST).write_text(folder.name)
    if ours:
        commit(folder, number, "deepspeed", latest=True, tag=folder.name)
    return folder


def dcp(home, number, *, ours, complete):
    folder = home / f"dcp{number}"
    folder.mkdir()
    if complete:
        (folder / layouts.DCP_METADATA).write_bytes(b"x")
    return folder


def by_lightning(home):
    from safe_ckpt.lightning.resume import choose

    return _chosen(home, lambda saver, workspace: choose(saver, OpenHome(held=workspace), ".ckpt"))


def by_accelerate(home):
    from safe_ckpt.accelerate.directories import candidates

    folder = home / "checkpoints"
    return _chosen(folder, lambda saver, workspace: _first(saver.engine, workspace, lambda: candidates(folder)))


def by_transformers(home):
    from safe_ckpt.transformers.saver import candidates

    return _chosen(home, lambda saver, workspace: _first(saver.engine, workspace, lambda: candidates(home)))


def by_deepspeed(home):
    from safe_ckpt.deepspeed.directories import order

    for path in order(home, None):
        try:
            verify_share(path, 0, 1)
        except CorruptCheckpointError:
            continue
        return path
    return None


def _first(engine, workspace, candidates):
    reader = FileReader(engine, lambda path: verify_share(path, 0, 1))
    request = one_resume.ResumeRequest(home=workspace, list_candidates=candidates, reader=reader)
    chosen = one_resume.choose(engine, request)
    return chosen.info.path if chosen else None


def _chosen(folder, choose):
    # Half of the limit is waited for a manifest that is missing.
    saver = Saver(CheckpointConfig(record_events=False, timeouts=Timeouts(barrier_s=2)))
    workspace = FileHome(folder, lease_s=60.0, hidden=folder.parent / ".held")
    workspace.open()
    try:
        return choose(saver, workspace)
    finally:
        workspace.close()
        saver.close()


LAYOUTS = {
    layouts.LIGHTNING_FILE.name: (lightning_file, by_lightning),
    layouts.LIGHTNING_SHARDED.name: (lightning_sharded, by_lightning),
    layouts.LIGHTNING_DEEPSPEED.name: (lightning_deepspeed, by_lightning),
    layouts.ACCELERATE.name: (accelerate, by_accelerate),
    layouts.TRANSFORMERS.name: (transformers, by_transformers),
    layouts.DEEPSPEED.name: (deepspeed, by_deepspeed),
    layouts.DCP.name: (dcp, None),
}


def test_every_layout_of_the_table_is_tried_here():
    """A layout that joins the table joins this test."""
    assert set(LAYOUTS) == {kind.name for kind in (layouts.LIGHTNING_FILE, *layouts.KINDS)}


@pytest.mark.parametrize("ours", [False, True], ids=["stock", "ours"])
@pytest.mark.parametrize("name", [name for name, (_, adapter) in LAYOUTS.items() if adapter is not None])
def test_list_and_resume_path_choose_what_the_adapter_takes(tmp_path, name, ours):
    """Three checkpoints and one that was cut off: all see the three, take the newest, and with that damaged the next one."""
    make, adapter = LAYOUTS[name]
    made = [make(tmp_path, number, ours=ours, complete=True) for number in (1, 10, 2)]  # by number, not by name
    newest = made[2] if ours or name == layouts.DEEPSPEED.name else made[1]
    make(tmp_path, 3, ours=False, complete=False)
    listed = json.loads(run("list", tmp_path, "--json").stdout)
    good = {row["name"] for row in listed if row["state"] == ("valid" if ours else "unverified")}
    assert {path.name for path in made} <= good
    assert listed[0]["name"] == newest.name
    assert agreed(tmp_path, adapter) == newest
    if ours:
        victim = next(
            file for file in sorted([newest, *newest.rglob("*")]) if file.is_file() and file.suffix != ".json"
        )
        flip_bit(victim, victim.stat().st_size // 2)
        assert agreed(tmp_path, adapter) == made[1]


@pytest.mark.parametrize("name", [name for name, (_, by) in LAYOUTS.items() if by not in (None, by_deepspeed)])
def test_a_newer_one_of_the_stock_tool_is_named_by_resume_path_and_a_resume(tmp_path, name, caplog):
    """Ours is taken, and the reason why the newer one is not is told once, by the command on stderr; never of an older one."""
    make, adapter = LAYOUTS[name]
    make(tmp_path, 1, ours=False, complete=True)
    taken = make(tmp_path, 2, ours=True, complete=True)
    assert agreed(tmp_path, adapter) == taken
    assert (run("resume-path", tmp_path).stderr, newer_in(caplog.text)) == ("", 0)
    stock = make(tmp_path, 10, ours=False, complete=True)
    assert agreed(tmp_path, adapter) == taken
    assert (newer_in(run("resume-path", tmp_path).stderr), newer_in(caplog.text)) == (1, 1)
    assert f"{stock} is of a later step than {taken}, which is taken" in caplog.text
    rejected = json.loads(run("resume-path", tmp_path, "--json").stdout)["rejected"]
    assert [(row["path"], newer_in(row["reason"])) for row in rejected] == [(str(stock), 1)]


def newer_in(text):
    return text.count("is of a later step than")


def agreed(home, adapter):
    """What resume-path says; the adapter itself takes the same."""
    said = run("resume-path", home)
    assert said.exit_code in (0, 3), said.output
    path = Path(said.stdout.strip())
    if adapter is not by_deepspeed or importlib.util.find_spec("deepspeed"):
        assert adapter(home) == path
    return path


def test_a_state_dict_that_no_adapter_resumes_from_is_not_chosen(tmp_path):
    """A state dict of a user's own making is converted or inspected, and no resume takes it."""
    dcp(tmp_path, 1, ours=False, complete=True)
    assert run("resume-path", tmp_path).exit_code == 1


@pytest.mark.parametrize("ours", [False, True], ids=["stock", "ours"])
def test_a_tag_that_latest_does_not_lead_to_is_taken_when_it_is_asked_for(tmp_path, ours):
    """DeepSpeed loads what ``latest`` names, also when newer tags lie beside it, and with no such file none of another tool."""
    first, second = (deepspeed(tmp_path, number, ours=ours, complete=True) for number in (1, 2))
    (tmp_path / layouts.LATEST).write_text(first.name)
    listed = json.loads(run("list", tmp_path, "--json").stdout)
    assert [row["name"] for row in listed] == [first.name, second.name]
    done = run("resume-path", tmp_path)
    assert Path(done.stdout.strip()) == first
    assert second.name in done.stderr
    (tmp_path / layouts.LATEST).unlink()
    done = run("resume-path", tmp_path)
    assert done.stdout.strip() == (str(second) if ours else "")
