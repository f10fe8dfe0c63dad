"""A checkpoint whose bytes are those that its manifest says, and which would run code when it is unpickled."""

import base64
import io
import os

import pytest
import torch
import xxhash
from lightning_runs import fit, names

from accelerate_runs import Counter, Training, fresh, registered
from kit.manifests import rewrite
from safe_ckpt import Checkpointer
from safe_ckpt.adapters import pickles
from safe_ckpt.adapters.one_shot import save_archive
from safe_ckpt.core.formats.manifest import read_manifest
from safe_ckpt.errors import HostileCheckpointError, NoValidCheckpointError, StateError, TamperedError
from safe_ckpt.lightning import loop_state


class Bomb:
    """Unpickled, it leaves a folder behind."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def put(folder, name, content):
    """Replace a file of a checkpoint, as somebody who knows the format would."""
    torch.save(content, folder / name)
    data = (folder / name).read_bytes()
    facts = {"size_bytes": len(data), "xxh3_128": xxhash.xxh3_128(data).hexdigest()}
    rewrite(folder, lambda manifest: [one.update(facts) for one in manifest["files"] if one["path"] == name])


def test_a_resume_of_plain_states_passes_over_a_hostile_checkpoint(tmp_path, caplog):
    """``resume`` goes on with the checkpoint before it, says why, and leaves the hostile one where it is."""
    boom = tmp_path / "boom"
    state = {"model": torch.nn.Linear(2, 2), "data": {"t": torch.ones(2), "n": 1}}
    with Checkpointer(tmp_path / "run") as ckpt:
        for step in (1, 2):
            ckpt.save(step, state)
        ckpt.wait()
        newest = tmp_path / "run/step-00000002"
        (file,) = [one.name for one in newest.glob("data*.pt")]
        put(newest, file, {"t": torch.ones(2), "n": Bomb(boom)})
        assert ckpt.resume(state).step == 1
        assert (
            f"step-00000002 is passed over: rank 0: {newest} ({file}): cannot be read without running code"
            in caplog.text
        )
        assert newest.is_dir()
        put(tmp_path / "run/step-00000001", file, Bomb(boom))
        with pytest.raises(NoValidCheckpointError, match="mkdir"):
            ckpt.resume(state)
    assert not boom.exists()


def test_a_file_with_a_right_digest_that_is_no_archive_is_passed_over(tmp_path):
    """Digests are right, and the bytes are no archive: the checkpoint before it."""
    state = {"data": {"t": torch.ones(2), "n": 1}}
    with Checkpointer(tmp_path) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state)
        ckpt.wait()
        newest = tmp_path / "step-00000002"
        (file,) = [one.name for one in newest.glob("data*.pt")]
        facts = {"size_bytes": 3, "xxh3_128": xxhash.xxh3_128(b"abc").hexdigest()}
        (newest / file).write_bytes(b"abc")
        rewrite(newest, lambda manifest: [one.update(facts) for one in manifest["files"] if one["path"] == file])
        assert ckpt.resume(state).step == 1


def test_lightning_passes_over_or_refuses_a_hostile_file(tmp_path, caplog):
    """``resume="auto"`` takes the checkpoint before it; ``ckpt_path`` is an error that names it; nothing runs."""
    boom, folder = tmp_path / "boom", tmp_path / "run"
    made, *_ = fit(folder, save_top_k=-1, filename="{step}", settings={"max_epochs": 1})
    (good,) = folder.glob("*.ckpt")
    content = torch.load(good, weights_only=True)
    hostile = folder / "step=99.ckpt"
    save_archive({**content, "more": Bomb(boom)}, hostile, sequence=read_manifest(good).sequence + 1, step=99)
    resumed, *_ = fit(folder, save_top_k=-1, filename="{step}", resume="auto", settings={"max_epochs": 2})
    assert resumed.global_step == 2 * made.global_step
    assert "step=99.ckpt is passed over" in caplog.text
    assert hostile.name in names(folder)
    for weights_only in (None, False):
        with pytest.raises(HostileCheckpointError, match="mkdir") as caught:
            fit_from(hostile, tmp_path, weights_only)
        assert caught.value.path == str(hostile)
    assert not boom.exists()


def fit_from(path, folder, weights_only):
    from lightning_runs import module_class, package, trainer

    from safe_ckpt.lightning import SafeCheckpointCallback

    pl = package("lightning.pytorch")
    made = trainer(pl, [SafeCheckpointCallback(dirpath=folder / "other")], folder)
    made.fit(module_class(pl)(), ckpt_path=path, weights_only=weights_only)


@pytest.mark.parametrize("file", ["optimizer.bin", "custom_checkpoint_0.pkl", "random_states_0.pkl"])
def test_accelerate_passes_over_or_refuses_a_hostile_file(tmp_path, file):
    """``load_state()`` takes the checkpoint before it; by name it is an error; also of the file that stock unpickles freely."""
    boom = tmp_path / "boom"
    with fresh(), registered(tmp_path / "run") as (accelerator, handle):
        training = Training(accelerator)
        accelerator.register_for_checkpointing(Counter())
        training.epoch()
        accelerator.save_state()
        expected = training.fingerprint()
        training.epoch()
        bad = accelerator.save_state()
        handle.wait()
        put(bad, file, {"count": Bomb(boom)})
        with pytest.raises(HostileCheckpointError, match=rf"{bad}.*{file}.*mkdir"):
            accelerator.load_state(bad)
        training.scramble()
        accelerator.load_state()
        assert training.fingerprint() == expected
        assert bad.exists()
    assert not boom.exists()


def test_states_sent_to_rank_0_run_no_code():
    """What goes to rank 0 is built without running code; a loader's state that is none is refused where it comes from."""
    state = {"rng": {"torch": torch.get_rng_state()}, "loaders": [{"at": 3, "seen": {1, 2}}]}
    assert (
        loop_state.assemble_notes({0: pickles.to_text(state, key="the state")})["ranks"][0]["loaders"]
        == state["loaders"]
    )
    assert loop_state.assemble_notes({0: pickles.to_text(state, key="the state"), 1: ""})["ranks"] == []
    with pytest.raises(StateError, match=r"has builtins.*Bomb|mkdir"):
        pickles.to_text({**state, "loaders": [Bomb("/nowhere")]}, key="the state")
    for text in (hostile_text("/nowhere/boom"), "no base64", base64.b64encode(b"no file").decode()):
        with pytest.raises(TamperedError, match=r"^the state of rank 1: "):
            loop_state.assemble_notes({0: pickles.to_text(state, key="the state"), 1: text})


