"""The place in the data under a Trainer: nothing is read again, and what is drawn for a sample is the same."""

import contextlib
import json
import random
import signal
from types import SimpleNamespace

import numpy
import pytest
import torch
import transformers
from drawn_samples import Placing
from torch.utils.data import Dataset, IterableDataset, get_worker_info
from transformers import TrainerCallback
from transformers_runs import Leave, SafeTrainer, Stop, fingerprint, model, trainer

from safe_ckpt.transformers import missing

ROWS, LENGTHS = 26, (5, 8, 3, 7)


def row(index, noise):
    ids = torch.randint(0, 32, (8,), generator=torch.Generator().manual_seed(index))
    ids[0] = int(noise * 31)  # what was drawn is trained on
    return {"input_ids": ids, "labels": ids, "number": torch.tensor(index)}


class Rows(Dataset):
    """Draws something for each row, and notes in this process which were read."""

    def __init__(self):
        self.read = []

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        if index >= len(self):
            raise IndexError(index)
        self.read.append(index)
        return row(index, (torch.rand(()).item() + random.random() + numpy.random.rand()) / 3)


class Stream(IterableDataset):
    """A stream without a place."""

    def __init__(self):
        self.at, self.read = 0, []

    def __iter__(self):
        info = get_worker_info()
        step, first = (info.num_workers, info.id) if info else (1, 0)
        while first + step * self.at < ROWS:
            self.at += 1
            index = first + step * (self.at - 1)
            self.read.append(index)
            yield row(index, torch.rand(()).item())
        self.at = 0


class Placed(Placing, Stream):
    """The same with one."""


def collate(rows):
    batch = {name: torch.stack([one[name] for one in rows]) for name in ("input_ids", "labels")}
    batch["input_ids"][:, 1] = torch.randint(0, 32, (len(rows),))  # as when tokens are masked
    batch["number"] = torch.stack([one["number"] for one in rows])
    return batch


class Noting(SafeTrainer):
    """Writes down what it trains on."""

    def training_step(self, model, inputs, *args):
        self.seen.append([inputs.pop("number").tolist(), inputs["input_ids"][:, :2].tolist()])
        return super().training_step(model, inputs, *args)


CASES = {
    "shuffle": (Rows, {}),
    "workers": (Rows, {"dataloader_num_workers": 2}),
    "workers that stay": (Rows, {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}),
    "accumulated": (Rows, {"gradient_accumulation_steps": 2, "max_steps": 12}),
    "in lengths": (Rows, {"train_sampling_strategy": "group_by_length"}),
    "drop_last": (Rows, {"dataloader_drop_last": True}),
    "stream": (Placed, {}),
    "stream, workers": (Placed, {"dataloader_num_workers": 2}),
    "stream that is read again": (Stream, {}),
}


def run(folder, case, *, stop=None, resume=False, collator=collate, callbacks=(), begin=None, **more):
    data, settings = CASES[case]
    callbacks = [*callbacks, *([Stop(stop)] if stop else [])]
    settings = {"max_steps": 18, "save_steps": 1, "seed": 3, "remove_unused_columns": False, **settings, **more}
    made = trainer(folder, Noting, callbacks=callbacks, **settings)
    made.seen, made.train_dataset, made.data_collator = [], data(), collator
    if begin is not None:
        begin(made)
    with contextlib.suppress(KeyboardInterrupt):
        made.train(resume_from_checkpoint=resume or None)
    return made


RARE = ("workers that stay", "stream, workers", "in lengths", "drop_last")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.thorough] if case in RARE else []) for case in CASES]
)
def test_the_samples_are_those_of_an_uninterrupted_run(tmp_path, case):
    """Stopped within each epoch and resumed: samples, what was drawn for them and put into batches, weights, generators."""
    whole = run(tmp_path / "whole", case)
    for stop in (3, 8, 11):
        before = run(tmp_path / str(stop), case, stop=stop)
        after = run(tmp_path / str(stop), case, resume=True)
        steps = CASES[case][1].get("gradient_accumulation_steps", 1)
        done = len(whole.seen) - len(after.seen)
        assert steps > 1 or done == stop - 1  # the save at the step of the stop comes after it
        assert json.dumps(before.seen[:done] + after.seen) == json.dumps(whole.seen), (case, stop)
        assert fingerprint(after) == fingerprint(whole)


