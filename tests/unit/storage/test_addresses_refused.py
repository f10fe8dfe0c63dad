"""Where only a directory will do, an address is refused by name, before anything is made of it."""

import pytest

from safe_ckpt import CheckpointConfig, Checkpointer, Mirror, consolidate_offloaded, restore_offloaded, set_up_directory
from safe_ckpt.adapters.spool import spooled
from safe_ckpt.errors import ConfigError

URL = "s3://bucket/run"


@pytest.mark.parametrize(
    ("call", "key"),
    [
        (lambda _: set_up_directory(URL, mode="resume"), "path"),
        (lambda _: consolidate_offloaded({}, URL, timeout_s=5), "destination"),
        (lambda _: restore_offloaded(URL, {}, timeout_s=5), "source"),
        (lambda _: Checkpointer(URL, CheckpointConfig(mirror=Mirror(url=URL))), "mirror.url"),
        (lambda _: spooled(URL, CheckpointConfig(mirror=Mirror(url="s3://bucket/other")), key="dirpath"), "dirpath"),
        (lambda ckpt: ckpt.export({}, URL), "export: directory"),
    ],
)
def test_an_address_is_refused(tmp_path, monkeypatch, call, key):
    """The error names the argument, and no folder called ``s3:`` appears."""
    monkeypatch.chdir(tmp_path)
    with Checkpointer(tmp_path / "run") as ckpt, pytest.raises(ConfigError) as caught:
        call(ckpt)
    assert caught.value.key == key
    assert list(tmp_path.iterdir()) == []  # what is empty at the end was never there
