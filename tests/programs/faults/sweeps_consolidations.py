"""Sweeps consolidate_offloaded with the six arguments of ``sweep.py``, which lies in a seventh: FOLDER."""

import os
import sys

sys.path.insert(0, sys.argv[7])
import sweep

from safe_ckpt import consolidate_offloaded
from safe_ckpt.core.formats.manifest import read_manifest
from safe_ckpt.core.formats.verify import verify_files

FILES = {"a": 3, "b": 5000, "deep/c": 9000, "deep/d": 0}


class Folders(sweep.Numbered):
    def prepare(self, folder):
        for number in (1, 2):
            for name, size in FILES.items():
                file = folder.parent / f"disk{number}" / name
                if not file.exists():
                    file.parent.mkdir(parents=True, exist_ok=True)
                    file.write_bytes(bytes([number]) * size)
        super().prepare(folder)

    def save(self, folder, number, reported=lambda: None):
        consolidate_offloaded({"part": folder.parent / f"disk{number}"}, folder / "ckpt")
        reported()

    def find(self, folder):
        found = self.number(folder)
        self.save(folder, 2)  # whatever was left, the next call works, and tidies up
        assert self.number(folder) == 2
        if (folder / ".safe_ckpt/names").is_dir():
            os.rename(folder / ".safe_ckpt/names", folder / ".safe_ckpt/pending")  # sweep.py tells what is left there
        return found

    def number(self, folder):
        manifest = read_manifest(folder / "ckpt")
        verify_files(folder / "ckpt", manifest)
        contents = {name: (folder / "ckpt/part" / name).read_bytes() for name in FILES}
        assert len(manifest.files) == len(FILES)
        number = contents["a"][0]
        assert contents == {name: bytes([number]) * size for name, size in FILES.items()}
        return number


sweep.SCENARIOS = {"folders": Folders()}
sweep.main()