def shards():
    """A stream of Hugging Face, whose order of shards depends on the number of the pass."""
    datasets = pytest.importorskip("datasets")
    numbers = datasets.Dataset.from_dict({"at": list(range(ROWS))}).to_iterable_dataset(num_shards=4)
    return numbers.map(
        lambda one: {name: value.tolist() for name, value in row(one["at"], 0).items()}, remove_columns="at"
    )


def collate_lists(rows):
    return collate([{name: torch.tensor(value) for name, value in one.items()} for one in rows])


@pytest.mark.parametrize("workers", [0, 2])
def test_passes_over_a_stream_have_the_shards_of_an_uninterrupted_run(tmp_path, workers):
    """Stopped between the first pass and the second, and within the third: each pass has the shards that it would have had."""
    CASES["shards"] = shards, {"dataloader_num_workers": workers, "max_steps": 26}
    collator, per_pass = collate_lists, 7 if not workers else 8
    try:
        whole = run(tmp_path / "whole", "shards", collator=collator)
        assert whole.seen[0][0] != whole.seen[2 * per_pass][0]
        for stop in (per_pass + 1, 2 * per_pass + 4):
            before = run(tmp_path / str(stop), "shards", stop=stop, collator=collator)
            after = run(tmp_path / str(stop), "shards", resume=True, collator=collator)
            done = len(whole.seen) - len(after.seen)
            assert done == stop - 1
            assert json.dumps(before.seen[:done] + after.seen) == json.dumps(whole.seen), stop
    finally:
        del CASES["shards"]


def test_a_stream_whose_shuffle_buffer_is_not_saved_is_read_again(tmp_path):
    """The rest of a pass may lie in the buffer: its samples come as without the stop, in the first pass and in the second."""
    CASES["buffered"] = lambda: shards().shuffle(seed=1, buffer_size=ROWS), {"max_steps": 16}
    try:
        whole = run(tmp_path / "whole", "buffered", collator=collate_lists)
        for stop in (4, 11):
            before = run(tmp_path / str(stop), "buffered", stop=stop, collator=collate_lists)
            after = run(tmp_path / str(stop), "buffered", resume=True, collator=collate_lists)
            done = len(whole.seen) - len(after.seen)
            assert done == stop - 1
            assert json.dumps(before.seen[:done] + after.seen) == json.dumps(whole.seen), stop
    finally:
        del CASES["buffered"]


@pytest.mark.parametrize("data", [Rows, Placed])
def test_nothing_is_read_to_find_the_place(tmp_path, data):
    """The first row that is read after a resume is the next one that training needs."""
    case = {Rows: "shuffle", Placed: "stream"}[data]
    whole = run(tmp_path / "whole", case, max_steps=7)
    run(tmp_path / "broken", case, stop=4, max_steps=7)
    after = run(tmp_path / "broken", case, resume=True, max_steps=7)
    assert after.train_dataset.read == whole.train_dataset.read[3 * 4 :]


def test_ignore_data_skip_is_respected(tmp_path):
    """Then the epoch begins anew, as under a stock Trainer."""
    run(tmp_path, "stream", stop=4)
    after = run(tmp_path, "stream", resume=True, ignore_data_skip=True)
    assert after.seen[0][0] == [0, 1, 2, 3]


def test_a_place_in_other_data_is_said_and_left_to_the_trainer(tmp_path, caplog):
    """A place that means nothing any more is said, and the Trainer leaves out as many batches as it would."""
    run(tmp_path, "shuffle", stop=4)
    data, settings = CASES["shuffle"]

    class Fewer(data):
        def __len__(self):
            return ROWS - 2

    CASES["fewer"] = (Fewer, settings)
    try:
        after = run(tmp_path, "fewer", resume=True)
    finally:
        del CASES["fewer"]
    assert after.state.global_step == 18
    assert "The Trainer leaves out as many batches" in caplog.text


