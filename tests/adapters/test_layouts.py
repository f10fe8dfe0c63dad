"""The table of how frameworks name and complete their checkpoints."""

import dataclasses

import pytest
import torch
from accelerate import utils
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

import safe_ckpt
from safe_ckpt.errors import NoValidCheckpointError
from safe_ckpt.layouts import table as layouts
from safe_ckpt.layouts.table import layout_of


def archive(path, content=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as stream:
        torch.save(content or {}, stream)


def cut(path):
    path.write_bytes(path.read_bytes()[:-30])


# The layout -> a name that its framework gives, and the files in the order in which it writes them ("" for the path itself).
MADE = {
    "Lightning file": ("epoch=0-step=7.ckpt", [""], 7),
    "Lightning directory": ("step=7.ckpt", ["__0_0.distcp", ".metadata", "meta.pt"], -1),
    "Lightning DeepSpeedStrategy directory": ("a.ckpt", ["checkpoint/mp_rank_00_model_states.pt", "latest"], -1),
    "Accelerate checkpoint": ("checkpoint_3", ["model.safetensors", "optimizer.bin", "random_states_0.pkl"], 3),
    "Transformers checkpoint": ("checkpoint-12", ["optimizer.pt", "trainer_state.json"], 12),
    "DeepSpeed tag": ("global_step10", ["zero_pp_rank_0_mp_rank_00_optim_states.pt"], 10),
    "torch.distributed.checkpoint directory": ("dcp", ["__0_0.distcp", ".metadata"], -1),
}


def make(folder, name):
    path = folder / MADE[name][0]
    for file in MADE[name][1]:
        archive(path / file if file else path)
    return path


def test_every_layout_of_the_table_is_made_here():
    """A new row needs an example."""
    assert {kind.name for kind in (layouts.LIGHTNING_FILE, *layouts.KINDS)} == set(MADE)


@pytest.mark.parametrize("name", MADE)
def test_a_complete_checkpoint_of_each_framework_is_recognised(tmp_path, name):
    """Each layout by its name, with the number in the name."""
    path = make(tmp_path, name)
    layout = layout_of(path)
    assert (layout.name, layout.step, layout.problem) == (name, MADE[name][2], "")
    is_sharded = name in ("Lightning directory", "Lightning DeepSpeedStrategy directory")
    assert layouts.is_lightning_directory(path) is is_sharded


# Without the last file: what is recognised, and its problem. None: nothing. A sharded directory is one of plain DCP then, which
# no resume of Lightning takes.
CUT_SHORT = {
    "Lightning file": None,
    "Lightning directory": ("torch.distributed.checkpoint directory", ""),
    "Lightning DeepSpeedStrategy directory": None,
    "Accelerate checkpoint": ("Accelerate checkpoint", "without random_states_0.pkl it is not complete"),
    "Transformers checkpoint": ("Transformers checkpoint", "without trainer_state.json it is not complete"),
    "DeepSpeed tag": ("DeepSpeed tag", "it holds no states of DeepSpeed"),
    "torch.distributed.checkpoint directory": None,
}


@pytest.mark.parametrize("name", MADE)
def test_a_checkpoint_without_its_last_file_is_not_complete(tmp_path, name):
    """What a framework writes last is what tells that it came to the end."""
    path = make(tmp_path, name)
    (path / MADE[name][1][-1]).unlink()
    layout = layout_of(path)
    assert not layouts.is_lightning_directory(path)
    if CUT_SHORT[name] is None:
        assert layout is None
    else:
        recognised, problem = CUT_SHORT[name]
        assert layout.name == recognised
        assert problem in layout.problem
        assert bool(problem) is bool(layout.problem)


def test_a_file_called_latest_alone_makes_no_checkpoint_of_lightnings(tmp_path):
    """DeepSpeed writes one beside its tags, whoever uses it: Lightning's has its own tag with states, too."""
    path = make(tmp_path, "Lightning DeepSpeedStrategy directory")
    (path / "checkpoint/mp_rank_00_model_states.pt").unlink()
    assert not layouts.is_lightning_directory(path)
    assert layout_of(path) is None


@pytest.mark.parametrize(("name", "file"), [("Accelerate checkpoint", 2), ("Transformers checkpoint", 0)])
def test_a_checkpoint_with_a_file_cut_off_is_not_complete(tmp_path, name, file):
    """A file that does not end as an archive was not written to its end."""
    path = make(tmp_path, name)
    cut(path / MADE[name][1][file])
    assert "was not written to its end" in layout_of(path).problem


def test_a_lightning_files_step_and_kind_come_from_its_content(tmp_path):
    """The step, and whether there is more than weights."""
    path = make(tmp_path, "Lightning file")
    layout = layout_of(path)
    assert layouts.facts_file(path) == path
    whole = layout.with_content({"global_step": 9, "state_dict": {}, "loops": {}, "lr_schedulers": []})
    assert (whole.step, whole.problem) == (9, "")
    for alone in ({}, {"loops": {}}):  # Lightning adds its loops to weights alone, too
        weights = layout.with_content({"global_step": 9, "state_dict": {}, **alone})
        assert (weights.step, weights.problem) == (9, layouts.WEIGHTS_ONLY)
    assert layout.with_content([1]) == dataclasses.replace(layout, problem="is no checkpoint")


def test_other_folders_files_and_absent_paths_are_no_checkpoint(tmp_path):
    """A folder of other files, a text, and what is not there."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "notes.txt").write_text("x")
    assert [layout_of(tmp_path / name) for name in ("logs", "notes.txt", "gone")] == [None, None, None]


def test_file_names_in_the_table_are_those_of_the_frameworks():
    """What the table spells out is what these releases write."""
    assert f"{utils.RNG_STATE_NAME}_0.pkl" == layouts._RANDOM_STATES
    assert layouts.TRANSFORMERS.number_of(f"{PREFIX_CHECKPOINT_DIR}-5") == 5
    from transformers.trainer import TRAINER_STATE_NAME

    assert TRAINER_STATE_NAME == layouts.TRAINER_STATE
    from lightning.pytorch.strategies.model_parallel import _METADATA_FILENAME

    assert _METADATA_FILENAME == layouts.META


# A pickle without Lightning's own parts is no checkpoint of its, and a step in no name is not known.
STEPS = {name: MADE[name][2] for name in MADE if not name.startswith("Lightning")}


def placed(folder, name):
    """One checkpoint as a stock tool leaves it."""
    made = make(folder, name)
    if name == "DeepSpeed tag":
        (folder / "latest").write_text(made.name)
    return made if name != "torch.distributed.checkpoint directory" else made.rename(folder / "step_3")


@pytest.mark.parametrize("name", STEPS)
def test_what_a_stock_tool_saved_is_found(tmp_path, name):
    """Its path and its step; nobody has written down what its bytes should be."""
    path, step = placed(tmp_path, name), 3 if name.startswith("torch") else STEPS[name]
    one = safe_ckpt.newest(tmp_path)
    assert (one.path, one.step, one.verified, one.whole) == (path, step, False, True)
    assert [(one.path, one.step) for one in safe_ckpt.checkpoints(tmp_path)] == [(path, step)]
    assert [(one.path, one.pinned) for one in safe_ckpt.follow(tmp_path, timeout_s=0)] == [(path, False)]
    assert safe_ckpt.newest(path).path == path
    with safe_ckpt.pin(path) as held:
        assert held.path == path


@pytest.mark.parametrize("name", ["Accelerate checkpoint", "Transformers checkpoint"])
def test_what_a_stock_tool_has_not_finished_is_not_taken(tmp_path, name):
    """Without the file that comes last it is not whole, and a follower waits for that."""
    path = make(tmp_path, name)
    last = path / MADE[name][1][-1]
    moved = last.rename(tmp_path.parent / f"{tmp_path.name}-last")
    with pytest.raises(NoValidCheckpointError, match="not complete"):
        safe_ckpt.newest(tmp_path)
    (one,) = safe_ckpt.checkpoints(tmp_path)
    assert not one.whole
    assert "not complete" in one.problem
    follower = safe_ckpt.follow(tmp_path, timeout_s=0)
    assert next(follower, None) is None
    moved.rename(last)
    assert [one.path for one in safe_ckpt.follow(tmp_path, timeout_s=0)] == [path]
