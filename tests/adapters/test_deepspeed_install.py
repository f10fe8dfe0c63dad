"""``install(engine)``: real DeepSpeed engines on two ranks, killed, resumed and compared bit for bit."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from kit.inside import writer_of
from kit.patience import wait_until

pytest.importorskip("deepspeed")
import deepspeed_runs as runs
from deepspeed_runs import has_nvme, spawn

from kit import warm
from kit.ranks import spawn_ranks, values
from kit.thorough import THOROUGH
from safe_ckpt import CheckpointConfig, Checkpointer, Retention, Timeouts, WriterConfig
from safe_ckpt.core.formats.manifest import read_manifest
from safe_ckpt.errors import (
    CheckpointNotFoundError,
    ClosedError,
    ConfigError,
    CorruptCheckpointError,
    DesyncError,
    DirectoryError,
    NoValidCheckpointError,
    PeerLostError,
    RestoreError,
    SafeCheckpointError,
    StateError,
    UnexpectedError,
)
from support import flip_bit

pytestmark = pytest.mark.timeout(300)


def offloads():
    yield from ((0, "none"), (2, "none"), (1, "none"), (2, "cpu")) if THOROUGH else ()
    yield (3, "cpu")
    yield pytest.param(
        3,
        "nvme",
        marks=pytest.mark.skipif(
            not has_nvme(), reason="DeepSpeed's asynchronous I/O is not built: make test-deepspeed, with libaio-dev"
        ),
    )


@pytest.mark.parametrize(("stage", "offload"), list(offloads()))
def test_a_killed_job_goes_on_bit_for_bit_and_stock_deepspeed_reads_it_too(tmp_path, stage, offload):
    """At every ZeRO stage, whatever is offloaded, a resumed run equals one that was never interrupted."""
    each = 20 if THOROUGH else 3
    tags = [None, *map(str, range(each)), *["same"] * each] if offload == "nvme" else [None]
    outcomes = spawn(runs.save_and_die, str(tmp_path), stage, offload, tags)
    assert [(outcome.exit_code, outcome.error) for outcome in outcomes] == [(-9, None)] * 2
    tag = "same" if offload == "nvme" else "global_step3"
    assert (tmp_path / "out" / "latest").read_text() == tag
    if offload == "nvme":
        stored = sorted(path.name for path in (tmp_path / "out" / tag / "offloaded_tensors").iterdir())
        assert stored == ["rank00", "rank00.rank00001"]  # both call theirs rank00
    if stage in (1, 3) and offload != "nvme":
        check_conversions(tmp_path, stage)
    if stage == 1:
        assert values(spawn(universal, str(tmp_path))) == [True] * 2
    if offload != "nvme":  # there the stock one begins with zero moments
        assert values(spawn(resumed, str(tmp_path), stage, offload, True)) == [(True, tag)] * 2
    assert values(spawn(resumed, str(tmp_path), stage, offload, False)) == [(True, tag)] * 2


def resumed(rank, folder, stage, offload, stock):
    return runs.resume(rank, folder, stage, offload, stock=stock)


def check_conversions(folder: Path, stage: int) -> None:
    """DeepSpeed's own tools for what it wrote take it for theirs."""
    out = folder / "out"
    run_tool([sys.executable, str(out / "zero_to_fp32.py"), ".", str(folder / "fp32")], out)
    found = torch.load(folder / "fp32" / "pytorch_model.bin")
    assert sorted(found) == ["0.bias", "0.weight", "2.weight", "3.bias", "3.weight"]
    arguments = ["--input_folder", str(out / "global_step3"), "--output_folder", str(folder / "universal")]
    arguments += ["--inject_missing_state"] if stage < 3 else []  # which clients of DeepSpeed add by themselves
    run_tool([sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *arguments], out)
    whole = torch.load(folder / "universal" / "zero" / "2.weight" / "fp32.pt", weights_only=False)
    whole = whole["param"] if isinstance(whole, dict) else whole
    assert torch.equal(whole.reshape(-1), found["2.weight"].reshape(-1)), stage