@pytest.mark.quick
def test_a_place_that_no_loader_takes_is_said(tmp_path, caplog):
    """A loader of a class of its own cannot be counted: it goes on as the stock Trainer's, and the log says so."""
    run(tmp_path, "shuffle", stop=4)
    data, settings = CASES["shuffle"]

    class Below(transformers.Trainer):
        def get_train_dataloader(self):
            loader = super().get_train_dataloader()
            loader.base_dataloader.__class__ = type("OwnLoader", (type(loader.base_dataloader),), {})
            return loader

    class Own(Noting, Below):
        pass

    made = trainer(tmp_path, Own, max_steps=6, save_steps=1, seed=3, remove_unused_columns=False, **settings)
    made.seen, made.train_dataset, made.data_collator = [], data(), collate
    made.train(resume_from_checkpoint=True)
    assert made.state.global_step == 6
    assert "the checkpoint has the place of a loader that was counted; OwnLoader of now is not" in caplog.text


MOMENTS = ("on_step_begin", "on_pre_optimizer_step")


class Preempted(TrainerCallback):
    """Has Transformers save at a moment within the step after ``steps``, before its optimizer steps: as SIGTERM does."""

    def __init__(self, moment, steps):
        self.steps = steps
        setattr(self, moment, self.ask)

    def ask(self, args, state, control, **_):
        if state.global_step == self.steps:
            self.manager.is_checkpoint_requested = True


def preempted(folder, case, moment, steps, **more):
    jit = pytest.importorskip("transformers.trainer_jit_checkpoint")
    callback = Preempted(moment, steps)
    before = signal.getsignal(signal.SIGTERM)

    def begin(made):
        asked = made.callback_handler.callbacks
        callback.manager = next(one.jit_manager for one in asked if isinstance(one, jit.JITCheckpointCallback))
        asked.insert(0, callback)

    try:
        return run(folder, case, begin=begin, enable_jit_checkpoint=True, **more)
    finally:
        signal.signal(signal.SIGTERM, before)


JIT = {
    "shuffle": (7,),
    "workers": (0, 9),
    "accumulated": (3,),
    "stream": (0, 10),
    "stream, workers": (5, 7),
    "stream, accumulated": (1, 3),
    "stream that is read again": (6,),
}
CASES["stream, accumulated"] = Placed, {"gradient_accumulation_steps": 3, "max_steps": 9}


@pytest.mark.parametrize(
    ("case", "moment"),
    [
        pytest.param(case, moment, marks=[pytest.mark.thorough] if "workers" in case or case == "shuffle" else [])
        for case in JIT
        for moment in MOMENTS
    ],
)
def test_a_save_before_the_optimizer_step_counts_what_was_trained_on(tmp_path, case, moment):
    """``enable_jit_checkpoint`` saves within a step: a resume trains all of that step, with the draws that it had."""
    whole = run(tmp_path / "whole", case, save_steps=100)
    # The stream ends within the third step, which has but one batch.
    more = (2,) if (case, moment) == ("stream, accumulated", "on_step_begin") else ()
    for steps in JIT[case] + more:
        before = preempted(tmp_path / str(steps), case, moment, steps, save_steps=100)
        after = run(tmp_path / str(steps), case, resume=True, save_steps=100)
        done = len(whole.seen) - len(after.seen)
        assert json.dumps(before.seen[:done] + after.seen) == json.dumps(whole.seen), (case, steps)
        assert fingerprint(after) == fingerprint(whole)


