"""A state that another thread changes while it is saved: a named error says which item, and what to do."""

import sys
import threading
from pathlib import Path

import pytest
import torch

from safe_ckpt import Checkpointer, PerRank
from safe_ckpt.adapters.planning import Attempt, torch_file
from safe_ckpt.errors import StateError

ATTEMPTS = 60


class Changing:
    """Entries come and go on another thread as long as this is entered."""

    def __init__(self, change):
        self._change, self._over = change, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self):
        number = 0
        while not self._over.is_set():
            self._change(number)
            number += 1

    def __enter__(self):
        self._before = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        self._thread.start()

    def __exit__(self, *_):
        sys.setswitchinterval(self._before)
        self._over.set()
        self._thread.join()


def tensors():
    held = {f"k{number}": torch.ones(2) for number in range(50)}

    def change(number):
        held[f"n{number % 50}"] = torch.ones(3)
        held.pop(f"n{(number + 25) % 50}", None)

    return held, change


def module():
    held = torch.nn.Linear(4, 4)

    def change(number):
        held.register_buffer(f"b{number % 20}", torch.ones(2))
        held._buffers.pop(f"b{(number + 10) % 20}", None)

    return held, change


@pytest.mark.parametrize("make", [tensors, module])
@pytest.mark.parametrize("wrap", [lambda value: value, PerRank])
def test_an_item_changed_by_a_thread_within_a_save_is_named(tmp_path, make, wrap):
    """Each save is good, or a StateError that names the item: never a bare KeyError or RuntimeError."""
    held, change = make()
    refused = []
    with Checkpointer(tmp_path) as ckpt, Changing(change):
        for step in range(ATTEMPTS):
            try:
                ckpt.save(step, {"changing": wrap(held), "other": {"a": 1}})
            except StateError as error:
                refused.append(error)
        ckpt.wait()
    others = [error for error in refused if not (error.key.startswith("changing") and "thread" in error.message)]
    assert others == []


def test_items_that_come_and_go_within_a_save_are_of_one_moment(tmp_path):
    """The mapping itself is looked at once: a save has the items that were there at one moment."""
    held = {"always": {"a": 1}}

    def change(number):
        held[f"n{number % 20}"] = {"x": number}
        held.pop(f"n{(number + 10) % 20}", None)

    with Checkpointer(tmp_path) as ckpt, Changing(change):
        for step in range(ATTEMPTS):
            ckpt.save(step, held)
        ckpt.wait()


class Raising:
    """An object of the user's that is to be saved."""

    def __init__(self, error):
        self.error = error

    def state_dict(self):
        raise self.error

    def load_state_dict(self, state):
        raise self.error


class Stopped(RuntimeError):
    """An error of the user's that sounds like Python's."""


def test_errors_of_the_users_code_stay_what_they_are(tmp_path):
    """A ``state_dict()`` that raises a KeyError or RuntimeError of its own has not been changed by a thread."""
    with Checkpointer(tmp_path) as ckpt:
        for error in (KeyError("mine"), IndexError("mine"), RuntimeError("mine"), Stopped("mine, during iteration 3")):
            with pytest.raises(type(error), match="mine"):
                ckpt.save(1, {"a": Raising(error)})


def test_an_adapters_file_changed_within_a_save_is_named():
    """What Lightning, Accelerate and the others put into a file is named by that file; the rest is the training's state."""
    held = {number: number for number in range(10)}

    class Reducing:
        def __reduce__(self):
            held.pop(9, None)  # as at the hands of another thread
            return (Path, ("x",))

    held[0] = Reducing()
    with pytest.raises(StateError, match=r"extra\.bin.*thread"):
        torch_file("extra.bin", held)
    with Attempt() as attempt:
        raise RuntimeError("dictionary changed size during iteration")
    assert "thread" in str(attempt.error)
