"""Several ranks under Lightning's own launchers."""

import os
import random
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch
from lightning_runs import seconds_since_start
from lightning_scripts import HEAD, fingerprints, run, script

from kit import warm
from kit.patience import scaled, wait_until
from kit.ranks import free_port
from safe_ckpt.core.formats.manifest import read_manifest
from safe_ckpt.core.formats.verify import verify
from support import kill_group, needs_root, small_disk, start_script, writer_processes


def run_ranks(file, *args, timeout_s=100):
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
    said = file.with_suffix(".out")
    with said.open("w+") as output:
        ranks = [
            warm.Popen(
                [sys.executable, str(file), *map(str, args)],
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


TRAIN = """
    if __name__ == "__main__":
        pl.seed_everything(int(sys.argv[2]), verbose=False)
        module = module_class(pl)(width=int(sys.argv[3]), loader=resumable)
        callback = SafeCheckpointCallback(dirpath=folder, config=CONFIG, resume="auto", filename="{epoch}-{step}",
                                          every_n_train_steps=1, save_last=True)
        made = trainer(pl, [callback], folder, strategy=sys.argv[4], devices=2, max_epochs=EPOCHS)
        made.fit(module)
        print("RANK", made.global_rank, fingerprint(module), made.global_step, flush=True)
"""


def test_ddp_survives_kills_bit_for_bit(tmp_path):
    """Two DDP ranks, saving every step, killed twice at random moments: the end is that of an uninterrupted run."""
    file = script(tmp_path, TRAIN.replace("EPOCHS", "20"))
    reference = fingerprints(run_ranks(file, tmp_path / "reference", 1, 3000, "ddp"))
    seed = int.from_bytes(os.urandom(2))
    chance = random.Random(seed)
    events = tmp_path / "exp/.safe_ckpt/events.jsonl"
    for kill in range(2):
        before = len(events.read_text()) if events.exists() else 0
        process = start_script(file, str(tmp_path / "exp"), "1", "3000", "ddp")
        deadline = time.monotonic() + 60
        said = ""
        while time.monotonic() < deadline and process.poll() is None and said.count('"committed"') < 2:
            said = events.read_text()[before:] if events.exists() else ""
            time.sleep(0.01)
        assert said.count('"committed"') >= 2, "the run ended before it could be killed"
        assert ('"resumed"' in said) == (kill > 0)
        time.sleep(chance.random() * 0.1)
        kill_group(process)
        process.stdout.close()
    assert fingerprints(run_ranks(file, tmp_path / "exp", 1, 3000, "ddp")) == reference, f"random seed {seed}"
    assert len(reference) == 1
    assert sorted(p.name for p in (tmp_path / "exp").glob("*.ckpt")) == ["epoch=19-step=40.ckpt", "last.ckpt"]
    assert list((tmp_path / "exp/.safe_ckpt/pending").rglob("*")) == []
    assert writer_processes() == []


def test_ddp_spawn_saves_and_gives_the_weights_back(tmp_path):
    """With a strategy that spawns its ranks, files are complete and the main process gets path and weights."""
    body = """
        class Module(module_class(pl)):
            pass
        if __name__ == "__main__":
            pl.seed_everything(1, verbose=False)
            module = Module()
            before = fingerprint(module)
            callback = SafeCheckpointCallback(dirpath=folder, config=CONFIG, monitor="val_loss", save_last=True)
            made = trainer(pl, [callback], folder, strategy="ddp_spawn", devices=2)
            made.fit(module)
            print("RANK 0", fingerprint(module), os.path.exists(callback.best_model_path), before != fingerprint(module))
    """
    done = run(script(tmp_path, body), tmp_path / "exp")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip().endswith("True True")
    for file in (tmp_path / "exp").glob("*.ckpt"):
        verify(file, read_manifest(file))
    assert writer_processes() == []


@needs_root
def test_a_failed_save_raises_the_same_error_on_both_ranks(tmp_path):
    """Rank 0's disk is full: rank 1, which writes nothing, raises the same named error, and both end promptly."""
    body = """
        if __name__ == "__main__":
            class Fill(pl.Callback):
                def on_train_epoch_start(self, trainer, pl_module):
                    if trainer.current_epoch == 1 and trainer.is_global_zero:
                        callback._saver.land()
                        (folder / "filler").write_bytes(bytes(5_000_000))
            callback = SafeCheckpointCallback(dirpath=folder, config=CONFIG)
            made = trainer(pl, [Fill(), callback], folder, strategy="ddp", devices=2, max_epochs=4)
            try:
                made.fit(module_class(pl)(width=8000))
            except Exception as error:
                Path(sys.argv[2], f"rank{made.global_rank}").write_text(
                    f"{type(error).__name__} {error} | {os.path.basename(callback.best_model_path)}")
    """
    (tmp_path / "out").mkdir()
    with small_disk(tmp_path / "disk", "6m") as disk:
        run(script(tmp_path, body), disk, tmp_path / "out")
        said = [(tmp_path / "out" / f"rank{rank}").read_text() for rank in (0, 1)]
    assert said[0] == said[1]
    assert said[0].startswith("NotEnoughSpaceError")
    assert said[0].endswith("epoch=0-step=2.ckpt")


@pytest.mark.thorough
def test_a_metric_that_differs_between_ranks_names_one_file(tmp_path):
    """Logged without sync_dist and part of the file's name: rank 0's counts, on both ranks."""
    body = """
        if __name__ == "__main__":
            class Module(module_class(pl)):
                def validation_step(self, batch, batch_idx):
                    self.log("val_loss", 1.0 + self.global_rank - 0.1 * self.current_epoch, sync_dist=False)
            callback = SafeCheckpointCallback(dirpath=folder, config=CONFIG, monitor="val_loss", save_top_k=2,
                                              filename="{epoch}-{val_loss:.2f}")
            made = trainer(pl, [callback], folder, strategy="ddp", devices=2)
            made.fit(Module())
            print("RANK", made.global_rank, sorted(map(os.path.basename, callback.best_k_models)))
    """
    done = run(script(tmp_path, body), tmp_path / "exp")
    assert done.returncode == 0, done.stderr[-2000:]
    files = sorted(path.name for path in (tmp_path / "exp").glob("*.ckpt"))
    assert files == ["epoch=1-val_loss=0.90.ckpt", "epoch=2-val_loss=0.80.ckpt"]
    assert done.stdout.count(str(files)) == 2


def test_a_save_from_a_signal_handler_on_two_ranks(tmp_path):
    """SIGUSR1 to both ranks while they wait in different places: rank 0 writes at once, training goes on."""
    body = """
        if __name__ == "__main__":
            import os, signal, time
            class Uneven(pl.Callback):
                def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
                    if trainer.global_step == 3 and trainer.global_rank == 0:
                        time.sleep(0.5)  # rank 1 waits in the gradients' all-reduce meanwhile
                        os.kill(os.getpid(), signal.SIGUSR1)
                        os.kill(int((folder / "pid1").read_text()), signal.SIGUSR1)
                def on_fit_start(self, trainer, pl_module):
                    if trainer.global_rank == 1:
                        (folder / "pid1").write_text(str(os.getpid()))
                    trainer.strategy.barrier()
            callback = SafeCheckpointCallback(dirpath=folder / "exp", config=CONFIG)
            note_start(folder)
            made = trainer(pl, [Uneven(), callback], folder, strategy="ddp", devices=2)
            signal.signal(signal.SIGUSR1, lambda *_: made.save_checkpoint(folder / "hpc_ckpt_1.ckpt"))
            made.fit(module_class(pl)())
            print("RANK", made.global_rank, made.global_step)
    """
    done = run(script(tmp_path, body), tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("RANK") == 2
    assert seconds_since_start(tmp_path) < 15
    verify(tmp_path / "hpc_ckpt_1.ckpt", read_manifest(tmp_path / "hpc_ckpt_1.ckpt"))


@pytest.mark.thorough
def test_the_users_own_saves_on_two_ranks(tmp_path):
    """trainer.save_checkpoint in fit and after it: done when it returns, and what fails fails on both ranks, promptly."""
    body = """
        if __name__ == "__main__":
            class Own(pl.Callback):
                def on_train_epoch_end(self, trainer, pl_module):
                    trainer.save_checkpoint(folder / "own.ckpt")
                    said.append((folder / "own.ckpt").exists())
            said = []
            callback = SafeCheckpointCallback(dirpath=folder / "exp", config=CONFIG)
            note_start(folder)
            made = trainer(pl, [Own(), callback], folder, strategy="ddp", devices=2, max_epochs=1)
            made.fit(module_class(pl)())
            made.save_checkpoint(folder / "final.ckpt")
            said.append((folder / "final.ckpt").exists())
            (folder / "file").touch()
            try:
                made.save_checkpoint(folder / "file/x.ckpt")
            except OSError as error:
                said.append(type(error).__name__)
            (folder / f"rank{made.global_rank}").write_text(str(said))
    """
    done = run(script(tmp_path, body), tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    for rank in (0, 1):
        assert (tmp_path / f"rank{rank}").read_text() == "[True, True, 'DirectoryError']"
    assert seconds_since_start(tmp_path) < 25


def test_an_exception_on_one_rank_ends_promptly(tmp_path):
    """Only rank 1 raises, and save_on_exception asks for a save that rank 0 will not join: no hang, no masked exception.

    Lightning's OnExceptionCheckpoint beside it is bound by the same wait.
    """
    body = """
        if __name__ == "__main__":
            class Boom(pl.Callback):
                def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
                    if trainer.global_step == 5 and trainer.global_rank == 1:
                        raise KeyError("mine")
            callback = SafeCheckpointCallback(dirpath=folder, config=CONFIG, save_on_exception=True, save_top_k=-1)
            note_start(folder)
            other = pl.callbacks.OnExceptionCheckpoint(folder / "other")
            made = trainer(pl, [Boom(), other, callback], folder, strategy="ddp", devices=2, max_epochs=8)
            made.fit(module_class(pl)())
    """
    done = run(script(tmp_path, body), tmp_path / "exp")
    assert done.returncode != 0
    assert seconds_since_start(tmp_path / "exp") < 25
    assert "KeyError: 'mine'" in done.stderr
    files = list((tmp_path / "exp").glob("*.ckpt"))
    assert files
    for file in files:
        verify(file, read_manifest(file))


@pytest.mark.thorough
def test_ctrl_c_with_two_ranks(tmp_path):
    """SIGINT to the whole job: it ends within seconds and leaves only whole files."""
    file = script(tmp_path, TRAIN.replace("EPOCHS", "100000"))
    process = start_script(file, str(tmp_path / "exp"), "1", "3000", "ddp")
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
        verify(found, read_manifest(found))
        assert torch.load(found, weights_only=True)["global_step"] > 0


def test_each_rank_continues_its_own_randomness(tmp_path):
    """Ranks with different generators each get their own back: dropout differs between ranks and continues exactly."""
    body = """
        if __name__ == "__main__":
            class Draw(pl.Callback):
                def on_train_epoch_start(self, trainer, pl_module):
                    torch.manual_seed(100 * trainer.current_epoch + trainer.global_rank) if trainer.current_epoch == 0 else None
                def on_train_epoch_end(self, trainer, pl_module):
                    if trainer.current_epoch == 3:
                        Path(sys.argv[2], f"rank{trainer.global_rank}").write_text(str(torch.rand(1).item()))
            pl.seed_everything(1, verbose=False)
            callback = SafeCheckpointCallback(dirpath=folder, config=CONFIG, resume="auto", save_last=True)
            made = trainer(pl, [Draw(), callback], folder, strategy="ddp", devices=2, max_epochs=int(sys.argv[3]))
            made.fit(module_class(pl)())
    """
    file = script(tmp_path, body)
    for name, epochs in (("straight", [4]), ("broken", [2, 4])):
        (tmp_path / name).mkdir()
        for epoch in epochs:
            run_ranks(file, tmp_path / f"exp-{name}", tmp_path / name, epoch)
    drawn = {name: [(tmp_path / name / f"rank{r}").read_text() for r in (0, 1)] for name in ("straight", "broken")}
    assert drawn["straight"] == drawn["broken"]
    assert drawn["straight"][0] != drawn["straight"][1]


@pytest.mark.parametrize("kind", ["stdin", pytest.param("no_guard", marks=pytest.mark.thorough)])
def test_programs_without_a_main_guard(tmp_path, kind):
    """A notebook-style script on stdin, or one without a guard: the writer does not import the user's main."""
    body = textwrap.dedent(HEAD).replace("sys.argv[1]", repr(str(tmp_path / "exp"))) + textwrap.dedent("""
        callback = SafeCheckpointCallback(dirpath=folder, config=CONFIG)
        trainer(pl, [callback], folder).fit(module_class(pl)())
        print("done once")
    """)
    if kind == "stdin":
        done = subprocess.run([sys.executable], input=body, capture_output=True, text=True, timeout=60, check=False)
    else:
        (tmp_path / "train.py").write_text(body)
        done = run(tmp_path / "train.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done once") == 1
    assert len(list((tmp_path / "exp").glob("*.ckpt"))) == 1


@pytest.mark.thorough
def test_a_loader_that_fails_to_say_where_it_is_fails_on_both_ranks(tmp_path):
    """The user's loader raises in state_dict() on rank 1 alone: both ranks raise its cause, promptly."""
    body = """
        if __name__ == "__main__":
            class Loader(torch.utils.data.DataLoader):
                def state_dict(self):
                    if made.global_rank == 1:
                        raise KeyError("mine")
                    return {}
                def load_state_dict(self, state):
                    pass
            class Module(module_class(pl)):
                def train_dataloader(self):
                    return Loader(super().train_dataloader().dataset, batch_size=4)
            callback = SafeCheckpointCallback(dirpath=folder, config=CONFIG)
            note_start(folder)
            made = trainer(pl, [callback], folder, strategy="ddp", devices=2)
            try:
                made.fit(Module())
            except Exception as error:
                print("RANK", made.global_rank, type(error).__name__, "mine" in str(error), flush=True)
    """
    done = run(script(tmp_path, body), tmp_path / "exp")
    said = sorted(line for line in done.stdout.splitlines() if line.startswith("RANK"))
    assert said == ["RANK 0 UnexpectedError True", "RANK 1 KeyError True"], done.stderr[-2000:]
    assert seconds_since_start(tmp_path / "exp") < 15


def test_sigterm_on_one_rank_stops_both_and_the_run_goes_on_exactly(tmp_path):
    """Only rank 1 gets the signal, in mid-epoch: both save at one step and end with status 0; the restart ends like one run."""
    body = TRAIN.replace("EPOCHS", "20").replace("config=CONFIG", "config=STOP").replace("every_n_train_steps=1, ", "")
    body = body.replace("callback], folder", "callback, Kick()], folder").replace(
        'if __name__ == "__main__":',
        """import signal
    from dataclasses import replace
    STOP = replace(CONFIG, save_on_signals=("SIGTERM",))
    class Kick(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if len(sys.argv) > 5:
                if trainer.global_step == 4 and trainer.global_rank == 1:
                    os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.15)  # the run is not over before both have agreed on a step
    import time
    if __name__ == "__main__":""",
        1,
    )
    file = script(tmp_path, body)
    reference = fingerprints(run_ranks(file, tmp_path / "reference", 1, 100, "ddp"))
    stopped = run(file, tmp_path / "exp", 1, 100, "ddp", "kick")
    assert stopped.returncode == 0, stopped.stderr[-2000:]
    steps = {line.split()[3] for line in stopped.stdout.splitlines() if line.startswith("RANK")}
    assert len(steps) == 1
    assert 5 <= int(*steps) < 40
    assert (tmp_path / "exp/stopped.ckpt").exists()
    assert fingerprints(run_ranks(file, tmp_path / "exp", 1, 100, "ddp")) == reference


def test_an_epoch_that_was_broken_off_goes_on_on_every_rank(tmp_path):
    """max_steps in mid-epoch, DDP with Lightning's own DistributedSampler: the rest of that epoch, the same weights."""
    body = """
        def go(name, seed, **settings):
            pl.seed_everything(1, verbose=False)
            module = module_class(pl)(loader=resumable)
            torch.manual_seed(seed)  # the sampler's own seed is that of the program
            callback = SafeCheckpointCallback(dirpath=folder / name, config=CONFIG, resume="auto", filename="{step}")
            trainer(pl, [callback], folder, strategy="ddp", devices=2, **settings).fit(module)
            return module
        if __name__ == "__main__":
            straight = go("straight", 1)
            before, after = go("broken", 1, max_steps=3, max_epochs=-1), go("broken", 7)
            assert before.seen + after.seen == straight.seen, (before.seen, after.seen, straight.seen)
            assert len(before.seen) == 3 and len(straight.seen) == 6
            assert fingerprint(after) == fingerprint(straight)
    """
    run_ranks(script(tmp_path, body), tmp_path / "exp")
