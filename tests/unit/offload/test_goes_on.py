"""A training goes on, and writes its files again, as soon as a save has read them."""

import threading

from kit.limits import QUICK
from safe_ckpt import CheckpointConfig
from safe_ckpt.core.saving import one_save
from safe_ckpt.core.saving.engine import Engine
from safe_ckpt.core.saving.request import Destination, Facts, SaveRequest, Snapshot
from safe_ckpt.core.storage.copier import FileCopy
from safe_ckpt.core.storage.presence import Stamp


def test_files_that_are_written_again_right_after_a_save_returns_are_saved_as_they_were(tmp_path, monkeypatch):
    """The last look at what was read is over by then: such a write fails no save, and nothing of it is saved."""
    source, returned, compare = tmp_path / "swap", threading.Event(), one_save.first_changed
    source.write_bytes(b"before")
    copy = FileCopy(source=str(source), path="swap", stamp=Stamp.of(source.stat()))

    def compared(copies):
        returned.wait(1)  # if the caller goes on before this look, it has written by now
        return compare(copies)

    monkeypatch.setattr(one_save, "first_changed", compared)
    engine = Engine(CheckpointConfig(timeouts=QUICK))
    path = tmp_path / "runs/step-1"
    request = SaveRequest(
        destination=Destination(home=engine.hold(tmp_path / "runs"), path=path, kind="directory"),
        payload=Snapshot(copies=[copy]),
        facts=Facts(step=1),
    )
    handle = engine.save(request)
    source.write_bytes(b"behind it")
    returned.set()
    handle.result(timeout_s=60)
    engine.close()
    assert (path / "swap").read_bytes() == b"before"
