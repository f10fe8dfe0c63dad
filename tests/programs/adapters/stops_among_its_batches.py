"""Trains in FOLDER with loaders by HOW and LOADING (JSON), to the end or a save at step STOP: says which samples it saw."""

import contextlib
import json
import sys

from accelerate.utils import DataLoaderConfiguration
from accelerate_rank import say
from drawn_samples import Drawing, Placed, Stream

from accelerate_runs import CONFIG, Training, make
from safe_ckpt.accelerate import register
from safe_ckpt.data import resumable
from safe_ckpt.errors import NoValidCheckpointError

folder, how, loading, stop = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3]), int(sys.argv[4])
data = {"map": Drawing, "stream": Placed, "blind": Stream}[loading.pop("data", "map")]()
skip, leaves_out = loading.pop("skip", None), loading.pop("leaves out", False)
accelerator = make(folder, dataloader_config=DataLoaderConfiguration(**how))


def after(count):
    if count == stop:
        accelerator.save_state()
        raise KeyboardInterrupt


with register(accelerator, CONFIG):
    training = Training(accelerator, data=data, wrap=lambda loader: resumable(loader, skip=skip), **loading)
    with contextlib.suppress(NoValidCheckpointError):
        accelerator.load_state()
    with contextlib.suppress(KeyboardInterrupt):
        if leaves_out and (done := training.counter.count):  # as a script that counts steps
            whole = training.loader
            training.loader = accelerator.skip_first_batches(whole, done % len(whole))
            training.epoch(after)
            training.loader = whole
        while training.loader.iteration < 3:
            training.epoch(after)
    say(json.dumps(training.seen))
    say(training.fingerprint())
