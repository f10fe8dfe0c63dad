"""Below FOLDER two ranks save, and load with and without our callback, in shards and whole; last a damaged shard."""

import sys
import threading
from pathlib import Path

import torch
from lightning_fsdp2 import fit, whole

from safe_ckpt.errors import SafeCheckpointError


def same(module, expected):
    return all(torch.equal(value, expected[name]) for name, value in whole(module).items())


def flip(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def main(folder):
    fit(folder / "sharded", "sharded", 1)
    _, module = fit(folder / "sharded", "sharded", 2)  # the same directory again, in the same process
    expected, last = whole(module), folder / "sharded/last.ckpt"
    stock, loaded = fit(folder / "stock", "sharded", 2, ckpt_path=str(last), callback=False)
    assert same(loaded, expected), "stock load"
    stock.save_checkpoint(folder / "theirs" / "one.ckpt")  # without our callback: Lightning's own
    again, loaded = fit(folder / "theirs", "sharded", 2)
    assert again.global_step == 4, "theirs"
    assert same(loaded, expected), "theirs"
    again, loaded = fit(folder / "explicit", "full", 3, ckpt_path=str(last))
    assert again.global_step == 6
    again.save_checkpoint(folder / "explicit/after.ckpt")
    again.validate(loaded, ckpt_path=str(folder / "explicit/after.ckpt"), verbose=False)
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("safe_ckpt")]
    assert not [name for name in threads if "save" in name or "copy" in name], threads
    if again.global_rank == 0:
        torch.save(expected, folder / "expected.pt")
    again.strategy.barrier()
    if again.global_rank == 0:
        flip(last / "__1_0.distcp")
    again.strategy.barrier()
    try:
        fit(folder / "damaged", "sharded", 3, ckpt_path=str(last))
    except SafeCheckpointError as error:
        print("REFUSED", type(error).__name__, flush=True)
    if again.global_rank == 0:
        flip(last / "__1_0.distcp")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
