"""Folders that several hosts share, of the kinds that behave differently."""

import contextlib
import hashlib
import mmap
import os
import shutil
import struct
import subprocess
import time
from pathlib import Path

import pytest

from kit.patience import wait_until

_SOURCE = Path(__file__).with_name("faulty_fuse.c")


class Folder:
    """A plain directory of this machine.

    Attributes:
        path: where the hosts see it.
        behind: where this process sees the same files, past the file system that the hosts go through.
    """

    def __init__(self, hosts):
        self.hosts = hosts
        self.path = hosts.work / "shared"
        self.path.mkdir()
        self.behind = self.path

    def serve(self):
        """What is done once, before any host has it."""

    def attach(self, host):
        """What is done on each host, and again when it was restarted."""

    def _put_behind(self):
        self.behind = self.hosts.work / "behind"
        self.behind.mkdir()

    def _mount(self, host, command):
        process = host.start(command, furniture=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)

        def there():
            if process.poll() is not None:
                raise RuntimeError(f"{command} on {host.name}: {process.stderr.read().decode()}")
            return self._is_mounted(host)

        wait_until(there, 30, f"{self.path} on {host.name}")
        process.stderr.close()

    def _is_mounted(self, host):
        lines = Path(f"/proc/{host.pid}/mountinfo").read_text().splitlines()
        return any(line.split()[4] == str(self.path) for line in lines)


class Bindfs(Folder):
    """Through FUSE, mounted by each host for itself. Refuses to exchange two names, as NFS, Lustre and GPFS do."""

    def serve(self):
        """Skip without it."""
        _need("bindfs")
        self._put_behind()

    def attach(self, host):
        """A mount of its own."""
        self._mount(host, ["bindfs", "-f", self.behind, self.path])


