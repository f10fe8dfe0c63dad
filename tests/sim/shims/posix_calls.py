"""The system calls of the simulated processes: ``posix``, from which the real ``os.py`` is made.

Each call takes a moment of virtual time and can meet a fault of its host's mount.
"""

from __future__ import annotations

import errno
import os as real_os
import posix as real_posix
import types
from typing import Any

from sim.disk import Node, fail
from sim.shims import children
from sim.shims.paths import (
    FIRST,
    Entry,
    Open,
    Scan,
    begin_call,
    descriptor,
    folder_of,
    follow,
    is_kernels,
    kernel_text,
    open_files,
    text_of,
)
from sim.world import here, hub

_BLOCKED = (
    "sendfile", "copy_file_range", "fork", "forkpty", "listxattr", "getxattr", "setxattr", "removexattr", "posix_spawn",
    "posix_spawnp", "splice", "openpty", "wait", "waitpid", "system", "popen", "eventfd", "pidfd_open", "execv",
    "register_at_fork",
)  # fmt: skip


def _stat(path: Any, *, dir_fd: int | None = None, follow_symlinks: bool = True) -> Any:
    if isinstance(path, int):
        return _fstat(path)
    name = text_of(path)
    if is_kernels(name):
        return _kernel_status(name)
    done = begin_call("stat", name)
    task = here()
    if dir_fd is None:
        known = task.world.mounts.remembered(task, name, follow_symlinks)
        if known is not None:
            done()
            if known == "":
                raise fail(errno.ENOENT, name)
            return known
    try:
        folder, last = folder_of(name, dir_fd)
    except FileNotFoundError:
        done()
        raise
    node = folder.children.get(last) if last else folder
    node = follow(node, name) if follow_symlinks else node
    task.world.mounts.remember(task, name, follow_symlinks, folder, None if node is None else node.status())
    done()
    if node is None:
        raise fail(errno.ENOENT, name)
    return node.status()


def _kernel_status(name: str) -> Any:
    node = Node(1, "file", 0o444, 0)
    if name.startswith("/proc/self/ns/"):
        node.number = here().proc.facts.get("namespace", 4026531836)
        return node.status()
    if kernel_text(name) is None and name != "/dev/null":
        raise fail(errno.ENOENT, name)
    return node.status()


def _fstat(fd: int) -> Any:
    if fd < FIRST:
        return real_posix.fstat(fd)
    return descriptor(fd).node.status()