def universal(rank, folder):
    """What was converted is loaded on all ranks or on none, and is exact."""
    folder = Path(folder)
    run = runs.engine(1, width=64, checkpoint={"load_universal": True})
    with installed(run):
        with at_once(), pytest.raises(ValueError, match="latest_universal does not exist"):
            run.load_checkpoint(folder / "out")
        part = folder / "universal" / "zero" / "2.weight" / "fp32.pt"
        for harm in (
            lambda: part.rename(folder / "away"),
            lambda: part.write_bytes((folder / "away").read_bytes()[:-50]),
        ):
            if rank == 0:
                harm()
            torch.distributed.barrier()
            with at_once(), pytest.raises(RestoreError, match=r"fp32.pt.*missing, or cut off.*ds_to_universal"):
                run.load_checkpoint(folder)
            torch.distributed.barrier()
        if rank == 0:
            (folder / "away").replace(part)
        torch.distributed.barrier()
        assert run.load_checkpoint(folder)[1]["epoch"] == 7
    runs.train(run, rank, 3, 6)
    return torch.equal(runs.weights(run), torch.load(folder / f"want{rank}.pt"))


def run_tool(command, cwd):
    done = warm.run(command, cwd=cwd, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def installed(run, **settings):
    from safe_ckpt.deepspeed import install

    return install(run, CheckpointConfig(**settings))


def using(rank, folder):
    """What a user may do, and do wrong, on one engine of ZeRO-2."""
    folder = Path(folder)
    out = folder / "out"
    run = runs.engine(2, width=64)
    before = (run.save_checkpoint, run.load_checkpoint, run.save_16bit_model)
    check_settings(run)
    first = installed(run)
    handle = installed(run, retention=Retention(keep_last=2))  # again, as a notebook does
    assert first.closed
    assert run.load_checkpoint(str(out)) == (None, None)
    assert handle.resume(out) is None  # a fresh run
    check_saving(run, handle, rank, out)
    check_loading(run, handle, rank, out)
    check_names(run, handle, rank, out)
    check_mistakes(run, handle, rank, out)
    check_two_engines(run, folder / "two")
    handle.remove()
    handle.remove()
    assert (run.save_checkpoint, run.load_checkpoint, run.save_16bit_model) == before
    run.save_checkpoint(str(folder / "stock"), tag="theirs", client_state={"epoch": 1})
    for tag in ("both", "both/in"):
        run.save_checkpoint(str(folder / "nested"), tag=tag)
    with installed(run):
        with pytest.raises(DirectoryError, match="checkpoints are kept in it"):
            run.save_checkpoint(str(folder / "nested"), tag="both")
        path, client = run.load_checkpoint(str(folder / "stock"))
        assert client["epoch"] == 1
        run.save_checkpoint(str(folder / "stock"), tag="theirs", client_state={"epoch": 2})
    assert run.load_checkpoint(str(folder / "stock"))[1]["epoch"] == 2
    record = [json.loads(line) for line in (folder / "stock/.safe_ckpt/events.jsonl").read_text().splitlines()]
    assert [row["path"] for row in record if row["event"] == "resumed"] == [str(folder / "stock/theirs")]
    check_destroy(run, folder / "left")


def check_two_engines(run, out):
    """A second engine of the process sees what the first one is saving, and may save there; then the first one again."""
    other = runs.engine(2, width=64)
    handle = installed(other)
    run.save_checkpoint(out, tag="1", client_state={"n": 1})
    assert other.load_checkpoint(out)[1]["n"] == 1
    other.save_checkpoint(out, tag="2", client_state={"n": 2})
    assert run.load_checkpoint(out)[1]["n"] == 2
    run.save_checkpoint(out, tag="3", client_state={"n": 3})
    assert other.load_checkpoint(out)[1]["n"] == 3
    other.destroy()
    assert handle.closed
    for call in (other.save_checkpoint, other.load_checkpoint, other.save_16bit_model):
        with pytest.raises(ClosedError, match="destroy"):
            call(out.parent / "new")
    assert not (out.parent / "new").exists()


def check_destroy(run, out):
    """destroy() finishes what is in flight and gives the directory back, on every rank."""
    handle = installed(run)
    run.save_checkpoint(str(out), tag="last")
    run.destroy()
    assert handle.closed
    with Checkpointer(out) as ckpt:
        assert ckpt.save(1, {"x": 1}).result(timeout_s=60).step == 1
    assert (out / "last/manifest.json").exists()


def check_settings(run):
    with pytest.raises(ConfigError, match="snapshot"):
        installed(run, snapshot="overlapped")


def latest(out):
    return (out / "latest").read_text()


def tags(out):
    return sorted(path.name for path in out.iterdir() if path.is_dir() and path.name != ".safe_ckpt")


def seen(handle, out):
    """What ``latest`` names and which tags there are, once all is over on rank 0, which deletes."""
    handle.wait()
    torch.distributed.barrier()
    found = (latest(out), tags(out))
    torch.distributed.barrier()
    return found


def check_saving(run, handle, rank, out):
    for number in range(3):
        assert run.save_checkpoint(str(out), tag=f"t{number}", client_state={"n": number}) is True
    assert seen(handle, out) == ("t2", ["t1", "t2"])
    # What is not to be named is kept beside what is, and what is named is never deleted.
    for number in range(3):
        run.save_checkpoint(out, tag=f"u{number}", save_latest=False)
    assert seen(handle, out) == ("t2", ["t2", "u1", "u2"])
    if rank == 0:
        (out / "u2" / "notes.txt").write_text("mine")
    run.save_checkpoint(out, tag="u2")
    assert seen(handle, out)[0] == "u2"
    assert (out / "u2" / "notes.txt").read_text() == "mine"
    assert os.access(out / "zero_to_fp32.py", os.X_OK)
    assert not list((out / ".safe_ckpt" / "pending").glob("*"))


def check_loading(run, handle, rank, out):
    run.save_checkpoint(out, tag="a", client_state={"n": 10})
    run.save_checkpoint(out, tag="b", client_state={"n": 11}, metrics={"loss": 0.5})
    assert seen(handle, out) == ("b", ["a", "b"])
    assert (handle.resume(out)["n"], handle.resume(out / "a")["n"]) == (11, 10)
    assert [read_manifest(out / name).metrics for name in "ab"] == [{}, {"loss": 0.5}]
    with pytest.raises(CheckpointNotFoundError, match="no such checkpoint"):
        handle.resume(out / "c")
    with pytest.raises(StateError, match="loss"):
        run.save_checkpoint(out, tag="c", metrics={"loss": "low"})
    assert run.load_checkpoint(str(out))[1]["n"] == 11
    path, client = run.load_checkpoint(str(out), tag="a")
    assert (Path(path).parent.name, client["n"]) == ("a", 10)
    with pytest.raises(CheckpointNotFoundError, match="no such checkpoint"):
        run.load_checkpoint(str(out), tag="none")
    with pytest.raises(CheckpointNotFoundError, match="no such checkpoint"):
        run.load_checkpoint(str(out), tag="sub/a")
    check_arguments_of_loading(run, rank, out)
    torch.distributed.barrier()
    if rank == 0:
        (out / "latest").write_text("../out/a")
    torch.distributed.barrier()
    assert run.load_checkpoint(str(out))[1]["n"] == 11  # it names no tag: the newest
    torch.distributed.barrier()
    if rank == 0:
        (out / "latest").write_text("b")
    torch.distributed.barrier()
    if rank == 1:
        flip_bit(out / "b" / "zero_pp_rank_1_mp_rank_00_optim_states.pt", 5000)
    torch.distributed.barrier()
    with pytest.raises(CorruptCheckpointError, match="rank_1"):
        run.load_checkpoint(str(out), tag="b")
    assert run.load_checkpoint(str(out))[1]["n"] == 10  # the one before it
    torch.distributed.barrier()
    if rank == 0:
        flip_bit(out / "a" / "mp_rank_00_model_states.pt", 5000)
    torch.distributed.barrier()
    with pytest.raises(NoValidCheckpointError) as caught:
        handle.resume(out)
    assert {"a", "b"} <= set(caught.value.rejected)
    assert tags(out) == ["a", "b"]  # nothing was moved away
    run.save_checkpoint(out, tag="c")
    assert seen(handle, out) == ("c", ["b", "c"])


def check_arguments_of_loading(run, rank, out):
    """What one rank gives wrong, or raises, is told to both at once; the rank itself raises its own."""
    with at_once(), pytest.raises(ValueError, match="load_dir must be a non-empty string, got None"):
        run.load_checkpoint(None if rank else out)
    with at_once(), pytest.raises(ConfigError, match="name of a directory"):
        run.load_checkpoint(out, tag="../a" if rank else "a")
    with at_once(), pytest.raises(DesyncError, match="tag"):
        run.load_checkpoint(out, tag="a" if rank else "b")

    def loads(src, dst):
        if rank == 1:
            raise KeyError("embedding")
        dst.load_state_dict(src)

    mine, others = pytest.raises(KeyError, match="embedding"), pytest.raises(UnexpectedError, match=r"rank 1.*KeyError")
    with at_once(), mine if rank == 1 else others as caught:
        run.load_checkpoint(out, tag="a", custom_load_fn=loads)
    if rank == 1:
        assert caught.traceback[-1].name == "loads"
    assert run.load_checkpoint(out, tag="a", custom_load_fn=lambda src, dst: dst.load_state_dict(src))[1]["n"] == 10


@contextlib.contextmanager
def at_once():
    """Long before the deadline of a rank that did not come; this machine may be busy."""
    begun = time.monotonic()
    yield
    assert time.monotonic() - begun < 15


def check_names(run, handle, rank, out):
    """Tags in folders, names of ``client_state`` that DeepSpeed has itself, and weights alone."""
    for number in range(3):
        run.save_checkpoint(out, tag=f"warmup/{number}", client_state={"lr_scheduler": {"mine": number}, "n": number})
    assert seen(handle, out)[0] == "warmup/2"
    assert tags(out / "warmup") == ["1", "2"]
    assert run.load_checkpoint(out, load_lr_scheduler_states=False)[1]["lr_scheduler"] == {"mine": 2}
    if rank == 0:
        flip_bit(out / "warmup" / "2" / "mp_rank_00_model_states.pt", 5000)
    torch.distributed.barrier()
    assert run.load_checkpoint(out, load_lr_scheduler_states=False)[1]["n"] == 1  # the one before it in that folder
    with pytest.raises(DirectoryError, match="is a tag itself"):
        run.save_checkpoint(out, tag="warmup/1/in")
    torch.distributed.barrier()
    if rank == 0:  # as when the job was killed before it wrote its first one
        (out / "latest").rename(out / "away")
    torch.distributed.barrier()
    assert run.load_checkpoint(out, load_lr_scheduler_states=False)[1]["n"] == 1
    assert run.load_checkpoint(out.parent) == (None, None)  # what lies in ``out`` was saved there, not here
    torch.distributed.barrier()
    if rank == 0:
        (out / "away").rename(out / "latest")
    torch.distributed.barrier()
    with pytest.raises(DirectoryError, match="checkpoints are kept in it"):
        run.save_checkpoint(out, tag="warmup")
    run.save_checkpoint(out, tag="c")
    assert seen(handle, out)[0] == "c"
    check_weights(run, rank, out)


def check_weights(run, rank, out):
    """save_16bit_model replaces one file in one step, or leaves it as it is, on every rank alike."""
    own = type(run).module_state_dict
    for content in ("first", "second"):
        run.module.state_dict()["0.bias"].fill_(len(content))
        assert run.save_16bit_model(out, "weights.bin") is True
        found = torch.load(out / "weights.bin", weights_only=True)
        assert float(found["0.bias"][0]) == len(content)
        torch.distributed.barrier()
    before = os.stat(out / "weights.bin").st_ino
    with pytest.raises(ValueError, match="save_dir must be a non-empty string, got ''"):
        run.save_16bit_model("" if rank else out)
    with pytest.raises(DirectoryError, match="is a directory"):
        run.save_16bit_model(out, "c")
    if rank == 0:
        run.module_state_dict = lambda **_: 1 / 0
    with pytest.raises(ZeroDivisionError) if rank == 0 else pytest.raises(UnexpectedError, match="ZeroDivision"):
        run.save_16bit_model(out, "weights.bin")
    run.__dict__.pop("module_state_dict", None)
    assert run.module_state_dict.__func__ is own
    assert run.save_fp16_model(str(out / "deep")) is True
    assert "pytorch_model.bin" in os.listdir(out / "deep")
    assert os.stat(out / "weights.bin").st_ino == before
    torch.distributed.barrier()
    if rank == 0:
        (out / "weights.bin").unlink()
        shutil.rmtree(out / "deep")
    torch.distributed.barrier()


def check_mistakes(run, handle, rank, out):
    for given in (None, "", 5):
        with at_once(), pytest.raises(ValueError, match=f"save_dir must be a non-empty string, got {given!r}"):
            run.save_checkpoint(given)
    with at_once(), pytest.raises(ValueError, match="save_dir must be a non-empty string, got None"):
        run.save_checkpoint(None if rank else out)
    with at_once(), pytest.raises(TypeError) if rank else pytest.raises(UnexpectedError, match=r"rank 1.*TypeError"):
        run.save_checkpoint(out, tag="bad", client_state=5 if rank else {})
    with pytest.raises(DesyncError, match="path"):
        run.save_checkpoint(out, tag=f"of{rank}")
    with pytest.raises(ConfigError, match="name of a directory"):
        run.save_checkpoint(out, tag="../x")
    with at_once(), pytest.raises(ConfigError, match="name of a directory"):
        run.save_checkpoint(out, tag="../x" if rank else "y")
    state = {"bad": (line for line in "x")} if rank == 1 else {}
    with pytest.raises(StateError) if rank == 1 else pytest.raises(SafeCheckpointError):
        run.save_checkpoint(out, tag="unpicklable", client_state=state if rank == 1 else {"bad": (x for x in "x")})
    if rank == 0:
        (out / "mine").mkdir()
        (out / "mine" / "thesis.tex").write_text("x")
    torch.distributed.barrier()
    with pytest.raises(DirectoryError, match="did not write it"):
        run.save_checkpoint(out, tag="mine")
    assert (out / "mine" / "thesis.tex").read_text() == "x"
    # One rank alone fails while DeepSpeed collects: all raise, and the next save works.
    own = run._get_zero_ckpt_name
    if rank == 1:
        run._get_zero_ckpt_name = lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError) if rank == 1 else pytest.raises(SafeCheckpointError, match="ZeroDivision"):
        run.save_checkpoint(out, tag="d")
    run._get_zero_ckpt_name = own
    run.save_checkpoint(out, tag="d")
    assert seen(handle, out) == ("d", ["c", "d", "mine", "warmup"])


