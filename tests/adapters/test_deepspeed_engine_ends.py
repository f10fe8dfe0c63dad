"""``SafeCheckpointEngine``: how a program ends, and several ranks."""

import os
import signal
import textwrap
import time

import pytest
import torch

pytest.importorskip("deepspeed")
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed_engine_runs import (
    CONFIG,
    FILES,
    FRAIL,
    HEAD,
    LIMIT_S,
    MODEL,
    OPTIM,
    SEVERAL,
    begin,
    clean,
    complete,
    end_with,
    latest,
    names,
    opened,
    put,
    save_checkpoint,
    state_of,
    tag_of,
    until,
    written,
)

from safe_ckpt.core.formats.manifest import read_manifest
from safe_ckpt.core.formats.verify import verify
from safe_ckpt.deepspeed import SafeCheckpointEngine
from safe_ckpt.deepspeed.directories import CheckpointDirectory
from safe_ckpt.errors import (
    CommitOutcomeUnknown,
    ConfigError,
    CoordinationError,
    DesyncError,
    SafeCheckpointError,
    SaveError,
    StateError,
)
from safe_ckpt.testing import free_port, spawn_ranks, values
from support import kill_group, start_script, writer_processes

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("stop", ["", "signal_writer(signal.SIGSTOP);"])
def test_an_exception_with_a_save_under_way(tmp_path, stop):
    """An uncaught exception between save() and commit() ends with its traceback; the save is complete or named in an error."""
    done = end_with(f"save(2, {SEVERAL}); {stop} raise KeyError('mine')", tmp_path)
    assert done.returncode == 1, done.stderr
    assert "KeyError: 'mine'" in done.stderr
    if tag_of(2) in names(tmp_path):
        assert complete(tmp_path, 2, names=FILES, numel=SEVERAL)
        assert latest(tmp_path) == tag_of(2)
    else:
        assert f"{tag_of(2)} was not saved" in done.stderr
        assert names(tmp_path) == [tag_of(1), "latest"]
        assert latest(tmp_path) == tag_of(1)


@pytest.mark.parametrize(
    ("how", "code"),
    [("raise KeyError('mine')", 1), ("os.kill(os.getpid(), signal.SIGINT); signal.pause()", -2), ("sys.exit(3)", 3)],
)
def test_an_end_between_two_files_commits_none(tmp_path, how, code):
    """A program that ends within save_checkpoint, not all files handed over, leaves neither that tag nor a moved `latest`."""
    reset = "signal.signal(signal.SIGINT, signal.default_int_handler)"
    done = end_with(f"{reset}; save(2, 1000, then={how!r})", tmp_path)
    assert done.returncode == code, done.stderr
    assert names(tmp_path) == [tag_of(1), "latest"]
    assert latest(tmp_path) == tag_of(1)
    assert f"{tag_of(2)} was not saved" in done.stderr


def test_an_exception_while_the_writer_is_idle(tmp_path):
    """An uncaught exception after a commit ends with its traceback alone, and what was committed stays."""
    done = end_with("raise KeyError('mine')", tmp_path)
    assert done.returncode == 1, done.stderr
    assert done.stderr.rstrip().endswith("KeyError: 'mine'")
    assert names(tmp_path) == [tag_of(1), "latest"]


@pytest.mark.parametrize("harm", ["del engine", "signal_writer(signal.SIGSTOP)", "signal_writer(signal.SIGKILL)"])
def test_a_normal_end_commits_what_is_in_flight(tmp_path, harm):
    """A script that ends without commit() commits its last save first, whole, whatever becomes of the writer."""
    done = end_with(f"save(2, {SEVERAL}); {harm}", tmp_path)
    assert done.returncode == 0, done.stderr
    assert complete(tmp_path, 2, names=FILES, numel=SEVERAL)
    assert latest(tmp_path) == tag_of(2)


def test_a_normal_end_with_a_save_that_fails_says_so(tmp_path):
    """A last save that cannot be committed when the script ends is named in an error on stderr, and the end is not held."""
    done = end_with(f"signal_writer(signal.SIGSTOP); save(2, {SEVERAL})", tmp_path, FRAIL)
    assert f"{tag_of(2)} was not saved" in done.stderr
    assert "made no progress" in done.stderr
    assert names(tmp_path) == [tag_of(1), "latest"]


