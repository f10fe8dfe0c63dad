"""Several ranks under Lightning's own launchers."""

import os
import random
import signal
import subprocess
import sys

import pytest
import torch
from lightning_runs import seconds_since_start
from lightning_scripts import fingerprints, killed, run

from kit import warm
from kit.patience import scaled, wait_until
from kit.ranks import free_port
from safe_ckpt.core.formats.manifest import read_manifest
from safe_ckpt.core.formats.verify import verify_files
from support import kill_group, needs_root, program_path, small_disk, start_script, writer_processes


def run_ranks(tmp_path, program, *args, timeout_s=100):
    """As under a launcher: both ranks start at once, which takes half as long as one that starts the other."""
    port = str(free_port())
    common = {
        **os.environ,
        "RES_OPTIONS": "timeout:1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": "2",
    }
    common |= {"TORCHELASTIC_RUN_ID": "test", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "PYTHONUNBUFFERED": "1"}
    said = tmp_path / "ranks.out"
    with said.open("w+") as output:
        ranks = [
            warm.Popen(
                [sys.executable, str(program_path(program)), *map(str, args)],
                stdout=output, stderr=output, env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in (0, 1)
        ]  # fmt: skip
        try:
            codes = [process.wait(scaled(timeout_s)) for process in ranks]
        finally:
            for process in ranks:
                process.kill()
    assert codes == [0, 0], said.read_text()[-4000:]
    return said.read_text()


def test_ddp_survives_kills_bit_for_bit(tmp_path):
    """Two DDP ranks, saving every step, killed twice at random moments: the end is that of an uninterrupted run."""
    program = "trains_with_a_save_each_step"
    reference = fingerprints(run_ranks(tmp_path, program, tmp_path / "reference", 1, 3000, "ddp", 20))
    seed = int.from_bytes(os.urandom(2))
    chance = random.Random(seed)
    for kill in range(2):
        said = killed(program, tmp_path / "exp", 1, 3000, "ddp", 20, commits=2, chance=chance)
        assert ('"resumed"' in said) == (kill > 0)
    assert fingerprints(run_ranks(tmp_path, program, tmp_path / "exp", 1, 3000, "ddp", 20)) == reference, (
        f"random seed {seed}"
    )
    assert len(reference) == 1
    assert sorted(p.name for p in (tmp_path / "exp").glob("*.ckpt")) == ["epoch=19-step=40.ckpt", "last.ckpt"]
    assert list((tmp_path / "exp/.safe_ckpt/pending").rglob("*")) == []
    assert writer_processes() == []


def test_ddp_spawn_saves_and_gives_the_weights_back(tmp_path):
    """With a strategy that spawns its ranks, files are complete and the main process gets path and weights."""
    done = run("spawns_its_ranks", tmp_path / "exp")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip().endswith("True True")
    for file in (tmp_path / "exp").glob("*.ckpt"):
        verify_files(file, read_manifest(file))
    assert writer_processes() == []


@needs_root
def test_a_failed_save_raises_the_same_error_on_both_ranks(tmp_path):
    """Rank 0's disk is full: rank 1, which writes nothing, raises the same named error, and both end promptly."""
    (tmp_path / "out").mkdir()
    with small_disk(tmp_path / "disk", "6m") as disk:
        run("fills_the_disk_in_training", disk, tmp_path / "out")
        said = [(tmp_path / "out" / f"rank{rank}").read_text() for rank in (0, 1)]
    assert said[0] == said[1]
    assert said[0].startswith("NotEnoughSpaceError")
    assert said[0].endswith("epoch=0-step=2.ckpt")


@pytest.mark.thorough
def test_a_metric_that_differs_between_ranks_names_one_file(tmp_path):
    """Logged without sync_dist and part of the file's name: rank 0's counts, on both ranks."""
    done = run("logs_another_loss_on_each_rank", tmp_path / "exp")
    assert done.returncode == 0, done.stderr[-2000:]
    files = sorted(path.name for path in (tmp_path / "exp").glob("*.ckpt"))
    assert files == ["epoch=1-val_loss=0.90.ckpt", "epoch=2-val_loss=0.80.ckpt"]
    assert done.stdout.count(str(files)) == 2


def test_a_save_from_a_signal_handler_on_two_ranks_is_written_at_once(tmp_path):
    """SIGUSR1 to both ranks while they wait in different places: rank 0 writes at once, training goes on."""
    done = run("saves_in_handlers_of_two_ranks", tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("RANK") == 2
    assert seconds_since_start(tmp_path) < 15
    verify_files(tmp_path / "hpc_ckpt_1.ckpt", read_manifest(tmp_path / "hpc_ckpt_1.ckpt"))


@pytest.mark.thorough
def test_the_users_own_save_is_done_or_fails_on_both_ranks(tmp_path):
    """trainer.save_checkpoint in fit and after it: done when it returns, and what fails fails on both ranks, promptly."""
    done = run("saves_in_fit_and_after_it", tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    for rank in (0, 1):
        assert (tmp_path / f"rank{rank}").read_text() == "[True, True, 'DirectoryError']"
    assert seconds_since_start(tmp_path) < 25


def test_an_exception_on_one_rank_ends_the_job_promptly(tmp_path):
    """Only rank 1 raises, and save_on_exception asks for a save that rank 0 will not join: no hang, no masked exception.

    Lightning's OnExceptionCheckpoint beside it is bound by the same wait.
    """
    done = run("raises_on_one_rank", tmp_path / "exp")
    assert done.returncode != 0
    assert seconds_since_start(tmp_path / "exp") < 25
    assert "KeyError: 'mine'" in done.stderr
    files = list((tmp_path / "exp").glob("*.ckpt"))
    assert files
    for file in files:
        verify_files(file, read_manifest(file))


@pytest.mark.thorough
def test_ctrl_c_with_two_ranks_ends_in_seconds_and_leaves_whole_files(tmp_path):
    """SIGINT to the whole job: it ends within seconds and leaves only whole files."""
    program = program_path("trains_with_a_save_each_step")
    process = start_script(program, str(tmp_path / "exp"), "1", "3000", "ddp", "100000")
    try:
        wait_until(lambda: list((tmp_path / "exp").glob("*.ckpt")), 60, "a checkpoint")
        os.killpg(process.pid, signal.SIGINT)
        process.wait(timeout=30)
    finally:
        kill_group(process)
        process.stdout.close()
    files = list((tmp_path / "exp").glob("*.ckpt"))
    assert files
    for found in files:
        verify_files(found, read_manifest(found))
        assert torch.load(found, weights_only=True)["global_step"] > 0


def test_each_rank_continues_its_own_randomness(tmp_path):
    """Ranks with different generators each get their own back: dropout differs between ranks and continues exactly."""
    for name, epochs in (("straight", [4]), ("broken", [2, 4])):
        (tmp_path / name).mkdir()
        for epoch in epochs:
            run_ranks(tmp_path, "draws_on_each_rank", tmp_path / f"exp-{name}", tmp_path / name, epoch)
    drawn = {name: [(tmp_path / name / f"rank{r}").read_text() for r in (0, 1)] for name in ("straight", "broken")}
    assert drawn["straight"] == drawn["broken"]
    assert drawn["straight"][0] != drawn["straight"][1]


@pytest.mark.parametrize("kind", ["stdin", pytest.param("no_guard", marks=pytest.mark.thorough)])
def test_programs_without_a_main_guard_are_not_run_again_by_the_writer(tmp_path, kind):
    """A notebook-style script on stdin, or one without a guard: the writer does not import the user's main."""
    program = program_path("saves_without_a_main_guard")
    if kind == "stdin":
        done = subprocess.run(
            [sys.executable, "-", str(tmp_path / "exp")], input=program.read_text(), capture_output=True, text=True,
            timeout=scaled(60), check=False, env={**os.environ, "PYTHONPATH": str(program.parent)},
        )  # fmt: skip
    else:
        done = run("saves_without_a_main_guard", tmp_path / "exp")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done once") == 1
    assert len(list((tmp_path / "exp").glob("*.ckpt"))) == 1


@pytest.mark.thorough
def test_a_loader_that_fails_to_say_where_it_is_fails_on_both_ranks(tmp_path):
    """The user's loader raises in state_dict() on rank 1 alone: both ranks raise its cause, promptly."""
    done = run("loses_its_place_on_one_rank", tmp_path / "exp")
    said = sorted(line for line in done.stdout.splitlines() if line.startswith("RANK"))
    assert said == ["RANK 0 UnexpectedError True", "RANK 1 KeyError True"], done.stderr[-2000:]
    assert seconds_since_start(tmp_path / "exp") < 15


def test_sigterm_on_one_rank_stops_both_and_the_run_goes_on_exactly(tmp_path):
    """Only rank 1 gets the signal, in mid-epoch: both save at one step and end with status 0; the restart ends like one run."""
    program = "stops_on_both_ranks"
    reference = fingerprints(run_ranks(tmp_path, program, tmp_path / "reference", "alone"))
    stopped = run(program, tmp_path / "exp", "kick")
    assert stopped.returncode == 0, stopped.stderr[-2000:]
    steps = {line.split()[3] for line in stopped.stdout.splitlines() if line.startswith("RANK")}
    assert len(steps) == 1
    assert 5 <= int(*steps) < 40
    assert (tmp_path / "exp/stopped.ckpt").exists()
    assert fingerprints(run_ranks(tmp_path, program, tmp_path / "exp", "alone")) == reference


def test_what_each_rank_has_logged_goes_on_on_that_rank(tmp_path):
    """Resumed within an epoch: each rank's own means, and those over all ranks. Another number of ranks is told of it."""
    run_ranks(tmp_path, "logs_on_two_ranks", tmp_path / "exp")
    alone = run("logs_on_two_ranks", tmp_path / "exp", "alone")
    assert alone.stdout.strip() == "RANK 3", alone.stderr[-3000:]
    assert alone.stderr.count("another number of ranks saved it") == 1


def test_an_epoch_that_was_broken_off_goes_on_on_every_rank(tmp_path):
    """max_steps in mid-epoch, DDP with Lightning's own DistributedSampler: the rest of that epoch, the same weights."""
    run_ranks(tmp_path, "breaks_an_epoch_off", tmp_path / "exp")
