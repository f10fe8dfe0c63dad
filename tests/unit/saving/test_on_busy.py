"""While a save is in flight ``on_busy`` says what becomes of the next ``save``. All else waits its turn."""

import json

import pytest
import torch
from safetensors.torch import load_file
from small_runs import config, steps

import safe_ckpt
from kit.inside import engine_of, save_in_flight
from safe_ckpt import Checkpointer
from safe_ckpt.adapters.export import request_of
from safe_ckpt.core.saving.names import NamedHomes
from safe_ckpt.core.saving.request import Snapshot
from safe_ckpt.core.state.items import items_of
from safe_ckpt.errors import RendezvousTimeout, SaveSkippedError

WEIGHTS = {"w": torch.arange(6.0)}


@pytest.fixture
def in_flight():
    with save_in_flight() as free:
        yield free


def save(ckpt, folder):
    return ckpt.save(2, {"w": WEIGHTS}), folder / "run/step-00000002/w.safetensors"


def save_the_same_step(ckpt, folder):
    return ckpt.save(1, {"w": WEIGHTS}), folder / "run/step-00000001/w.safetensors"


def export(ckpt, folder):
    return ckpt.export(WEIGHTS, folder / "weights"), folder / "weights/model.safetensors"


def export_beside(ckpt, folder):
    return ckpt.export(WEIGHTS, folder / "run/final"), folder / "run/final/model.safetensors"


def export_of_a_module(ckpt, folder):
    module = torch.nn.Linear(3, 2, bias=False)
    module.weight = torch.nn.Parameter(WEIGHTS["w"].view(2, 3))
    return ckpt.export(module, folder / "module", dtype=torch.float32), folder / "module/model.safetensors"


SAVES = [save, save_the_same_step]
EXPORTS = [export, export_beside, export_of_a_module]


@pytest.mark.parametrize("wait", ["result", "wait_until_over"])
def test_a_handle_that_is_asked_with_no_time_answers_at_once(tmp_path, in_flight, wait):
    """``timeout_s=0`` asks and does not wait: an error while it is not over, which leaves the save as it is."""
    with Checkpointer(tmp_path, config()) as ckpt:
        handle = ckpt.save(1, {"w": WEIGHTS})
        with pytest.raises(RendezvousTimeout, match="step-00000001"):
            getattr(handle, wait)(timeout_s=0)
        in_flight.set()
        assert handle.result().step == 1
        getattr(handle, wait)(timeout_s=0)


@pytest.mark.parametrize("on_busy", ["wait", "skip"])
@pytest.mark.parametrize("operation", [*SAVES, *EXPORTS], ids=lambda one: one.__name__)
def test_only_a_save_is_skipped_and_only_where_that_is_asked_for(tmp_path, in_flight, operation, on_busy):
    """Its handle says so then; nothing of it is written, and the one in flight is committed. Whatever else was asked for is
    there when its handle says that it is.
    """
    with Checkpointer(tmp_path / "run", config(on_busy=on_busy)) as ckpt:
        first = ckpt.save(1, {"w": {"w": torch.zeros(6)}, "n": 1})
        second, file = operation(ckpt, tmp_path)
        in_flight.set()
        if operation in SAVES and on_busy == "skip":
            with pytest.raises(SaveSkippedError):
                second.result(timeout_s=30)
            assert first.result(timeout_s=30).step == 1
            assert steps(tmp_path / "run") == ["step-00000001"]
            assert (load_file(tmp_path / "run/step-00000001/w.safetensors")["w"] == 0).all()
        else:
            second.result(timeout_s=30)
            assert next(iter(load_file(file).values())).flatten().equal(WEIGHTS["w"])
        ckpt.save(3, {"n": 3}).result(timeout_s=30)
        assert "step-00000003" in steps(tmp_path / "run")


@pytest.mark.parametrize("on_busy", ["wait", "skip"])
def test_there_is_room_for_as_many_as_may_be_in_flight(tmp_path, in_flight, on_busy):
    """With two of them the second is no reason to wait or to skip; an export beside both is not left out either."""
    with Checkpointer(tmp_path / "run", config(on_busy=on_busy, max_in_flight=2)) as ckpt:
        handles = [ckpt.save(step, {"n": step}) for step in (1, 2)]
        handles.append(ckpt.export(WEIGHTS, tmp_path / "weights"))
        in_flight.set()
        for handle in handles:
            handle.result(timeout_s=30)
    assert steps(tmp_path / "run") == ["step-00000001", "step-00000002"]
    assert load_file(tmp_path / "weights/model.safetensors")["w"].equal(WEIGHTS["w"])


@pytest.mark.usefixtures("in_flight")
def test_weights_that_an_adapter_saves_alone_wait_their_turn(tmp_path):
    """What ``save_model`` of Accelerate asks for."""
    with Checkpointer(tmp_path / "run", config(on_busy="skip")) as ckpt:
        engine = engine_of(ckpt)
        ckpt.save(1, {"n": 1})
        home = NamedHomes(engine).hold(tmp_path / "out")
        plans = [plan for item in items_of({"w": WEIGHTS}) for plan in ckpt._planner.plan([item]).files]
        engine.save(request_of(home, tmp_path / "out", Snapshot(files=plans))).result(timeout_s=30)
        assert load_file(tmp_path / "out/w.safetensors")["w"].equal(WEIGHTS["w"])


@pytest.mark.parametrize("on_busy", ["wait", "skip"])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_published_folders_wait_for_each_other(tmp_path, in_flight, on_busy, asynchronous):
    """Each is there in the end, in the order in which they were published."""
    for step in (1, 2):
        one = safe_ckpt.publishing(
            tmp_path, step, config=config(on_busy=on_busy), asynchronous=asynchronous or step == 1
        )
        with one as folder:
            (folder / "n.json").write_text(json.dumps(step))
    in_flight.set()
    if asynchronous:
        one.result()
    assert {name: json.loads((tmp_path / name / "n.json").read_text()) for name in steps(tmp_path)} == {
        "step-00000001": 1,
        "step-00000002": 2,
    }
    assert safe_ckpt.newest(tmp_path).step == 2
