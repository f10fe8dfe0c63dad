"""How much memory may still be taken: the least of what the machine and the control groups leave."""

import pytest

from safe_ckpt.core import arena
from safe_ckpt.core.arena import Arena
from safe_ckpt.core.host_memory import available_bytes
from safe_ckpt.errors import NotEnoughSpaceError

GIB = 1 << 30


@pytest.fixture
def machine(tmp_path):
    (tmp_path / "meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable:   {8 * GIB // 1024} kB\n")
    (tmp_path / "groups/job/step").mkdir(parents=True)
    (tmp_path / "groups/memory/job").mkdir(parents=True)
    return tmp_path


def ask(machine, membership):
    (machine / "membership").write_text(membership)
    files = {"meminfo": machine / "meminfo", "membership": machine / "membership", "cgroups": machine / "groups"}
    return available_bytes(**files)


def limit(folder, names, most, used, cached):
    most_name, used_name, cached_name = names
    (folder / most_name).write_text(f"{most}\n")
    (folder / used_name).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{cached_name} {cached}\n")


V2 = ("memory.max", "memory.current", "inactive_file")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def test_without_groups_it_is_what_the_machine_has(machine):
    """MemAvailable; and nothing is claimed where nothing can be read."""
    assert ask(machine, "0::/job\n") == 8 * GIB
    missing = machine / "missing"
    assert available_bytes(meminfo=missing, membership=missing, cgroups=missing) is None


def test_a_group_above_limits_as_well(machine):
    """Version 2: what any level leaves, where file pages that can be dropped do not count as used."""
    limit(machine / "groups/job/step", V2, "max", 0, 0)
    limit(machine / "groups/job", V2, 4 * GIB, 3 * GIB, GIB // 2)
    assert ask(machine, "0::/job/step\n") == GIB + GIB // 2


def test_version_1_groups_limit_too(machine):
    """The memory controller's own hierarchy."""
    limit(machine / "groups/memory/job", V1, 2 * GIB, GIB, 0)
    assert ask(machine, "4:memory:/job\n3:cpuset:/\n") == GIB


def test_a_snapshot_that_does_not_fit_is_an_error_and_not_a_kill(monkeypatch):
    """Asked for more than is left: a typed error with needed and free, before a page is touched."""
    monkeypatch.setattr(arena.host_memory, "available_bytes", lambda: 5 << 20)
    one = Arena()
    one.reserve(4 << 20)
    with pytest.raises(NotEnoughSpaceError) as caught:
        one.reserve(64 << 20)
    assert (caught.value.needed_bytes, caught.value.free_bytes) == (60 << 20, 5 << 20)
    assert one.size == 4 << 20
    one.close()