def test_saves_loads_and_mistakes_end_alike_on_both_ranks(tmp_path):
    """Saving, naming, retaining, loading, falling back and every mistake end alike on both ranks, and harm nothing."""
    values(spawn(using, str(tmp_path)))


def save_swapped(rank, folder, name, width):
    """An engine with NVMe offload, what it may not load, and a tag of its own, also one of stock DeepSpeed."""
    folder = Path(folder)
    run = runs.engine(3, "nvme", folder / f"swap {name}", width=width)
    size = torch.distributed.get_world_size()
    before = runs.weights(run)
    with installed(run) as handle:
        for other in {"of 1", "of 2"} & {path.name for path in folder.iterdir()}:
            why = "bytes in it and" if other == f"of {size}" else rf"ranks saved it and {size} are to load it"
            for out in ("ours", "stock"):
                with at_once(), pytest.raises(RestoreError, match=why):
                    run.load_checkpoint(folder / other / out)
        assert torch.equal(runs.weights(run), before)
        runs.train(run, rank, 0, 1)
        run.save_checkpoint(folder / name / "ours")
        handle.wait()
        assert run.load_checkpoint(folder / name / "ours")[0]
    run.save_checkpoint(folder / name / "stock")


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.skipif(not has_nvme(), reason="DeepSpeed's asynchronous I/O is not built")
def test_nvme_states_of_another_number_of_ranks_are_refused(tmp_path):
    """1 -> 2 and 2 -> 1 ranks, and another model: one named error on all ranks, at once, and nothing was restored."""
    for name, width, ranks in (("of 1", 1024, 1), ("of 2", 1024, 2), ("last", 512, 1)):
        values(spawn_ranks(save_swapped, ranks, str(tmp_path), name, width, timeout_s=100))


