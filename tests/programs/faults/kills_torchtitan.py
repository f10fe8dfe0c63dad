"""Two ranks that train with torchtitan into FOLDER without end, with further FOLDERS of modules: for ``kills.killed``."""

# ruff: noqa: E402 - the ranks fork before a framework is imported
import sys

sys.path[:0] = sys.argv[2:]
import titan_runs
import two_ranks

rank = two_ranks.fork()
titan_runs.on_cpu()
import torch

torch.set_num_threads(1)  # see tests/faults/conftest.py
config = titan_runs.config(sys.argv[1], 100000, interval=1, async_mode="async", keep_latest_k=2)
config.lr_scheduler.total_steps = 100000
trainer = config.build()
for module in trainer.model_parts[0].modules():
    if isinstance(module, torch.distributed.fsdp.FSDPModule):
        module.set_force_sum_reduction_for_comms(True)
manager = trainer.checkpointer
load, save = manager.load, manager.save


def loads(step=-1):
    found = load(step=step)
    two_ranks.tell(rank, f"BEGUN {trainer.step}")
    return found


def saves(step, *args, **more):
    before = trainer.told
    done = save(step, *args, **more)  # it has waited for the one before
    trainer.told = step
    if before:
        two_ranks.tell(rank, f"DONE {before}")
    return done


manager.load, manager.save, trainer.told = loads, saves, 0
trainer.train()
