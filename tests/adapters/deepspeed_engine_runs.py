"""Saves through ``SafeCheckpointEngine`` alone, as DeepSpeed calls it."""

import contextlib
import os
import time
import zipfile
from dataclasses import replace

import torch
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo

from safe_ckpt import CheckpointConfig, Timeouts, WriterConfig
from safe_ckpt.core.formats.manifest import read_manifest
from safe_ckpt.core.formats.verify import verify
from safe_ckpt.deepspeed import SafeCheckpointEngine
from support import run_script, writer_processes, writers_of

TIMES = Timeouts(lengthy_s=30, barrier_s=20, writer_stall_s=1, fsync_stall_s=5, peer_stall_s=5, shutdown_s=8)


CONFIG = CheckpointConfig(timeouts=TIMES, writer=WriterConfig(inline_bytes=0))


SLOW = replace(CONFIG, writer=WriterConfig(chunk_bytes=4096, flush_every_bytes=4096, direct_io="off", inline_bytes=0))


FRAIL = replace(CONFIG, writer=WriterConfig(max_respawns=0, inline_bytes=0))  # the first stall is an error


LIMIT_S = 30


MODEL = "mp_rank_00_model_states.pt"


OPTIM = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"


LARGE = 1_000_000


SEVERAL = 300_000


@contextlib.contextmanager
def opened(config=CONFIG):
    engine = SafeCheckpointEngine(config)
    try:
        yield engine
    finally:
        engine.cleanup()


@contextlib.contextmanager
def in_time():
    begun = time.monotonic()
    yield
    assert time.monotonic() - begun < LIMIT_S


def until(condition):
    deadline = time.monotonic() + 20
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError("what the test waits for did not happen")
        time.sleep(0.001)
    return found


def tag_of(number):
    return f"global_step{number}"


def info_of(folder, number, *, save_latest=True):
    return CheckpointCommitInfo(tag=tag_of(number), save_dir=str(folder), save_latest=save_latest)


def state_of(value, numel=1000):
    return {"module": {"w": torch.full((numel,), float(value)), "b": torch.arange(7) + value}, "global_steps": value}


def begin(engine, folder, number, **more):
    info = info_of(folder, number, **more)
    engine.makedirs(str(folder), exist_ok=True)
    engine.create(info)
    engine.makedirs(os.path.join(folder, tag_of(number)), exist_ok=True)
    return info


def put(engine, folder, number, *, value=None, name=MODEL, numel=1000):
    state = state_of(number if value is None else value, numel)
    engine.save(state_dict=state, path=os.path.join(folder, tag_of(number), name))


def save(engine, folder, number, **more):
    """Everything but the commit."""
    info = begin(engine, folder, number)
    put(engine, folder, number, **more)
    save_checkpoint(engine)
    return info


def save_checkpoint(engine):
    """How DeepSpeed's function of this name ends: it asks when all files are handed over."""
    assert engine.is_decoupled()


def read(file):
    return torch.load(file, weights_only=False)


def equal(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    return one == other


def complete(folder, number, *, value=None, names=(MODEL,), numel=1000):
    """The tag has exactly these files, with these contents, and its manifest agrees."""
    tag = folder / tag_of(number)
    assert sorted(os.listdir(tag)) == sorted(["manifest.json", *names])
    assert all(equal(read(tag / name), state_of(number if value is None else value, numel)) for name in names)
    assert verify(tag, read_manifest(tag)) > 0
    return True


def names(folder):
    return sorted(name for name in os.listdir(folder) if name != ".safe_ckpt")


def latest(folder):
    return (folder / "latest").read_text()


def clean(folder):
    """Nothing half done is left, and nobody holds the directory."""
    assert list((folder / ".safe_ckpt/pending").glob("*")) == []
    assert not (folder / ".safe_ckpt/lock").exists()
    return True


def staged(folder, number, name=MODEL):
    return next(iter(folder.glob(f".safe_ckpt/pending/*/{tag_of(number)}/{name}")), None)


def begun_to_write(folder, number, name=MODEL):
    file = staged(folder, number, name)
    return file is not None and file.stat().st_size > 0


def written(folder, number, name=MODEL):
    """Whether the staged file is complete: a zip archive's directory comes last, and nothing may read it as a pickle before."""
    file = staged(folder, number, name)
    return file is not None and zipfile.is_zipfile(file) and bool(read(file))


def signal_writer(number):
    (writer,) = until(lambda: writers_of(os.getpid()))
    os.kill(writer, number)
    return writer


FILES = [MODEL, OPTIM.format(0)]


HEAD = """
    import os, signal, sys, torch
    from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo
    from safe_ckpt import CheckpointConfig, Health, Loops, Mirror, Network, Retention, StorageConfig, Telemetry, Timeouts
    from safe_ckpt import Unchanged, WriterConfig
    from safe_ckpt.deepspeed import SafeCheckpointEngine
    from safe_ckpt.errors import ConfigError
    folder = sys.argv[1]
    engine = SafeCheckpointEngine({config!r})

    def info_of(number):
        return CheckpointCommitInfo(tag=f"global_step{{number}}", save_dir=folder, save_latest=True)

    MODEL, OPTIM = {files!r}

    def put(number, name, numel):
        module = {{"w": torch.full((numel,), float(number)), "b": torch.arange(7) + number}}
        file = os.path.join(folder, f"global_step{{number}}", name)
        engine.save(state_dict={{"module": module, "global_steps": number}}, path=file)

    def save(number, numel, then=""):
        engine.create(info_of(number))
        put(number, MODEL, numel)
        exec(then)
        put(number, OPTIM, numel)
        save_checkpoint()
        return info_of(number)

    def save_checkpoint():  # how DeepSpeed's function of this name ends
        engine.is_decoupled()

    def signal_writer(number):
        os.kill(engine._core._save_queue.writer.pid, number)

    engine.commit(save(1, 1000))
    {end}
"""


def end_with(end, folder, config=SLOW, flags=()):
    """Commit the first tag and do what ``end`` says in a fresh interpreter; it must end by itself."""
    begun = time.monotonic()
    done = run_script(HEAD.format(config=config, files=FILES, end=end), str(folder), timeout_s=LIMIT_S + 5, flags=flags)
    assert time.monotonic() - begun < LIMIT_S
    assert writer_processes() == []
    assert complete(folder, 1, names=FILES)
    assert clean(folder)
    return done