def lose_a_rank(rank, folder, stage, moment):
    """Rank 1 is killed before it comes to the save, or while its writer is at it."""
    folder = Path(folder)
    run = runs.engine(stage, width=64)
    timeouts = Timeouts(barrier_s=20, lengthy_s=40, peer_stall_s=5, writer_stall_s=60, shutdown_s=5)
    handle = installed(run, timeouts=timeouts, writer=WriterConfig(inline_bytes=0))
    run.save_checkpoint(folder, tag="good")
    handle.wait()
    if rank == 1:
        if moment == "while it is late":
            wait_until((folder / "rank 0 is there").exists, 60)
            assert latest(folder) == "good"
            os.kill(os.getpid(), signal.SIGKILL)
        os.kill(writer_of(handle).pid, signal.SIGSTOP)
        run.save_checkpoint(folder, tag="bad")
        os.kill(os.getpid(), signal.SIGKILL)
    begun = time.monotonic()
    (folder / "rank 0 is there").touch()
    with pytest.raises(PeerLostError):
        run.save_checkpoint(folder, tag="bad")
        handle.wait()
    os._exit(0 if time.monotonic() - begun < 30 and latest(folder) == "good" and tags(folder) == ["good"] else 1)


def test_directories_in_turn_are_held_together(tmp_path):
    """Saves to three of them go on beside training: none waits for the one before it, and none is taken again in each round."""
    assert values(spawn_ranks(in_turn, 1, str(tmp_path), timeout_s=120)) == [True]


