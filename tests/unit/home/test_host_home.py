"""A directory on each host: what rank 0 does behind its commit."""

import errno

from kit.limits import QUICK
from safe_ckpt.core.formats.manifest import Manifest
from safe_ckpt.core.home import host_home
from safe_ckpt.core.home.home import NewCheckpoint
from safe_ckpt.core.home.host_home import HostHome, Meeting


class Nobody:
    """The calls of hosts that have nothing and agree to all."""

    def call(self, action, args=None, **_):
        return {1: [] if action == "list" else None}

    def close(self, **_):
        pass


def test_a_disk_that_refuses_behind_the_commit_makes_no_failure_of_it(tmp_path, monkeypatch):
    """The checkpoint has its name on rank 0's host: a list of the directory that fails then ends no save by an error."""
    meeting = Meeting(rank=0, hosts={0: (0,), 1: (1,)}, calls=lambda _: Nobody(), answer=None)
    home = HostHome(tmp_path, lease_s=60, owner="", meeting=meeting, name="1", timeouts=QUICK)
    home.open()
    manifest = Manifest(name="step-2", sequence=9, step=2, world_size=2, files=())
    publication = home.begin(NewCheckpoint(path=tmp_path / "step-2", manifest=manifest, op_id="op"), QUICK)
    publication.prepare()

    def refuse(_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(host_home, "entries_in", refuse)
    publication.clean_up()
    monkeypatch.undo()
    home.close()
