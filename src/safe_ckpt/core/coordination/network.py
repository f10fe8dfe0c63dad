"""Addresses and ports of this host: where rank 0 listens, which addresses answer, and how many file descriptors are left."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import queue
import resource
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from safe_ckpt.errors import ConfigError

PORTS = 16
"""With a port given, the first free one of so many is taken: each session of a job listens on one of its own."""
CONNECT_S = 10.0
"""How long finding an address that answers may take."""
_STAGGER_S = 0.2
_PAUSE_S = 0.2
_SIOCGIFADDR = 0x8915
_MOST = 16


def listen(interface: str | None, port: int) -> socket.socket:
    """A socket that listens where rank 0 is to be reached.

    Args:
        interface: the name of a network interface of this host, or one of its addresses. None for all of them, or for the
            loopback where the launcher says that all ranks run on this host.
        port: the first of the ports to try; 0 for any.

    Raises:
        ConfigError: there is no such interface here, or no free port.
    """
    # torchrun sets both; elsewhere only the ranks themselves know where they run, when they have met.
    local, world = os.environ.get("LOCAL_WORLD_SIZE", ""), os.environ.get("WORLD_SIZE", "")
    anywhere = "127.0.0.1" if local and local == world else ""
    address = address_of(interface) if interface else anywhere
    problem: OSError | None = None
    for number in range(port, port + PORTS) if port else (0,):
        try:
            return _listening(address, number)
        except OSError as error:
            problem = error
    key = "network.port" if port else "network.interface"
    ports = f"ports {port} to {port + PORTS - 1}" if port else "no port"
    raise ConfigError(key=key, message=f"cannot listen on {address or 'any address'}, {ports}: {problem}")


def _listening(address: str, port: int) -> socket.socket:
    if address:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, port), family=family, backlog=1024)
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # IPv6 may be compiled in and switched off
            return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", port), backlog=1024)


def address_of(interface: str) -> str:
    """The address of an interface of this host, given by its name or as the address itself.

    Raises:
        ConfigError: there is none of that name.
    """
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(interface))
    own = [address for name, address in _interfaces() if name == interface]
    if not own:
        names = ", ".join(sorted({name for name, _ in _interfaces()}))
        message = f"there is no {interface!r} with an address here, but {names}"
        raise ConfigError(key="network.interface", message=message)
    return own[0]


def addresses(listening: str) -> list[str]:
    """Under which addresses other hosts may reach what listens at ``listening`` (an address; all of them for "::")."""
    if not ipaddress.ip_address(listening).is_unspecified:
        return [listening]
    own = [address for _, address in _interfaces() if not ipaddress.ip_address(address).is_loopback]
    master = os.environ.get("MASTER_ADDR", "")
    # Another host's name in MASTER_ADDR would cost its timeout, or lead to a program that listens there.
    first = [_outward_address(master), *([master] if master and _is_own(master, own) else [])]
    names = [name for name in (*first, *own, socket.gethostname()) if name and name not in ("localhost", "127.0.0.1")]
    return list(dict.fromkeys(names))[:_MOST]


def _is_own(name: str, own: Sequence[str]) -> bool:
    try:
        # As bytes: for text Python may import a codec in the middle of training.
        return any(info[4][0] in own for info in socket.getaddrinfo(name.encode(), None))
    except OSError:
        return False


def _outward_address(target: str) -> str:
    # Connecting a datagram socket sends nothing; it only makes the kernel choose a source address.
    for name in (target, "198.51.100.1"):
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((name, 9))
            address = str(probe.getsockname()[0])
            if not ipaddress.ip_address(address).is_loopback:
                return address
    return ""


def _interfaces() -> list[tuple[str, str]]:
    """The addresses of this host with the names of their interfaces, IPv4 first; without those of one link only."""
    interfaces = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # one without an address
                row = fcntl.ioctl(asked, _SIOCGIFADDR, struct.pack("256s", name[:15].encode()))
                interfaces.append((name, socket.inet_ntoa(row[20:24])))
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text(encoding="utf-8").splitlines():
            digits, _, _, scope, _, name = line.split()
            if scope != "20":  # link-local
                interfaces.append((name, str(ipaddress.ip_address(bytes.fromhex(digits)))))
    return interfaces


def reachable(hosts: Sequence[str], port: int, within_s: float = CONNECT_S) -> Iterator[str]:
    """The ``hosts`` that accept a connection on ``port``, as they answer: all are tried, the first ones a moment earlier.

    Each once. Ends when all have answered or ``within_s`` is over; those that cannot be reached are tried again until then.
    """
    answered: queue.SimpleQueue[str] = queue.SimpleQueue()
    deadline = time.monotonic() + within_s

    def knock(host: str, delay_s: float) -> None:
        time.sleep(delay_s)
        while (left_s := deadline - time.monotonic()) > 0:
            try:
                # Short, and again: while a network is down, a knock that is on its way waits longer than the outage.
                address: Any = (host.encode(), port)  # the stubs know text only
                socket.create_connection(address, timeout=min(2.0, left_s)).close()
            except OSError:
                time.sleep(_PAUSE_S)
                continue
            answered.put(host)
            return

    for number, host in enumerate(hosts):
        arguments = (host, number * _STAGGER_S)
        threading.Thread(target=knock, args=arguments, name="safe_ckpt-knock", daemon=True).start()
    for _ in hosts:
        try:
            yield answered.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return


def refuses(host: str, port: int) -> bool:
    """Whether nobody listens on ``port`` there: its host says so at once. One that gives no answer has not said it."""
    try:
        address: Any = (host.encode(), port)  # the stubs know text only
        socket.create_connection(address, timeout=2.0).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


def ensure_descriptors(needed: int) -> str:
    """Raise this process's soft limit of file descriptors if ``needed`` more would not fit. Returns what stays wrong, or ""."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    total = needed + _open_descriptors()
    if soft == resource.RLIM_INFINITY or total <= soft:
        return ""
    most = total if hard == resource.RLIM_INFINITY else min(total, hard)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    if total <= soft:
        return ""
    return f"{total} file descriptors are needed here and {soft} allowed: raise the hard limit (ulimit -Hn) to {total}"


def out_of_descriptors() -> str:
    """Say that this process has no file descriptor left; "" where it has one."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        return f"this process has no file descriptor left (ulimit -n is {soft}): {error.strerror}"
    return ""


def _open_descriptors() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return 64
