"""Gives what has the name "a" in FOLDER the further name "last", in the way that HOW says, and makes the file "reported" then.

HOW: "symbolic links", "hard links", or "copies" as where there are no links.
"""

import errno
import os
import shutil
import sys
from pathlib import Path

from safe_ckpt.core.home.file_home import FileHome
from safe_ckpt.core.storage import durable

exp, how = Path(sys.argv[1]), sys.argv[2]
if how == "copies":

    def refuse(*_, **__):
        raise OSError(errno.ENOTSUP, "no links")

    os.link = os.symlink = refuse
    shutil._USE_CP_SENDFILE = False  # so that the trace has the bytes
home = FileHome(exp, lease_s=60)
home.open()
staged = home.make_pending("op") / "link0-last"
durable.sync_directory(str(home.pending))
link = durable.Link(path=exp / "last", target="a" if how == "symbolic links" else None)
durable.publish_link(exp / "a", staged, link, lambda: home.aside("op", exp / "last"))
durable.write_durably(exp / "reported", b"")
durable.sync_directory(str(exp))
home.drop_pending("op")
home.close()