def test_validation_does_not_depend_on_assert(tmp_path):
    """With -O calls that are out of order raise ConfigError all the same, and do no harm to what is saved."""
    end = """
    def refused(what, *arguments, **more):
        try:
            what(*arguments, **more)
            print("accepted", what, arguments, more)
        except ConfigError as error:
            print("refused")

    def info(**more):
        return CheckpointCommitInfo(**{"tag": "global_step2", "save_dir": folder, "save_latest": True, **more})

    refused(put, 2, MODEL, 10)
    refused(engine.commit, info())
    for tag in ("", ".", "..", "a//b", "../up", "latest", ".safe_ckpt"):
        refused(engine.create, info(tag=tag))
    for path in ("x.pt", "global_step1/x.pt", "global_step2/../x.pt", "global_step2/a/b.pt", "global_step2"):
        engine.create(info())
        refused(engine.save, {}, os.path.join(folder, path))
    save(2, 1000)
    refused(engine.save, {}, os.path.join(folder, "global_step2", "late.pt"))
    refused(engine.commit, info(tag="global_step1"))
    refused(engine.commit, info(save_dir=folder + "/other"))
    print(engine.commit(info()))
    refused(engine.commit, info())
    """
    done = end_with(end, tmp_path, CONFIG, flags=("-O",))
    assert done.stdout.split("\n") == ["refused"] * 17 + ["True", "refused", ""], done.stdout + done.stderr
    assert done.returncode == 0
    assert complete(tmp_path, 2, names=FILES)
    assert names(tmp_path) == [tag_of(1), tag_of(2), "latest"]


def rank_files(ranks=2):
    return [MODEL, *(OPTIM.format(rank) for rank in range(ranks))]


def put_rank(engine, folder, number, rank):
    if rank == 0:
        put(engine, folder, number)
    put(engine, folder, number, name=OPTIM.format(rank))


def _rank_1_is_late(rank, folder):
    with opened() as engine:
        info, seen = begin(engine, folder, 1), None
        if rank == 1:
            until(lambda: (folder.parent / "committing").exists() and written(folder, 1, OPTIM.format(0)))
            seen = names(folder)
        put_rank(engine, folder, 1, rank)
        if rank == 0:
            (folder.parent / "committing").touch()
        assert engine.commit(info) is True
        return seen, complete(folder, 1, names=rank_files()), latest(folder)


def test_the_tag_appears_with_all_ranks_files(tmp_path):
    """While a rank has not saved yet neither the tag nor `latest` is there; after commit() on any rank both are, complete."""
    found = values(spawn_ranks(_rank_1_is_late, 2, tmp_path / "run", timeout_s=50))
    assert found == [(None, True, tag_of(1)), ([], True, tag_of(1))]


def _rank_1_is_killed(rank, folder):
    with opened() as engine:
        info = begin(engine, folder, 1)
        put_rank(engine, folder, 1, rank)
        engine.commit(info)
        info = begin(engine, folder, 2)
        put_rank(engine, folder, 2, rank)
        if rank == 1:
            until(lambda: written(folder, 2, OPTIM.format(1)))
            os.kill(os.getpid(), signal.SIGKILL)
        begun = time.monotonic()
        try:
            engine.commit(info)
        except SafeCheckpointError as error:
            return error, time.monotonic() - begun, names(folder), latest(folder)
        return None


def test_a_rank_that_is_killed_before_commit_leaves_the_earlier_tag(tmp_path):
    """A rank is killed with its file written and no commit() called: the others get a named error in time, nothing moves."""
    outcomes = spawn_ranks(_rank_1_is_killed, 2, tmp_path / "run", timeout_s=50)
    assert outcomes[1].exit_code == -signal.SIGKILL
    error, seconds, there, named = values(outcomes[:1])[0]
    assert isinstance(error, CoordinationError | SaveError | CommitOutcomeUnknown)
    assert "1" in str(error)
    assert seconds < LIMIT_S
    assert there == [tag_of(1), "latest"]
    assert named == tag_of(1)
    assert complete(tmp_path / "run", 1, names=rank_files())
    assert names(tmp_path / "run") == there
    assert clean(tmp_path / "run")