@pytest.mark.parametrize("case", ["stream", "stream that is read again"])
def test_a_pass_over_a_stream_that_ends_within_a_step_is_resumed_exactly(tmp_path, case):
    """Saved at its end: the batches of the step that is not done are trained on again, with the random numbers of then."""
    more = {"save_strategy": "epoch", "gradient_accumulation_steps": 2, "max_steps": 8}
    whole = run(tmp_path / "whole", case, **more)
    run(tmp_path / "stopped", case, stop=4, **more)
    after = run(tmp_path / "stopped", case, resume=True, **more)
    assert len(whole.seen) % 7  # a pass has 7 batches
    assert json.dumps(after.seen) == json.dumps(whole.seen[6:])
    assert fingerprint(after) == fingerprint(whole)


class Counting(torch.nn.Module):
    """A model whose forward pass changes a buffer."""

    def __init__(self):
        super().__init__()
        self.inner = model()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, input_ids, labels):
        self.calls += 1
        return self.inner(input_ids=input_ids, labels=labels)


@pytest.mark.parametrize("moment", [MOMENTS[0], pytest.param(MOMENTS[1], marks=pytest.mark.quick)])
def test_a_save_within_a_step_says_that_buffers_will_be_changed_twice(tmp_path, moment, caplog):
    """What the forward pass of the step has changed is saved; a save before it has nothing to say."""
    preempted(tmp_path, "stream", moment, 2, save_steps=100, of=Counting())
    assert ("its forward pass has changed buffers" in caplog.text) == (moment == "on_pre_optimizer_step")


LOGGED = {
    "": {},
    "accumulated": {"gradient_accumulation_steps": 2},
    "the epoch begins anew": {"ignore_data_skip": True},
}


def losses(made):
    return [row["loss"] for row in made.state.log_history if "loss" in row]


@pytest.mark.parametrize("case", LOGGED)
def test_a_loss_that_is_logged_behind_a_resume_is_the_mean_of_all_its_steps(tmp_path, case):
    """Also of those before the save, which the Trainer had summed up and not logged yet."""
    more = {"max_steps": 12, "logging_steps": 4, "save_steps": 6, **LOGGED[case]}

    whole = trainer(tmp_path / "whole", **more)
    whole.train()
    with contextlib.suppress(KeyboardInterrupt):
        trainer(tmp_path / "stopped", callbacks=[Stop(7)], **more).train()
    resumed = trainer(tmp_path / "stopped", **more)
    resumed.train(resume_from_checkpoint=True)
    assert losses(resumed) == losses(whole)


@pytest.mark.parametrize(("case", "moment"), [("shuffle", MOMENTS[0]), ("accumulated", MOMENTS[1])])
@pytest.mark.quick
def test_a_step_that_is_done_again_counts_once(tmp_path, case, moment):
    """``enable_jit_checkpoint`` saves within a step, behind its forward pass too: the losses that are logged, the tokens and
    the operations that are counted are as without a stop.
    """
    more = {"max_steps": 8, "logging_steps": 4, "save_steps": 100, "include_num_input_tokens_seen": "all"}
    whole = run(tmp_path / "whole", case, **more)
    before = preempted(tmp_path / "stopped", case, moment, 5, **more)
    assert before.state.global_step < 8
    after = run(tmp_path / "stopped", case, resume=True, **more)
    assert losses(after) == losses(whole)
    assert len(losses(whole)) == 2
    assert after.state.num_input_tokens_seen == whole.state.num_input_tokens_seen > 0
    assert after.state.total_flos == whole.state.total_flos > 0


@pytest.mark.quick
def test_a_training_that_is_over_does_not_go_on(tmp_path):
    """Started again, as a job that was killed behind its last save: no step more, also in the middle of an epoch."""
    more = {"max_steps": 7, "save_steps": 7, "lr_scheduler_type": "constant"}
    whole = trainer(tmp_path, **more)
    whole.train()
    again = trainer(tmp_path, **more)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 7
    weights = whole.model.state_dict()
    assert all(torch.equal(weights[name], one) for name, one in again.model.state_dict().items())


