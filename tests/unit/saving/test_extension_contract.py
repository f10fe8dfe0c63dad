"""Each extension of the package keeps the contract of ``Extension``."""

import pytest

from kit.memory_store import MemoryStore
from safe_ckpt import CheckpointConfig, Mirror
from safe_ckpt.extensions.assemble import assemble
from safe_ckpt.testing.contracts import ExtensionContract

CONFIG = CheckpointConfig(mirror=Mirror(url="s3://bucket/run"))


def test_each_has_another_name():
    """Reports of two extensions of one name would be one."""
    names = [one.name for one in assemble(CONFIG)]
    assert len(names) == len(set(names)) == 5


@pytest.mark.parametrize("number", [*range(4), pytest.param(4, marks=pytest.mark.slow)])
class TestOurs(ExtensionContract):
    """Those that are assembled with all settings on."""

    config = CONFIG

    @pytest.fixture(autouse=True)
    def which(self, number, monkeypatch):
        pytest.importorskip("obstore")
        MemoryStore(monkeypatch)
        self.made = assemble(CONFIG)[number]

    def new_extension(self):
        return self.made
