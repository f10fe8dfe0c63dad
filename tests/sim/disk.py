"""The file system that the hosts share, and what a power cut may leave of it.

The rules are those of ``kit/power_cut.py``: what was written to a file is durable once an fsync of it returned, an entry once
an fsync of its directory returned, and of the rest any part may be there, in any combination. A rename is done as a whole or
not at all. As a disk of one host (``local``) it keeps to them when that host dies. As a network file system a server does each
change of a name durably before it answers; of a host that dies, what it wrote and neither synced nor closed may be missing.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import Any

_TICK_NS = 4_000_000  # a file's times are those of the kernel's last tick
DEVICE = 77


class Node:
    """A file, a directory or a link.

    Attributes:
        base: what was there, durably, at the last power cut; None if the node is newer.
        pending: changes of it that are not durable yet.
        owner: the host whose own disk it is on, by number; -1 for the one that all share.
    """

    __slots__ = (
        "base",
        "children",
        "ctime_ns",
        "data",
        "kind",
        "mode",
        "mtime_ns",
        "nlink",
        "number",
        "owner",
        "pending",
        "target",
    )

    def __init__(self, number: int, kind: str, mode: int, now_ns: int) -> None:
        self.number, self.kind, self.mode = number, kind, mode
        self.data = bytearray()
        self.children: dict[str, Node] = {}
        self.target = ""
        self.nlink = 0
        self.owner = -1
        self.mtime_ns = self.ctime_ns = now_ns
        self.base: tuple[bytes, dict[str, Node]] | None = None
        self.pending: list[Change] = []

    def status(self) -> os.stat_result:
        """As ``os.stat`` has it."""
        kinds = {"file": stat.S_IFREG, "folder": stat.S_IFDIR, "link": stat.S_IFLNK}
        size = len(self.data) if self.kind == "file" else len(self.target) if self.kind == "link" else 4096
        seconds = self.mtime_ns // 10**9, self.mtime_ns // 10**9, self.ctime_ns // 10**9
        places = (
            kinds[self.kind] | self.mode,
            self.number,
            DEVICE + 1 + self.owner,
            max(1, self.nlink),
            0,
            0,
            size,
            *seconds,
        )
        floats = tuple(number / 1e9 for number in (self.mtime_ns, self.mtime_ns, self.ctime_ns))
        return os.stat_result((*places, *floats, self.mtime_ns, self.mtime_ns, self.ctime_ns))


class Change:
    """One change, in the order in which they were made."""

    __slots__ = ("at", "child", "data", "durable", "host", "kind", "name", "node", "other", "other_name")

    def __init__(self, kind: str, host: Any, node: Node, **facts: Any) -> None:
        self.kind, self.host, self.node, self.durable = kind, host, node, False
        self.name: str = facts.get("name", "")
        self.other: Node | None = facts.get("other")
        self.other_name: str = facts.get("other_name", "")
        self.child: Node | None = facts.get("child")
        self.at: int = facts.get("at", 0)
        self.data: bytes = facts.get("data", b"")

    def apply(self) -> None:
        """Do it."""
        node, children = self.node, self.node.children
        if self.kind == "write":
            if len(node.data) < self.at:
                node.data.extend(bytes(self.at - len(node.data)))
            node.data[self.at : self.at + len(self.data)] = self.data
        elif self.kind == "truncate":
            del node.data[self.at :]
            node.data.extend(bytes(max(0, self.at - len(node.data))))
        elif self.kind == "enter" and self.child is not None:
            children[self.name] = self.child
        elif self.kind == "leave":
            children.pop(self.name, None)
        elif self.kind in ("rename", "exchange") and self.other is not None and self.name in children:
            there = self.other.children.get(self.other_name)
            if self.kind == "exchange" and there is None:
                return
            moved = children.pop(self.name)
            if self.kind == "exchange" and there is not None:
                children[self.name] = there
            self.other.children[self.other_name] = moved


class Disk:
    """See the module.

    Args:
        world: whose clock and random source it uses.
        local: it is the disk of one host.
        exchanges: whether it can swap two names.
        links: whether it has hard links.
    """

    def __init__(self, world: Any, *, local: bool, exchanges: bool = True, links: bool = True) -> None:
        self.world, self.local, self.exchanges, self.links = world, local, exchanges, links
        self._next = 2
        self._changes: list[Change] = []
        self._nodes: list[Node] = []
        self.free_bytes = 1 << 40
        self.stale_s = 0.0
        self.root = self.node("folder", 0o755)
        self.root.base = (b"", {})
        self.watchers: list[Any] = []

    def node(self, kind: str, mode: int) -> Node:
        """A new one, without a name."""
        self._next += 1
        made = Node(self._next, kind, mode, self.now_ns())
        self._nodes.append(made)
        return made

    def now_ns(self) -> int:
        """The time that is written to files."""
        return int((1_800_000_000 + self.world.now) * 1e9) // _TICK_NS * _TICK_NS

    def change(self, kind: str, host: Any, node: Node, **facts: Any) -> None:
        """Make a change. It is not durable yet, but for what a server does."""
        change = Change(kind, host, node, **facts)
        before = self._named(change)
        change.apply()
        self._changes.append(change)
        for one in before:
            one.nlink -= 1
        if kind == "enter" and change.child is not None:
            change.child.nlink += 1
            change.child.owner = node.owner
        target = change.other or node
        node.mtime_ns = node.ctime_ns = target.mtime_ns = target.ctime_ns = self.now_ns()
        if kind in ("write", "truncate") or self.is_local(target):
            target.pending.append(change)
        else:
            change.durable = True
        if kind in ("rename", "exchange", "enter", "leave", "write"):
            for watch in self.watchers:
                watch(change)

    def is_local(self, node: Node) -> bool:
        """Whether it is on the disk of one host."""
        return self.local or node.owner >= 0

    def _named(self, change: Change) -> list[Node]:
        """What loses a name by it."""
        if change.kind == "leave":
            return [change.node.children[change.name]]
        if change.kind == "rename" and change.other is not None and change.other_name in change.other.children:
            return [change.other.children[change.other_name]]
        return []

    def sync(self, node: Node) -> None:
        """Make what was changed in it durable."""
        for change in node.pending:
            change.durable = True
        node.pending.clear()

    def power_cut(self, host: Any) -> int:
        """A host died: what it had not made durable may be missing. Returns how many changes are lost."""
        pending = [one for one in self._changes if not one.durable and (host is None or one.host is host)]
        lost = self._choose(pending)
        # What lay in its page cache and has reached the disk is durable; what others have in theirs goes on as before.
        kept = [one for one in self._changes if one not in lost]
        for change in pending:
            change.durable = True
        self._replay(kept)
        self._changes = kept
        if all(one.durable for one in kept):
            self._changes = []
            for node in self._nodes:
                node.base = (bytes(node.data), dict(node.children))
        self.world.log("power cut", getattr(host, "name", "all"), f"open={len(pending)} lost={len(lost)}")
        return len(lost)

    def _choose(self, pending: list[Change]) -> set[Change]:
        rng = self.world.rng
        way = rng.randrange(6)
        if way == 0 or not pending:
            return set()
        if way == 1:
            return set(pending)
        if way == 2:
            return {rng.choice(pending)}
        if way == 3:
            kept = rng.choice(pending)
            return {one for one in pending if one is not kept}
        share = 0.5 if way == 4 else 0.1
        return {one for one in pending if rng.random() < share}

    def _replay(self, changes: list[Change]) -> None:
        for node in self._nodes:
            data, children = node.base if node.base is not None else (b"", {})
            node.data[:] = data
            node.children.clear()
            node.children.update(children)
        for change in changes:
            change.apply()
        self._count()

    def _count(self) -> None:
        """Each node knows its names and its changes again."""
        for node in self._nodes:
            node.nlink = 0
            node.pending = [one for one in node.pending if not one.durable]
        for node in self._nodes:
            for child in node.children.values():
                child.nlink += 1

    def tree(self, node: Node | None = None, path: str = "") -> dict[str, Node]:
        """All that is there, by path."""
        node = node or self.root
        found: dict[str, Node] = {}
        for name, child in sorted(node.children.items()):
            found[f"{path}/{name}"] = child
            if child.kind == "folder":
                found.update(self.tree(child, f"{path}/{name}"))
        return found

    def forget(self, path: str) -> None:
        """A folder is gone for good, with all that is in it."""
        above, _, name = path.rpartition("/")
        node = self.root
        for part in above.strip("/").split("/"):
            node = node.children[part]
        if name in node.children:
            self.change("leave", None, node, name=name)
            self.sync(node)

    def make_folder(self, path: str, owner: int = -1) -> None:
        """Set up: a folder that is there, durably, from the beginning; on this host's own disk."""
        node = self.root
        for name in path.strip("/").split("/"):
            if name not in node.children:
                self.change("enter", None, node, name=name, child=self.node("folder", 0o755))
            node = node.children[name]
        node.owner = owner
        for change in self._changes:
            change.durable = True
        for one in self._nodes:
            one.pending.clear()


def fail(code: int, path: object = None, other: object = None) -> OSError:
    """The error of a call."""
    return OSError(code, os.strerror(code), path, None, other)


__all__ = ["DEVICE", "Change", "Disk", "Node", "errno", "fail"]