class Ends(TrainerCallback):
    """Stops the training behind a step, as EarlyStoppingCallback does."""

    def on_step_end(self, args, state, control, **_):
        control.should_training_stop = state.global_step == 4


def test_a_training_that_a_callback_stopped_says_that_it_goes_on(tmp_path, caplog):
    """Started again it does more steps, as under a stock Trainer; a resume from an earlier step has nothing to say."""
    trainer(tmp_path, callbacks=[Ends()]).train()
    caplog.clear()
    again = trainer(tmp_path, callbacks=[Ends()])
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert "a callback stopped training" not in caplog.text
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 6
    assert "a callback stopped training at the step of" in caplog.text


@pytest.mark.parametrize("case", ["an evaluation is there", "a pass over a stream"])
def test_a_row_of_the_log_that_is_missing_is_said(tmp_path, caplog, case):
    """Saved in the last step of an epoch, before its row of the log: also behind an evaluation, and of streams."""
    more = {"logging_strategy": "epoch", "save_steps": 3, "max_steps": 12}
    if case == "an evaluation is there":
        more |= {"eval_strategy": "steps", "eval_steps": 3, "per_device_train_batch_size": 8}
        with contextlib.suppress(KeyboardInterrupt):
            trainer(tmp_path, callbacks=[Stop(4)], **more).train()
        trainer(tmp_path, **more).train(resume_from_checkpoint=True)
    else:
        more |= {"save_steps": 7}
        run(tmp_path, "stream that is read again", stop=8, **more)
        run(tmp_path, "stream that is read again", resume=True, **more)
    assert "the row of the log of that epoch is missing" in caplog.text


@pytest.mark.quick
def test_a_row_of_the_log_without_a_gradient_is_said(tmp_path, caplog):
    """No step is left of the pass after the resume: its row has no ``grad_norm``, and a warning says so."""
    more = {"logging_strategy": "epoch", "save_steps": 3, "max_steps": 5, "gradient_accumulation_steps": 2}
    run(tmp_path, "stream", stop=4, **more)
    after = run(tmp_path, "stream", resume=True, **more)
    bare = [row for row in after.state.log_history if "loss" in row and "grad_norm" not in row]
    assert len(bare) == caplog.text.count("no step was left of the pass over the stream") == 1


EVALUATED, ROW = {"step": 6, "eval_loss": 1.0}, {"step": 6, "loss": 1.0, "grad_norm": 1.0}
EARLIER = [{**EVALUATED, "step": 3}, {**ROW, "step": 3}]
BOTH = {"eval_strategy": "epoch", "logging_strategy": "epoch"}
SAYS = {
    "evaluation and row": "the evaluation and the row of the log of that epoch",
    "evaluation": "the evaluation of that epoch",
    "row": "the row of the log of that epoch",
    "stopped": "a callback stopped training",
    "workers": "the workers of evaluations",
}


@pytest.mark.parametrize(
    ("state", "arguments", "said"),
    [
        ({"log_history": EARLIER}, BOTH, ["evaluation and row"]),
        ({"log_history": [*EARLIER, EVALUATED]}, BOTH, ["row"]),
        ({"log_history": [*EARLIER, ROW]}, BOTH, ["evaluation"]),
        ({"log_history": [*EARLIER, ROW, EVALUATED]}, BOTH, []),
        ({"log_history": EARLIER}, {"eval_strategy": "steps", "logging_strategy": "steps"}, []),
        ({"log_history": EARLIER}, {"eval_strategy": "epoch"}, ["evaluation"]),
        ({"log_history": EARLIER, "epoch": 1.5}, BOTH, []),
        ({"log_history": EARLIER, "epoch": 1.5, "max_steps": 6}, BOTH, ["evaluation and row"]),
        ({"log_history": EARLIER}, {**BOTH, "process_index": 1}, []),
        ({"stops": True}, {}, ["stopped"]),
        ({"stops": True, "epoch": 1.5}, {}, ["stopped"]),
        ({"stops": True, "max_steps": 6}, {}, []),
        ({"log_history": EARLIER}, {"dataloader_persistent_workers": True}, ["workers"]),
        ({"log_history": EARLIER[1:]}, {"dataloader_persistent_workers": True}, []),
    ],
)
@pytest.mark.quick
def test_what_a_resumed_trainer_goes_on_without_is_said_and_nothing_else(tmp_path, caplog, state, arguments, said):
    """Saved in the last step of an epoch or of all, before what is done at its end; stopped by a callback; workers."""
    stops = {"TrainerControl": {"args": {"should_training_stop": state.pop("stops", False)}}}
    whole = {"epoch": 2.0, "global_step": 6, "max_steps": 12, "log_history": [], "stateful_callbacks": stops, **state}
    (tmp_path / "trainer_state.json").write_text(json.dumps(whole))
    usual = {
        "process_index": 0,
        "eval_strategy": "no",
        "logging_strategy": "no",
        "dataloader_persistent_workers": False,
    }
    missing.warn(tmp_path, SimpleNamespace(**{**usual, **arguments}))
    assert len(caplog.messages) == len(said)
    assert all(SAYS[one] in caplog.text for one in said)