def _rank_1_cannot_pickle(rank, folder):
    engine = SafeCheckpointEngine(CONFIG)
    info, found = begin(engine, folder, 1), []
    if rank == 1:
        try:
            engine.save({"bad": lambda: None}, os.path.join(folder, tag_of(1), OPTIM.format(1)))
        except StateError as error:
            found.append(error.rank)
    else:
        put_rank(engine, folder, 1, rank)
    try:
        engine.commit(info)
    except SaveError as error:
        found.append((error.name, error.rank, OPTIM.format(1) in str(error)))
    begin(engine, folder, 2)
    put_rank(engine, folder, 2, rank)
    save_checkpoint(engine)
    globals()["_kept"] = engine  # so that it ends with the process and not before
    return found


def test_an_error_of_one_rank_is_that_of_all_and_the_end_commits_the_next(tmp_path):
    """What one rank cannot pickle fails commit() on all with its file named; the next save is committed at the ranks' end."""
    found = values(spawn_ranks(_rank_1_cannot_pickle, 2, tmp_path / "run", timeout_s=50))
    assert found == [[(tag_of(1), 1, True)], [1, (tag_of(1), 1, True)]]
    assert names(tmp_path / "run") == [tag_of(2), "latest"]
    assert complete(tmp_path / "run", 2, names=rank_files())
    assert clean(tmp_path / "run")


def _ranks_differ(rank, folder):
    with opened() as engine:
        found = []
        for info in (
            CheckpointCommitInfo(tag=f"step{rank}", save_dir=str(folder), save_latest=True),
            CheckpointCommitInfo(tag="step7", save_dir=str(folder), save_latest=rank == 0),
        ):
            try:
                engine.create(info)
            except DesyncError as error:
                found.append(sorted(error.values))
        info = begin(engine, folder, 1)
        put_rank(engine, folder, 1, rank)
        return found, engine.commit(info)


def test_ranks_that_ask_for_different_saves_are_told_so(tmp_path):
    """Different tags, or a different save_latest, are a DesyncError of create() on both ranks, and the next save works."""
    found = values(spawn_ranks(_ranks_differ, 2, tmp_path / "run", timeout_s=50))
    assert found == [([["0", "1"], ["0", "1"]], True)] * 2
    assert names(tmp_path / "run") == [tag_of(1), "latest"]
    assert complete(tmp_path / "run", 1, names=rank_files())


def _rank_0_is_refused(rank, folder):
    begun = time.monotonic()
    with opened() as engine:
        info = begin(engine, folder, 1)
        put_rank(engine, folder, 1, rank)
        engine.commit(info)
        info = begin(engine, folder, 1, save_latest=False)
        try:
            if rank == 0:
                engine.save(state_of(1), os.path.join(folder, "pytorch_model.bin"))
            return engine.commit(info)
        except SafeCheckpointError as error:
            return type(error).__name__, time.monotonic() - begun < LIMIT_S


def test_a_refused_save_of_one_rank_is_committed_on_none(tmp_path):
    """save_16bit_model after save_checkpoint: rank 0 is refused, no other rank's commit() is True, and the tag stays whole."""
    found = values(spawn_ranks(_rank_0_is_refused, 2, tmp_path / "run", timeout_s=50))
    assert complete(tmp_path / "run", 1, names=rank_files())
    assert found[0] == ("ConfigError", True)
    assert found[1] is not True


SCRIPT = """
    import sys
    import torch.distributed as dist
    rank = int(sys.argv[2])
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:" + sys.argv[3], rank=rank, world_size=2)
    {head}
    if rank == 0:
        engine.commit(save(2, 1000))
    else:
        save(2, 1000, then="raise KeyError('mine')")
"""


