"""Signs of life: what they count, where they are written, and that they do not add up."""

import json

import torch

from kit.patience import wait_until
from safe_ckpt import Checkpointer
from safe_ckpt.events import Alive, Committed
from safe_ckpt.extensions.record import SignsOfLife
from safe_ckpt.hooks import steps
from safe_ckpt.hooks.emitter import Emitter
from safe_ckpt.hooks.event_log import JsonlHook


def optimizer():
    model = torch.nn.Linear(2, 2)
    model(torch.ones(2)).sum().backward()
    return torch.optim.SGD(model.parameters(), lr=0.1)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_optimizers_that_take_turns_make_one_step_together():
    """The two of a GAN count once a round; one alone counts each step."""
    steps.begin_counting(lambda: None)
    one, two = optimizer(), optimizer()
    before = steps.taken()
    for _ in range(3):
        one.step()
        two.step()
    assert steps.taken() - before in (2, 3)  # whether the first of them begins a round hangs on who stepped before
    before = steps.taken()
    for _ in range(4):
        two.step()
    assert steps.taken() == before + 4


def test_signs_begin_with_the_first_step_and_end_with_the_job():
    """Before it there is no thread; they come as long as the job runs, with the steps that were made."""
    seen = []
    emit = Emitter([seen.append])
    signs = SignsOfLife(emit, every_s=0.01)
    steps.begin_counting(signs.start)
    assert not seen
    optimizer().step()
    wait_until(lambda: len(seen) > 1, 20)
    assert seen[-1].optimizer_steps == steps.taken()
    signs.stop()
    emit.close()


def test_a_sign_takes_the_place_of_the_one_before(tmp_path):
    """Where nothing came in between; else it is a line of its own. None is torn, whatever its length."""
    hook = JsonlHook(tmp_path / "events.jsonl")
    for made in (1, 20, 300):
        hook(Alive(rank=0, optimizer_steps=made))
    hook(Committed(rank=0, name="a", step=1, path="/a", sequence=1, size_bytes=1, seconds=0.1))
    for made in (400, 5):
        hook(Alive(rank=0, optimizer_steps=made))
    found = lines(tmp_path / "events.jsonl")
    assert [one["event"] for one in found] == ["run", "alive", "committed", "alive"]
    assert [one["optimizer_steps"] for one in found if one["event"] == "alive"] == [300, 5]


def test_a_job_records_its_opening_its_steps_and_its_end(tmp_path):
    """Also one that saves nothing; the line of a run says when its process began."""
    (tmp_path / ".safe_ckpt").mkdir()
    (tmp_path / ".safe_ckpt/events.jsonl").touch()  # where there is none, one that saves nothing leaves none
    with Checkpointer(tmp_path):
        first = lines(tmp_path / ".safe_ckpt/events.jsonl")
    assert [one["event"] for one in first] == ["run"]
    assert first[0]["began"] <= first[0]["at"]
    before = steps.taken()
    with Checkpointer(tmp_path) as ckpt:
        optimizer().step()
        ckpt.save(1, {"a": 1}).result(timeout_s=20)
    found = lines(tmp_path / ".safe_ckpt/events.jsonl")
    assert [one["event"] for one in found] == [
        *("run", "end", "run", "agreed", "snapshotted", "written", "committed", "end")
    ]
    assert [one["optimizer_steps"] - before for one in (found[3], found[-1])] == [steps.taken() - before] * 2
    assert found[-1]["in_order"]
    try:
        with Checkpointer(tmp_path):
            raise KeyError
    except KeyError:
        pass
    assert not lines(tmp_path / ".safe_ckpt/events.jsonl")[-1]["in_order"]