@pytest.mark.parametrize(
    ("logs", "arguments", "is_said"),
    [
        ({"loss": 1.0}, {}, True),
        ({"loss": 1.0, "grad_norm": 1.0}, {}, False),
        ({"eval_loss": 1.0}, {}, False),
        ({"loss": 1.0}, {"max_grad_norm": 0}, False),
        ({"loss": 1.0}, {"process_index": 1}, False),
    ],
)
@pytest.mark.quick
def test_only_a_row_that_lacks_a_gradient_is_said(caplog, logs, arguments, is_said):
    """Not where no gradient is clipped, so that stock rows have none, either; on the first process alone."""
    missing.warn_of_no_step(logs, SimpleNamespace(**{"process_index": 0, "max_grad_norm": 1.0, **arguments}))
    assert ("has no grad_norm" in caplog.text) is is_said


WARNINGS = {
    "evaluation": "the evaluation and the row of the log of that epoch is missing",
    "callback": "a callback stopped training at the step of",
    "workers": "the workers of evaluations, which stay (dataloader_persistent_workers), begin anew",
}


@pytest.mark.quick
def test_a_resume_names_all_that_differs_from_a_run_without_a_stop(tmp_path, caplog):
    """Once each: what was due at the end of the epoch of the save, a callback that stopped, workers of evaluations that stay.

    A resume from within the first epoch has nothing to say.
    """

    class Stops(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            control.should_training_stop = state.global_step == 6

    more = {
        "per_device_train_batch_size": 8, "eval_strategy": "epoch", "logging_strategy": "epoch", "save_steps": 2,
        "dataloader_num_workers": 1, "dataloader_persistent_workers": True, "max_steps": 8,
    }  # fmt: skip
    trainer(tmp_path, callbacks=[Stops()], **more).train()
    for path, expected in ((str(tmp_path / "checkpoint-2"), 0), (True, 1)):
        caplog.clear()
        with pytest.raises(KeyboardInterrupt):
            trainer(tmp_path, callbacks=[Leave()], **more).train(resume_from_checkpoint=path)
        assert {name: caplog.text.count(text) for name, text in WARNINGS.items()} == dict.fromkeys(WARNINGS, expected)


@pytest.mark.quick
def test_a_resume_in_a_later_pass_over_a_stream_says_that_epochs_count_from_0(tmp_path, caplog):
    """Once; in the first pass there is nothing to say."""
    more = {"per_device_train_batch_size": 13}  # a pass has two batches
    run(tmp_path, "stream", stop=4, **more)
    for step, expected in ((1, 0), (3, 1)):
        caplog.clear()
        path = str(tmp_path / f"checkpoint-{step}")
        run(tmp_path, "stream", resume=path, save_strategy="no", **more, max_steps=step + 1)
        assert caplog.text.count("epochs are logged as of 0") == expected
