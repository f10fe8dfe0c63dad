"""Where each framework keeps its checkpoint tests, and how they are run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Suite:
    """The checkpoint tests of one framework.

    Attributes:
        package: the distribution whose installed version the checkout must be of.
        version_file: where the checkout says which one it is of.
        folder: the tests are below it, and run with it as their working directory.
        importable: what goes on ``PYTHONPATH``, relative to the checkout.
        tests: files and folders, relative to ``folder``; ``*`` as in a shell.
        variants: how ours is swapped in: see the plugins.
        slow: an expression as for pytest's ``-k``: what is left out without ``--slow``.
        workers: processes of pytest-xdist; 0 without it.
        timeout_s: of one test.
        plugin_for_stock: the plugin is loaded in the run without ours, too.
        environment: more variables.
    """

    package: str
    version_file: str
    folder: str
    importable: str
    tests: tuple[str, ...]
    variants: tuple[str, ...] = ("async", "sync")
    slow: str = ""
    workers: int = 2
    timeout_s: int = 120
    plugin_for_stock: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)

    def version(self, checkout: Path) -> str:
        """Which version the checkout is of."""
        text = (checkout / self.version_file).read_text().strip()
        said = re.search(r'^__version__ = "(.+)"', text, re.MULTILINE)
        return said.group(1) if said else text

    def paths(self, checkout: Path) -> list[str]:
        """What there is of ``tests`` in this checkout, relative to ``folder``."""
        home = checkout / self.folder
        return [str(path.relative_to(home)) for pattern in self.tests for path in sorted(home.glob(pattern))]


SUITES = {
    "torch": Suite(
        package="torch",
        version_file="version.txt",
        folder="test/distributed/checkpoint",
        importable="test",  # not the checkout: its torch is no built one
        tests=("test_*.py", "e2e/test_*.py", "fsdp/test_*.py"),
        variants=("ours",),
        timeout_s=300,
    ),
    "lightning": Suite(
        package="lightning",
        version_file="src/version.info",
        folder="tests/tests_pytorch",
        importable="tests",
        tests=(
            "checkpointing/test_[!l]*.py",  # the legacy ones need files that would be fetched
            "callbacks/test_callbacks.py",
            "callbacks/test_early_stopping.py",
            "callbacks/test_finetuning_callback.py",
            "callbacks/test_model_checkpoint*.py",
            "callbacks/test_stochastic_weight_avg.py",
            "callbacks/test_timer.py",
            "callbacks/test_weight_averaging.py",
            "core/test_saving.py",
            "loops/test_loop_state_dict.py",
            "loops/test_loops.py",
            "loops/test_training_epoch_loop.py",
            "models/test_hooks.py",
            "models/test_restore.py",
            "plugins/test_checkpoint_io_plugin.py",
            "trainer/connectors/test_callback_connector.py",
            "trainer/connectors/test_checkpoint_connector.py",
            "trainer/flags/test_fast_dev_run.py",
            "trainer/test_trainer.py",
        ),
        slow="spawn or resume_ddp or checkpoint_ddp or fit_test_synchronization or (early and not resume)",
    ),
    "accelerate": Suite(
        package="accelerate",
        version_file="src/accelerate/__init__.py",
        folder=".",
        importable=".",
        tests=("tests/test_state_checkpointing.py", "tests/test_accelerator.py"),
    ),
    "transformers": Suite(
        package="transformers",
        version_file="src/transformers/__init__.py",
        folder=".",
        importable=".",
        tests=("tests/trainer/test_trainer*.py",),
    ),
    "torchtitan": Suite(
        package="torchtitan",
        version_file="assets/version.txt",
        folder=".",
        importable=".",
        tests=("tests/unit_tests/test_checkpoint.py", "tests/unit_tests/cpu/test_checkpoint.py"),
        variants=("ours",),
        workers=0,
    ),
    "deepspeed": Suite(
        package="deepspeed",
        version_file="version.txt",
        folder="tests",
        importable="tests",
        # The others need GPUs or hours.
        tests=(
            "unit/checkpoint/test_latest_checkpoint.py",
            "unit/checkpoint/test_lr_scheduler.py",
            "unit/checkpoint/test_moe_checkpoint.py",
            "unit/checkpoint/test_other_optimizer.py",
            "unit/checkpoint/test_pipeline.py",
            "unit/checkpoint/test_shared_weights.py",
            "unit/checkpoint/test_sparse.py",
            "unit/checkpoint/test_tag_validation.py",
            "unit/checkpoint/test_zero_optimizer.py",
        ),
        workers=0,
        plugin_for_stock=True,
        timeout_s=300,
        environment={"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": "4", "DS_UNITTEST_TIMEOUT": "200"},
    ),
}
