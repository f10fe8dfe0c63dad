"""What happens within a save or a resume, in order: moments of extensions, events, and changes below a directory."""

import os
import re
import sys
import threading

from safe_ckpt.core.saving.extension import Extension

_CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "open")
_ID = re.compile(r"[0-9a-f]{32}")
_recorders = []  # a hook of the interpreter cannot be removed: it asks who is there


def _changed(event, args):
    if _recorders and event in _CHANGES:
        for one in _recorders:
            one.changed(event.removeprefix("os."), args)


class Moments:
    """Everything that happens while this is entered, in order; with ``reads`` files that are read, too."""

    def __init__(self, root):
        self.root, self.lines, self.reads = str(root), [], False

    def __enter__(self):
        if not Moments.__dict__.get("hooked"):
            Moments.hooked = True
            sys.addaudithook(_changed)
        _recorders.append(self)
        self.lines.clear()
        return self

    def __exit__(self, *_):
        _recorders.remove(self)

    def __call__(self, event):
        """A hook for events."""
        self.note(type(event).__name__)

    def note(self, what):
        if self not in _recorders:
            return
        thread = threading.current_thread().name.removeprefix("safe_ckpt-").replace("MainThread", "caller")
        self.lines.append(f"{thread}: {what}")

    def changed(self, change, args):
        paths = [os.fspath(one) for one in args if isinstance(one, str | os.PathLike)]
        if change == "open" and not (isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)):
            if not self.reads:
                return
            change = "read"
        if any(path.startswith(self.root) for path in paths) and not any("events.jsonl" in path for path in paths):
            names = (_ID.sub("ID", os.path.relpath(path, self.root)) for path in paths if path.startswith(self.root))
            self.note(" ".join((change, *names)))

    def extension(self):
        """An extension that notes when it is asked."""
        moments = {name for name, value in vars(Extension).items() if callable(value) and not name.startswith("_")}

        def noting(name):
            def asked(one, *args):
                self.note(f"extensions: {name}")
                return getattr(Extension, name)(one, *args)

            return asked

        return type("Noting", (Extension,), {"name": "moments", **{name: noting(name) for name in moments}})()


__all__ = ["Moments"]