def test_an_exception_of_one_rank_fails_the_save_of_all(tmp_path):
    """One rank's script raises within save_checkpoint: the other's commit() names that rank, in time, and no part is there."""
    head = textwrap.dedent(HEAD).format(config=CONFIG, files=FILES, end="")
    rank_head = head.replace('"global_step{number}", name', '"global_step{number}", f"rank{rank}_{name}"')
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT).format(head=rank_head))
    port, begun = str(free_port()), time.monotonic()
    jobs = [start_script(tmp_path / "train.py", str(tmp_path / "run"), str(rank), port) for rank in range(2)]
    try:
        said = [job.communicate(timeout=LIMIT_S)[0] for job in jobs]
    finally:
        for job in jobs:
            kill_group(job)
    assert time.monotonic() - begun < LIMIT_S
    assert [job.returncode for job in jobs] == [1, 1], said
    assert "KeyError: 'mine'" in said[1]
    assert f"{tag_of(2)} was not saved: rank 1 failed" in said[0]
    assert names(tmp_path / "run") == [tag_of(1), "latest"]
    assert latest(tmp_path / "run") == tag_of(1)
    assert writer_processes() == []
    assert clean(tmp_path / "run")


def _real_engines(rank, folder):
    import deepspeed_runs as runs

    run = runs.engine(2, width=64)
    run.checkpoint_engine = SafeCheckpointEngine(CONFIG)
    runs.train(run, rank, 0, 2)
    run.save_checkpoint(str(folder), client_state={"n": 1})
    assert run.checkpoint_engine.get_commit_info().tag == tag_of(2)
    runs.train(run, rank, 2, 3)
    assert (latest(folder), run.checkpoint_engine.get_commit_info()) == (tag_of(2), None)
    for tag in ("x", "y", "y"):
        run.save_checkpoint(str(folder), tag=tag)
    own = run._save_zero_checkpoint
    run._save_zero_checkpoint = lambda *_: 1 / 0
    for then, cause in ((CheckpointDirectory.settle, "another engine"), (lambda: None, "interrupted")):
        with pytest.raises(ZeroDivisionError):
            run.save_checkpoint(str(folder), tag="part")
        then()  # as load_checkpoint of another engine does
        with pytest.raises(SaveError, match=cause):
            runs.train(run, rank, 3, 4)
    run._save_zero_checkpoint = own
    runs.train(run, rank, 3, 4)
    want = runs.weights(run)
    run.save_checkpoint(str(folder), tag="last")
    run.destroy()
    again = runs.engine(2, width=64)
    again.checkpoint_engine = SafeCheckpointEngine(CONFIG)
    again.load_checkpoint(str(folder))
    same = torch.equal(runs.weights(again), want)
    again.destroy()
    return same, names(folder)


def test_a_real_engine_commits_before_its_next_step_and_at_its_end(tmp_path):
    """DeepSpeed drives it: saves in a row are all committed, an interrupted one is not and says so, the last at destroy()."""
    found = values(spawn_ranks(_real_engines, 2, tmp_path, timeout_s=50))
    kept = [tag_of(2), "last", "latest", "x", "y", "zero_to_fp32.py", "zero_to_torch.py"]
    assert found == [(True, kept)] * 2
    assert latest(tmp_path) == "last"
    for tag in (tag_of(2), "x", "y", "last"):
        assert len(read_manifest(tmp_path / tag).files) == 3
        verify(tmp_path / tag, read_manifest(tmp_path / tag))


def test_a_deepspeed_that_does_not_show_when_a_save_is_complete_is_refused(monkeypatch):
    """One that asks is_decoupled() before its last file, or not at all, is refused at construction, by its version."""

    def too_early(self, info):
        self.checkpoint_engine.create(info)
        self.checkpoint_engine.is_decoupled()
        self._save_checkpoint(info)
        self._save_zero_checkpoint(info)

    def never(self, info):
        self.checkpoint_engine.create(info)
        self._save_checkpoint(info)
        self._save_zero_checkpoint(info)

    for changed in (too_early, never):
        monkeypatch.setattr(DeepSpeedEngine, "save_checkpoint", changed)
        with pytest.raises(ConfigError, match=r"DeepSpeed \d.* does not ask is_decoupled\(\)"):
            SafeCheckpointEngine()