def hostile_text(path):
    buffer = io.BytesIO()
    torch.save({"rng": Bomb(path)}, buffer)
    return base64.b64encode(buffer.getvalue()).decode()


@pytest.mark.parametrize(
    "notes",
    [
        {"removes": ["../victim.ckpt"]},
        {"removes": ["sub/../../victim.ckpt"]},
        {"removes": ["out/victim.ckpt"]},
        {"removes": [None]},
        {"links": {"../made.ckpt": None}},
        {"links": {"out/made.ckpt": None}},
        {"links": {"last.ckpt": "../victim.ckpt"}},
        {"links": {"last.ckpt": "out/victim.ckpt"}},
        {"links": {"a/b/c": "../../d", "a/b/c/last.ckpt": "../../../victim.ckpt"}},
        {"links": {"here/last.ckpt": "../victim.ckpt"}},
        {"links": {"last.ckpt": 3}},
        {"links": {".safe_ckpt/made.ckpt": None}},
        {"links": ["../made.ckpt"]},
    ],
)
def test_a_manifest_whose_due_work_leads_out_is_passed_over(tmp_path, caplog, notes):
    """What a checkpoint says was due at its commit is done within its directory alone; else the one before it is taken."""
    folder = tmp_path / "run"
    made, *_ = fit(folder, save_top_k=-1, filename="{step}", settings={"max_epochs": 1})
    (good,) = folder.glob("*.ckpt")
    content = torch.load(good, weights_only=True)
    victim = tmp_path / "victim.ckpt"
    save_archive(content, victim, sequence=1, step=1)
    (folder / "out").symlink_to(tmp_path)
    (folder / "here").symlink_to(".")
    for name in ("a/b", "d"):
        (folder / name).mkdir(parents=True)
    save_archive(content, folder / "step=99.ckpt", sequence=read_manifest(good).sequence + 1, step=99, notes=notes)
    resumed, *_ = fit(folder, save_top_k=-1, filename="{step}", resume="auto", settings={"max_epochs": 1})
    assert resumed.global_step == made.global_step
    assert "step=99.ckpt is passed over" in caplog.text
    assert not any((tmp_path / place / "made.ckpt").exists() for place in ("", "run", "run/.safe_ckpt"))
    assert not (folder / "last.ckpt").is_symlink()
    good.unlink()
    with pytest.raises(NoValidCheckpointError, match="its notes"):
        fit(folder, save_top_k=-1, filename="{step}", resume="auto", settings={"max_epochs": 1})
    assert victim.exists()


def test_links_and_removals_that_a_killed_job_left_are_made_good(tmp_path):
    """Links and removals that a killed job left are made good; of what a job did elsewhere no note is taken."""
    from safe_ckpt.adapters.extras import Link
    from safe_ckpt.lightning import resume as resuming

    folder = tmp_path / "run"
    fit(folder, save_top_k=-1, filename="{step}", settings={"max_epochs": 1})
    (older,) = folder.glob("*.ckpt")
    content = torch.load(older, weights_only=True)
    home = type("Held", (), {"path": folder})
    links = [
        Link(path=folder / "sub/last.ckpt", target="../step=99.ckpt"),
        Link(path=tmp_path / "last.ckpt", target="x"),
    ]
    notes = resuming.notes(home, links=links, to_delete=[older, tmp_path / "x.ckpt"], weights_only=False)
    assert notes["removes"] == [older.name]
    assert notes["links"] == {"sub/last.ckpt": "../step=99.ckpt"}
    (folder / "sub").mkdir()
    save_archive(content, folder / "step=99.ckpt", sequence=read_manifest(older).sequence + 1, step=99, notes=notes)
    fit(folder, save_top_k=-1, filename="{step}", resume="auto", settings={"max_epochs": 1})
    assert not older.exists()
    assert (folder / "sub/last.ckpt").resolve() == (folder / "step=99.ckpt").resolve()