def in_turn(rank, folder):
    run = runs.engine(0, width=64)
    outs = [Path(folder) / name for name in "abc"]
    with installed(run, max_in_flight=3, writer=WriterConfig(inline_bytes=0)) as handle:
        for out in outs:
            run.save_checkpoint(out)
        handle.wait()
        held = dict(handle.saver.homes)
        writer = writer_of(handle)
        os.kill(writer.pid, signal.SIGSTOP)
        for out in outs:
            run.save_checkpoint(out, tag="again")
        assert not any((out / "again").exists() for out in outs)
        os.kill(writer.pid, signal.SIGCONT)
        handle.wait()
        assert handle.saver.homes == held
    return [latest(out) for out in outs] == ["again"] * 3


def test_the_tag_before_a_damaged_one_is_loaded(tmp_path):
    """Whatever is damaged in the newest one, its manifest too; and where ``latest`` was moved to one that it would not name."""
    assert values(spawn_ranks(falling_back, 1, str(tmp_path), timeout_s=120)) == [["b", "b", "b", "a"]]


def falling_back(rank, folder):
    out = Path(folder) / "out"
    run = runs.engine(0, width=64)
    found = []
    with installed(run) as handle:
        for tag in "abc":
            run.save_checkpoint(out, tag=tag, client_state={"tag": tag})
        run.save_checkpoint(out, tag="aside", save_latest=False)
        run.save_checkpoint(out, tag="d", client_state={"tag": "d"}, save_latest=False)
        handle.wait()
        manifest = out / "c" / "manifest.json"
        whole = manifest.read_bytes()
        for content in (b"", whole[:-20], whole.replace(b"deepspeed", b"deepspeee")):
            manifest.write_bytes(content)
            found.append(run.load_checkpoint(out)[1]["tag"])
        manifest.write_bytes(whole)
        flip_bit(out / "b" / "mp_rank_00_model_states.pt", 5000)
        flip_bit(out / "aside" / "mp_rank_00_model_states.pt", 5000)
        flip_bit(out / "c" / "mp_rank_00_model_states.pt", 5000)
        (out / "latest").write_text("aside")
        found.append(run.load_checkpoint(out)[1]["tag"])
    return found


@pytest.mark.parametrize("moment", ["while it is late", "while its files are written"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3] if THOROUGH else [3])
def test_latest_never_names_what_lacks_a_rank(tmp_path, stage, moment):
    """With rank 1 slow and then killed, ``latest`` names the tag before, at any stage, and rank 0 ends with a named error."""
    outcomes = spawn(lose_a_rank, str(tmp_path), stage, moment)
    assert [outcome.exit_code for outcome in outcomes] == [0, -9]
    assert (latest(tmp_path), tags(tmp_path)) == ("good", ["good"])


@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.thorough)])
def test_other_trained_parameters_after_a_load_are_named(tmp_path, stage):
    """At the first step, once, on rank 0; also where ZeRO's optimizer has copies of the parameters."""
    first, second = values(spawn(runs.trains_others_after_a_load, tmp_path, stage))
    assert first[0] == [0, 1, 1]
    assert "0.weight, 0.bias now" in first[1][0]
    assert second == ([0, 0, 0], [])