class Gluster(Folder):
    """GlusterFS, one brick on the hub, which the hosts reach through the network."""

    def serve(self):
        """Start its servers."""
        _need("glusterd", "gluster", "glusterfs")
        self._put_behind()
        hub = self.hosts.hub
        for own in ("/var/lib/glusterd", "/var/log/glusterfs", "/run"):
            hub.run(["mkdir", "-p", own])
            hub.run(["mount", "-t", "tmpfs", "tmpfs", own])
        hub.run(["mkdir", "/run/gluster"])
        hub.start(["glusterd", "-N", "-LWARNING"], furniture=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_until(lambda: self._tell("volume", "info").returncode == 0, 30, "glusterd")
        for order in (
            ("create", "v", f"{hub.name}:{self.behind}", "force"),
            ("set", "v", "network.ping-timeout", "5"),
            ("start", "v"),
        ):
            done = self._tell("volume", *order)
            if done.returncode != 0:
                pytest.skip(f"no GlusterFS volume here: {done.stderr or done.stdout}")

    def attach(self, host):
        """A client of its own."""
        log = f"/tmp/gluster-{host.name}.log"
        command = ["glusterfs", "-N", "-l", log, f"--volfile-server={self.hosts.hub.name}", "--volfile-id=/v"]
        try:
            self._mount(host, [*command, self.path])
        except (RuntimeError, TimeoutError) as error:
            pytest.skip(f"no GlusterFS mount here: {error}; {host.see(log).read_text()[-1000:]}")

    def _tell(self, *words):
        return self.hosts.hub.run(["gluster", "--mode=script", *words], check=False)


class Image(Folder):
    """A file system in a file, mounted on every host. Copies share their blocks."""

    make = ()

    def serve(self):
        """Make it, and mount it on the hub, where this process looks at it."""
        _need(self.make[0])
        image, hub = self.hosts.work / "image", self.hosts.hub
        with image.open("wb") as file:
            file.truncate(400 << 20)
        subprocess.run([*self.make, image], check=True, capture_output=True, timeout=60)
        done = hub.run(["mount", "-o", "loop", image, self.path], check=False)
        if done.returncode != 0:
            pytest.skip(f"no {self.make[0]} image can be mounted here: {done.stderr}")
        # Once more for the hosts: the device goes when the last of them does.
        self._device = hub.run(["findmnt", "--noheadings", "--output", "SOURCE", self.path]).stdout.strip()
        self.behind = hub.see(self.path)

    def attach(self, host):
        """The same device once more: one file system, several mounts."""
        host.run(["mount", self._device, self.path])


class Btrfs(Image):
    """Btrfs."""

    make = ("mkfs.btrfs", "-q")


class Xfs(Image):
    """XFS."""

    make = ("mkfs.xfs", "-q", "-m", "reflink=1")


class Faulty(Folder):
    """Through a FUSE file system of ours, mounted by each host for itself, that can be told to go wrong.

    Never exchanges two names.

    Args:
        cache_s: how long a host may believe what it knows of names and attributes.
    """

    # As in faulty_fuse.c.
    _LAYOUT = struct.Struct("<qqqqiiiii256s")
    _FIELDS = ("count", "eio_until", "absent_until", "hits", "bad_direct", "no_statfs", "no_links", "no_fallocate")
    _FIELDS = (*_FIELDS, "coarse_s", "absent")

    def __init__(self, hosts, cache_s=0):
        super().__init__(hosts)
        self._cache_s = cache_s
        self._pages = {}

    def serve(self):
        """Build it."""
        self._program = _built()
        self._put_behind()

    def attach(self, host):
        """A mount of its own, with faults of its own."""
        state = self._state(host)
        if not state.exists():
            state.write_bytes(bytes(self._LAYOUT.size))
        times = ",".join(f"{name}_timeout={self._cache_s}" for name in ("entry", "negative", "attr"))
        command = [self._program, self.behind, state, self.path, "-f", "-o", times]
        self._mount(host, command)

    def fail(self, seconds=3600.0, *, on=None):
        """Everything fails with EIO, for so long or until ``heal``; on one host or on all."""
        self._set(on, eio_until=_at(seconds))

    def lose(self, name, seconds=3600.0, *, on=None):
        """There is no file or directory of this name, wherever it lies, for so long or until ``heal``."""
        self._set(on, absent=name.encode(), absent_until=_at(seconds))

    def refuse(self, *, direct=False, statfs=False, links=False, fallocate=False, on=None):
        """Writes of files opened with O_DIRECT (which succeeds) fail; statfs knows nothing; no hard links; no fallocate."""
        self._set(on, bad_direct=direct, no_statfs=statfs, no_links=links, no_fallocate=fallocate)

    def coarsen(self, seconds, *, on=None):
        """Times of files are multiples of so many seconds."""
        self._set(on, coarse_s=seconds)

    def heal(self, *, on=None):
        """Nothing goes wrong any more."""
        self._set(on, **{name: b"" if name == "absent" else 0 for name in self._FIELDS[1:] if name != "hits"})

    def hits(self, host):
        """How many operations of this host went wrong."""
        return self._get(host)["hits"]

    def _state(self, host):
        return self.hosts.work / f"faults-{host.name}"

    def _page(self, host):
        if host.name not in self._pages:
            with self._state(host).open("r+b") as file:
                self._pages[host.name] = mmap.mmap(file.fileno(), self._LAYOUT.size)
        return self._pages[host.name]

    def _get(self, host):
        return dict(zip(self._FIELDS, self._LAYOUT.unpack_from(self._page(host)), strict=True))

    def _set(self, on, **changes):
        for host in [on] if on is not None else self.hosts:
            fields = {**self._get(host), **changes}
            self._LAYOUT.pack_into(self._page(host), 0, *fields.values())


KINDS = {"ext4": Folder, "bindfs": Bindfs, "faulty": Faulty, "glusterfs": Gluster, "btrfs": Btrfs, "xfs": Xfs}


def _at(seconds):
    return time.monotonic_ns() + int(seconds * 1e9)


def _need(*tools):
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")


def _built():
    """The path of the compiled faulty_fuse; skips where it cannot be compiled."""
    _need("gcc", "pkg-config")
    source = _SOURCE.read_bytes()
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "safe_ckpt-tests"
    program = cache / f"faulty_fuse-{hashlib.sha256(source).hexdigest()[:16]}"
    if program.exists():
        return program
    flags = subprocess.run(["pkg-config", "--cflags", "--libs", "fuse3"], capture_output=True, text=True, check=False)
    if flags.returncode != 0:
        pytest.skip("needs libfuse3-dev")
    cache.mkdir(parents=True, exist_ok=True)
    fresh = program.with_name(f"{program.name}.{os.getpid()}")
    command = ["gcc", "-O1", "-Wall", "-o", str(fresh), str(_SOURCE), *flags.stdout.split()]
    built = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    if built.returncode != 0:
        raise RuntimeError(f"faulty_fuse.c does not build here:\n{built.stderr}")
    with contextlib.suppress(OSError):
        os.replace(fresh, program)
    return program


__all__ = ["KINDS", "Bindfs", "Btrfs", "Faulty", "Folder", "Gluster", "Image", "Xfs"]
