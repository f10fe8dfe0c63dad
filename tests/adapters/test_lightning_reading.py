"""A resume under Lightning verifies every file once, over all ranks."""

from collections import Counter

import pytest
from lightning_scripts import run, script

COUNT = """
    import safe_ckpt.core.formats.verify as verifying
    read, stock = [], verifying.digest_of

    def digest_of(file, *args, **more):
        read.append(str(file.relative_to(folder)))
        return stock(file, *args, **more)

    def tell():
        verifying.digest_of = digest_of
        made, module = fit(2)
        os.write(1, "".join(f"READ {name} {made.global_step}\\n" for name in read).encode())
"""
FILE = """
    def fit(epochs):
        module = module_class(pl)()
        ours = SafeCheckpointCallback(dirpath=folder, config=CONFIG, resume="auto", filename="{epoch}")
        made = trainer(pl, [ours], folder, strategy="ddp", devices=2, max_epochs=epochs)
        made.fit(module)
        return made, module
"""
SHARDED = """
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    class Module(module_class(pl)):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(4, 64)

        def configure_model(self):
            if not hasattr(self.net.weight, "placements"):
                fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def fit(epochs):
        module = Module()
        ours = SafeCheckpointCallback(dirpath=folder, config=CONFIG, resume="auto", filename="{epoch}")
        strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
        made = trainer(pl, [ours], folder, strategy=strategy, devices=2, max_epochs=epochs)
        made.fit(module)
        return made, module
"""
MAIN = """
    if __name__ == "__main__":
        fit(1)
        tell()
"""


@pytest.mark.timeout(200)
@pytest.mark.parametrize("body", [FILE, SHARDED], ids=["one file", "sharded"])
def test_a_resume_verifies_each_file_once(tmp_path, body):
    """One rank reads it for all: a single file, and each file of a sharded directory."""
    ended = run(script(tmp_path, COUNT + body + MAIN), tmp_path / "exp")
    assert ended.returncode == 0, ended.stderr[-3000:]
    lines = [line.split() for line in ended.stdout.splitlines() if line.startswith("READ")]
    assert {line[2] for line in lines} <= {"4", "6"}, "it did not resume"
    counts = Counter(line[1] for line in lines)
    assert counts, ended.stdout
    assert set(counts.values()) == {1}, counts
    if body is SHARDED:
        assert (
            len(counts) == len(list((tmp_path / "exp/epoch=1.ckpt").rglob("*"))) - 1
        )  # the manifest has its own digest