def _open(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
    name, task = text_of(path), here()
    if is_kernels(name):
        data = b"" if name == "/dev/null" else kernel_text(name)
        if data is None:
            raise fail(errno.ENOENT, name)
        node = Node(1, "file", 0o444, 0)
        node.data = bytearray(data)
        return _register(task, Open(node, flags, name))
    done = begin_call("create" if flags & real_os.O_CREAT else "open", name)
    disk = task.world.disk
    folder, last = folder_of(name, dir_fd)
    task.world.mounts.forget(task, folder, last)
    node = folder.children.get(last) if last else folder
    if node is not None and node.kind == "link":
        if flags & real_os.O_NOFOLLOW:
            raise fail(errno.ELOOP, name)
        node = follow(node, name)
    if node is None:
        if not flags & real_os.O_CREAT:
            raise fail(errno.ENOENT, name)
        if disk.free_bytes <= 0:
            raise fail(errno.ENOSPC, name)
        node = disk.node("file", mode & 0o755)
        disk.change("enter", task.proc.host, folder, name=last, child=node)
    elif flags & real_os.O_CREAT and flags & real_os.O_EXCL:
        raise fail(errno.EEXIST, name)
    elif node.kind == "folder" and flags & (real_os.O_WRONLY | real_os.O_RDWR):
        raise fail(errno.EISDIR, name)
    elif node.kind != "folder" and flags & real_os.O_DIRECTORY:
        raise fail(errno.ENOTDIR, name)
    elif flags & real_os.O_TRUNC and node.data:
        disk.change("truncate", task.proc.host, node, at=0)
    opened = Open(node, flags, name)
    if flags & real_os.O_APPEND:
        opened.at = len(node.data)
    done()
    return _register(task, opened)


def _register(task: Any, opened: Open) -> int:
    fds = open_files()
    fd = FIRST
    while fd in fds:
        fd += 1
    fds[fd] = opened
    return fd


def _close(fd: int) -> None:
    if fd < FIRST:
        task = hub.task
        if task is not None and fd in task.proc.facts.get("memory", ()):
            task.proc.facts["memory"].discard(fd)
            real_posix.close(fd)
        return
    opened = open_files().pop(fd, None)
    if opened is None:
        raise fail(errno.EBADF)
    disk = here().world.disk
    if opened.wrote and not disk.is_local(opened.node):
        disk.sync(opened.node)  # a network file system sends what was written at the close


def _memfd_create(name: str, flags: int = 0) -> int:
    fd = real_os.memfd_create(name, flags)
    here().proc.facts.setdefault("memory", set()).add(fd)
    return fd


def _read_at(opened: Open, size: int, at: int) -> bytes:
    done = begin_call("read", opened.path)
    data = bytes(opened.node.data[at : at + size])
    done()
    task = here()
    return task.world.mounts.read(task, opened.path, data) if task.world.mounts.wrong_reads else data  # type: ignore[no-any-return]


def _write_at(opened: Open, data: Any, at: int) -> int:
    task = here()
    done = begin_call("write", opened.path)
    data = bytes(data)
    disk, rng = task.world.disk, task.world.rng
    if disk.free_bytes < len(data) and at + len(data) > len(opened.node.data):
        raise fail(errno.ENOSPC, opened.path)
    if len(data) > 1 and rng.random() < 0.02:
        data = data[: rng.randrange(1, len(data))]  # a short write
    if opened.flags & real_os.O_APPEND:
        at = len(opened.node.data)
    disk.change("write", task.proc.host, opened.node, at=at, data=data)
    opened.wrote = True
    done()
    return len(data)


def _read(fd: int, size: int) -> bytes:
    if fd < FIRST:
        return real_posix.read(fd, size)
    opened = descriptor(fd)
    if opened.node.kind == "folder":
        raise fail(errno.EISDIR, opened.path)
    data = _read_at(opened, size, opened.at)
    opened.at += len(data)
    return data


def _preadv(fd: int, buffers: Any, offset: int, flags: int = 0) -> int:
    if flags:
        raise fail(errno.EOPNOTSUPP)
    opened, total = descriptor(fd), 0
    for buffer in buffers:
        view = memoryview(buffer).cast("B")
        data = _read_at(opened, len(view), offset + total)
        view[: len(data)] = data
        total += len(data)
        if len(data) < len(view):
            break
    return total


def _pwrite(fd: int, data: Any, offset: int) -> int:
    if fd < FIRST:
        return real_posix.pwrite(fd, data, offset)
    return _write_at(descriptor(fd), data, offset)


def _write(fd: int, data: Any) -> int:
    opened = descriptor(fd)
    count = _write_at(opened, data, opened.at)
    opened.at += count
    return count


def _fsync(fd: int) -> None:
    opened = descriptor(fd)
    done = begin_call("fsync", opened.path)
    here().world.disk.sync(opened.node)
    done()


def _ftruncate(fd: int, size: int) -> None:
    if fd < FIRST:
        real_posix.ftruncate(fd, size)
        return
    opened, task = descriptor(fd), here()
    done = begin_call("truncate", opened.path)
    task.world.disk.change("truncate", task.proc.host, opened.node, at=size)
    opened.wrote = True
    done()


def _pread(fd: int, size: int, at: int) -> bytes:
    return real_posix.pread(fd, size, at) if fd < FIRST else _read_at(descriptor(fd), size, at)


def _lseek(fd: int, offset: int, how: int) -> int:
    if fd < FIRST:
        return real_posix.lseek(fd, offset, how)
    opened = descriptor(fd)
    opened.at = (0, opened.at, len(opened.node.data))[how] + offset
    return opened.at


def _mkdir(path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
    task, name = here(), text_of(path)
    done = begin_call("mkdir", name)
    folder, last = folder_of(name, dir_fd)
    task.world.mounts.forget(task, folder, last)
    if not last or last in folder.children:
        raise fail(errno.EEXIST, name)
    disk = task.world.disk
    if disk.free_bytes <= 0:
        raise fail(errno.ENOSPC, name)
    disk.change("enter", task.proc.host, folder, name=last, child=disk.node("folder", mode & 0o755))
    done()


def _leave(name: str, kind: str, dir_fd: int | None) -> None:
    task = here()
    done = begin_call(kind, name)
    folder, last = folder_of(name, dir_fd)
    task.world.mounts.forget(task, folder, last)
    node = folder.children.get(last)
    if node is None:
        raise fail(errno.ENOENT, name)
    if kind == "rmdir":
        if node.kind != "folder":
            raise fail(errno.ENOTDIR, name)
        if node.children:
            raise fail(errno.ENOTEMPTY, name)
    elif node.kind == "folder":
        raise fail(errno.EISDIR, name)
    task.world.disk.change("leave", task.proc.host, folder, name=last)
    done()


def _rename(source: Any, target: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
    task, one, other = here(), text_of(source), text_of(target)
    done = begin_call("rename", one)
    from_, name = folder_of(one, src_dir_fd)
    to, new = folder_of(other, dst_dir_fd)
    task.world.mounts.forget(task, from_, name)
    task.world.mounts.forget(task, to, new)
    node, there = from_.children.get(name), to.children.get(new)
    if node is None:
        raise fail(errno.ENOENT, one, other)
    if there is not None and there is not node:
        if node.kind == "folder" and there.kind != "folder":
            raise fail(errno.ENOTDIR, one, other)
        if node.kind != "folder" and there.kind == "folder":
            raise fail(errno.EISDIR, one, other)
        if there.kind == "folder" and there.children:
            raise fail(errno.ENOTEMPTY, one, other)
    if node.kind == "folder" and _lies_in(node, to):
        raise fail(errno.EINVAL, one, other)
    task.world.disk.change("rename", task.proc.host, from_, name=name, other=to, other_name=new)
    task.world.log("rename", task.proc.name, one, other)
    done()


def _lies_in(top: Node, node: Node) -> bool:
    return node is top or any(child.kind == "folder" and _lies_in(child, node) for child in top.children.values())


def exchange(one: str, other: str) -> None:
    """``renameat2`` with RENAME_EXCHANGE."""
    task = here()
    disk = task.world.disk
    done = begin_call("rename", one)
    if not disk.exchanges:
        raise fail(errno.EINVAL, one, other)
    from_, name = folder_of(one, None)
    to, new = folder_of(other, None)
    if name not in from_.children or new not in to.children:
        raise fail(errno.ENOENT, one, other)
    disk.change("exchange", task.proc.host, from_, name=name, other=to, other_name=new)
    task.world.log("exchange", task.proc.name, one, other)
    done()


def _link(
    source: Any,
    target: Any,
    *,
    src_dir_fd: int | None = None,
    dst_dir_fd: int | None = None,
    follow_symlinks: bool = True,
) -> None:
    task, one, other = here(), text_of(source), text_of(target)
    done = begin_call("link", other)
    disk = task.world.disk
    if not disk.links:
        raise fail(errno.ENOTSUP, one, other)
    if one.startswith("/proc/self/fd/"):
        node: Node | None = descriptor(int(one.rpartition("/")[2])).node
        if node is not None and node.nlink == 0:
            raise fail(errno.ENOENT, one, other)
    else:
        folder, name = folder_of(one, src_dir_fd)
        node = folder.children.get(name)
        node = follow(node, one) if follow_symlinks else node
    if node is None:
        raise fail(errno.ENOENT, one, other)
    to, new = folder_of(other, dst_dir_fd)
    task.world.mounts.forget(task, to, new)
    if new in to.children:
        raise fail(errno.EEXIST, one, other)
    if node.kind == "folder":
        raise fail(errno.EPERM, one, other)
    disk.change("enter", task.proc.host, to, name=new, child=node)
    done()


def _symlink(target: Any, path: Any, target_is_directory: bool = False, *, dir_fd: int | None = None) -> None:
    del target_is_directory
    task, name = here(), text_of(path)
    done = begin_call("symlink", name)
    folder, last = folder_of(name, dir_fd)
    task.world.mounts.forget(task, folder, last)
    if last in folder.children:
        raise fail(errno.EEXIST, name)
    node = task.world.disk.node("link", 0o777)
    node.target = text_of(target)
    task.world.disk.change("enter", task.proc.host, folder, name=last, child=node)
    done()


def _readlink(path: Any, *, dir_fd: int | None = None) -> str:
    name = text_of(path)
    if is_kernels(name):
        raise fail(errno.ENOENT, name)
    folder, last = folder_of(name, dir_fd)
    node = folder.children.get(last)
    if node is None or node.kind != "link":
        raise fail(errno.EINVAL if node is not None else errno.ENOENT, name)
    return node.target


def _folder_at(path: Any) -> tuple[Node, str]:
    task = here()
    if isinstance(path, int):
        opened = descriptor(path)
        return opened.node, ""
    name = text_of(path)
    if is_kernels(name):
        raise fail(errno.ENOENT, name)
    done = begin_call("list", name)
    folder, last = folder_of(name, None)
    node = follow(folder.children.get(last) if last else folder, name)
    if node is None:
        raise fail(errno.ENOENT, name)
    if node.kind != "folder":
        raise fail(errno.ENOTDIR, name)
    task.world.mounts.listed(task, node)
    done()
    return node, name


def _listdir(path: Any = ".") -> list[str]:
    node, _ = _folder_at(path)
    names = sorted(node.children)
    here().world.rng.shuffle(names)
    return names


def _scandir(path: Any = ".") -> Scan:
    node, name = _folder_at(path)
    names = sorted(node.children)
    here().world.rng.shuffle(names)
    return Scan([Entry(name, child, node.children[child]) for child in names])


def _chmod(path: Any, mode: int, *, dir_fd: int | None = None, follow_symlinks: bool = True) -> None:
    del follow_symlinks
    if isinstance(path, int):
        descriptor(path).node.mode = mode
        return
    name = text_of(path)
    folder, last = folder_of(name, dir_fd)
    if (node := folder.children.get(last)) is None:
        raise fail(errno.ENOENT, name)
    node.mode = mode


def _utime(path: Any, *_: Any, **__: Any) -> None:
    if not isinstance(path, int):
        _stat(path)


def _statvfs(path: Any) -> Any:
    del path
    free = max(0, here().world.disk.free_bytes // 4096)
    return real_os.statvfs_result((4096, 4096, 1 << 40, free, free, 1 << 30, 1 << 30, 1 << 30, 0, 255))


def _kill(pid: int, number: int) -> None:
    task = here()
    for proc in task.proc.host.procs:
        if proc.pid == pid and proc.alive:
            if number == 9:
                proc.kill("killed")
            return
    raise ProcessLookupError(errno.ESRCH, "No such process")


def modules() -> dict[str, types.ModuleType]:
    """The modules, by name."""
    posix = types.ModuleType("posix")
    vars(posix).update({name: value for name, value in vars(real_posix).items() if name not in _BLOCKED})
    calls = {
        "open": _open, "close": _close, "read": _read, "write": _write, "preadv": _preadv, "pwrite": _pwrite,
        "pread": _pread,
        "fsync": _fsync, "fdatasync": _fsync, "ftruncate": _ftruncate, "lseek": _lseek, "fstat": _fstat, "stat": _stat,
        "lstat": lambda path, *, dir_fd=None: _stat(path, dir_fd=dir_fd, follow_symlinks=False),
        "mkdir": _mkdir, "rmdir": lambda path, *, dir_fd=None: _leave(text_of(path), "rmdir", dir_fd),
        "unlink": lambda path, *, dir_fd=None: _leave(text_of(path), "unlink", dir_fd),
        "remove": lambda path, *, dir_fd=None: _leave(text_of(path), "unlink", dir_fd),
        "rename": _rename, "replace": _rename, "link": _link, "symlink": _symlink, "readlink": _readlink,
        "listdir": _listdir, "scandir": _scandir, "chmod": _chmod, "fchmod": _chmod, "utime": _utime, "statvfs": _statvfs,
        "fstatvfs": _statvfs, "memfd_create": _memfd_create, "kill": _kill, "getpid": lambda: here().proc.pid,
        "getcwd": lambda: "/", "posix_fadvise": lambda *_: None, "DirEntry": Entry, "sync": lambda: None,
        "register_at_fork": lambda **_: None, "access": lambda path, *_, **__: _exists(path),
        "posix_fallocate": lambda *_: None, "getuid": lambda: 0, "_exit": children.leave,
        "getppid": lambda: children.parent_of(here().proc), "nice": lambda by: by, "setsid": lambda: None,
    }  # fmt: skip
    vars(posix).update(calls)
    return {"posix": posix}


def _exists(path: Any) -> bool:
    try:
        _stat(path)
    except OSError:
        return False
    return True
