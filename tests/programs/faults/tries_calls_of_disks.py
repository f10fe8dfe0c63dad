"""Prints what FOLDER says to a direct write, a question for its size, a hard link and fallocate."""

import ctypes
import errno
import mmap
import os
import sys
from pathlib import Path

os.chdir(sys.argv[1])
Path("f").write_text("content")
os.makedirs("d/inner", exist_ok=True)
page = mmap.mmap(-1, 4096)


def said(act):
    try:
        return act()
    except OSError as error:
        return errno.errorcode[error.errno]


def direct():
    file = os.open("direct", os.O_CREAT | os.O_WRONLY | os.O_DIRECT)
    try:
        return os.write(file, page)
    finally:
        os.close(file)


def allocate():
    with open("allocated", "wb") as file:
        long = ctypes.c_long
        if ctypes.CDLL(None, use_errno=True).fallocate(file.fileno(), 0, long(0), long(4096)):
            raise OSError(ctypes.get_errno(), "fallocate")


def link():
    os.link("f", "g")
    os.unlink("g")


print(said(direct), said(lambda: os.statvfs(".").f_blocks > 0), said(link), said(allocate))
