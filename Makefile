# Every target makes the virtual environment itself when it is missing.
PYTHON ?= python3
BIN := .venv/bin
# Two gloo processes: with this type and cpu=True in the script; --cpu would start them without a process group of their own.
ACCELERATE := $(BIN)/python -m accelerate.commands.launch --multi_gpu --num_processes 2 --num_machines 1 \
  --mixed_precision no --dynamo_backend no --main_process_port 0

# An environment on top of .venv: with DeepSpeed in there Accelerate, Lightning and Transformers would import it everywhere.
# What DeepSpeed compiles is not optimized: that takes a third less time, and its tests measure none.
DEEPSPEED := .venv/with-deepspeed/bin
DEEPSPEED_ENV := PATH="$(CURDIR)/$(DEEPSPEED):$(CURDIR)/$(BIN):$$PATH" DS_ACCELERATOR=cpu \
  TORCH_EXTENSIONS_DIR="$(CURDIR)/.venv/torch_extensions" CXX="$(CURDIR)/$(DEEPSPEED)/quick-g++"

TORCHTITAN := .venv/with-torchtitan/bin

# Ray starts its processes with the Python of the driver. It reports nothing to anybody, and listens on this machine alone.
RAY := .venv/with-ray/bin
RAY_ENV := RAY_USAGE_STATS_ENABLED=0 RAY_AUTH_MODE=disabled RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 RAY_worker_niceness=0

.PHONY: demo mutants test test-full test-short test-long test-schedulers test-thorough test-versions test-deepspeed test-upstream test-torchtitan test-ray faults simulate programs devices lint package release-check docs docs-reference bench gpu-check examples clean

.venv/ready: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]'
	@if command -v npm >/dev/null; then npm install --prefix .venv/node --no-audit --no-fund --silent azurite || true; fi
	touch $@

demo: .venv/ready  ## train on real data, kill the job again and again, compare bit for bit
	$(BIN)/python examples/demo.py

# Three at a time on two cores: most of them wait for something part of the time. A test that fails beside others is run once more,
# one at a time: its limits of time may have been the machine's fault. Both runs are printed; what fails again fails. A test of
# tests/faults that failed once is printed as a finding, and the target fails.
RUNNER = $(BIN)/python
define tests
$(RUNNER) tests/kit/twice.py -q --durations=30 -o cache_dir=.pytest_cache/$@ $(MORE) $(1) $(2)
endef

# What starts no server, no host, no ranks and no framework; the README's promises, which start ranks; and of these files what
# is marked quick: see tests/kit/kinds.py.
QUICK = $(shell grep -rl --include='test_*.py' 'pytest.mark.quick' tests/adapters tests/multirank)

test: .venv/ready  ## the quick tests: a few minutes
	$(call tests,--quick -n 3 --dist worksteal,tests/unit tests/typing tests/docs tests/sim tests/programs_of tests/lives tests/multirank/test_promises.py $(QUICK))

test-full: .venv/ready  ## unit, documentation, several ranks, adapters, faults: every promise, of the long sweeps a sample
	@status=0; \
	$(MAKE) --no-print-directory --keep-going --jobs 2 --output-sync test-short test-schedulers || status=1; \
	$(MAKE) --no-print-directory test-long || status=1; \
	exit $$status

test-short: .venv/ready
	$(call tests,-n 3 --dist worksteal,tests/unit tests/typing tests/docs tests/sim tests/programs_of tests/lives tests/devices)

test-long: .venv/ready
	$(call tests,-n 3 --dist worksteal,tests/multirank tests/adapters tests/faults)

# They wait for a SLURM most of the time. The tests of one file share one, so they stay together.
test-schedulers: .venv/ready
	$(call tests,-n 2 --dist loadfile,tests/schedulers)

test-thorough: .venv/ready  ## the same as test-full with the tests marked thorough, and of the others all rounds
	$(BIN)/pip install --quiet --disable-pip-version-check ckpt-chaos==0.1.8
	$(MAKE) --no-print-directory test-full MORE=--all

# Several GB for each end, made once in .venv/versions: not for continuous integration, which prints what was run last.
# OLDEST_PYTHON and NEWEST_PYTHON name the two Pythons; ENDS=newest runs one end.
test-versions: .venv/ready  ## the oldest and the newest of everything that may be installed; writes docs/limits.md's tables
	$(BIN)/python tests/versions/both_ends.py $(ENDS)

faults: .venv/ready  ## the whole fault matrix, printed with counts: more than an hour on two cores; then simulated histories: hours
	$(BIN)/python -m pytest --all -q -n 3 --dist worksteal tests/faults
	$(MAKE) --no-print-directory simulate

# A hundred thousand take about six hours of one core. HISTORIES and FIRST choose others; a violation prints its seed.
HISTORIES ?= 100000
FIRST ?= 0
simulate: .venv/ready  ## histories of the real modules on simulated hosts, and how often each fault met each phase
	cd tests && ../$(BIN)/python -m sim --count $(HISTORIES) --first $(FIRST) --processes $$(nproc) --coverage
	cd tests && ../$(BIN)/python -m sim --planted --count 4500 --processes $$(nproc)

# A few hours for a thousand of each kind. KINDS chooses kinds; what is wrong is printed with its seed, and
# `python -m programs_of KIND --seed N` in tests cuts it down.
PROGRAMS ?= 100
KINDS ?=
programs: .venv/ready  ## programs made from seeds, killed and started again, beside runs that were not; then mends that are turned back
	cd tests && ../$(BIN)/python -m programs_of $(KINDS) --count $(PROGRAMS) --first $(FIRST) --processes $$(nproc) --coverage
	cd tests && ../$(BIN)/python -m programs_of.planted

# DEVICE_PROGRAMS whole ones take about twenty minutes of one core, snapshots alone a few.
DEVICE_PROGRAMS ?= 5000
devices: .venv/ready  ## programs on an accelerator made for the tests, whose streams run late; then bugs of order that they must find
	cd tests && ../$(BIN)/python -m devices --count $(DEVICE_PROGRAMS) --first $(FIRST)
	cd tests && ../$(BIN)/python -m devices --kind staged --count 20000 --first $(FIRST)
	cd tests && ../$(BIN)/python -m devices --kind pair --count 200 --first $(FIRST)
	cd tests && for kind in lightning accelerate transformers; do ../$(BIN)/python -m devices --kind $$kind --count 60 --first $(FIRST) || exit 1; done
	cd tests && ../$(BIN)/python -m devices --planted --count 1500

test-deepspeed: RUNNER = $(DEEPSPEED)/python
test-deepspeed: .venv/deepspeed  ## the DeepSpeed adapter with real engines on the CPU
	@rm -f .venv/torch_extensions/*/lock  # of a run that was killed: torch would wait for it without end
	export $(DEEPSPEED_ENV); $(call tests,-n 2 --dist worksteal,tests/adapters/test_deepspeed*.py tests/docs/test_deepspeed_page.py)
	rm -rf runs/examples/deepspeed
	EPOCHS=1 $(DEEPSPEED_ENV) $(DEEPSPEED)/python -m torch.distributed.run --standalone --nproc-per-node 2 examples/deepspeed_zero3_nvme.py runs/examples/deepspeed
	EPOCHS=2 $(DEEPSPEED_ENV) $(DEEPSPEED)/python -m torch.distributed.run --standalone --nproc-per-node 2 examples/deepspeed_zero3_nvme.py runs/examples/deepspeed

test-torchtitan: RUNNER = $(TORCHTITAN)/python
test-torchtitan: .venv/torchtitan  ## torchtitan's manager with its own Trainer on the CPU
	$(call tests,-n 2 --dist worksteal,tests/adapters/test_torchtitan*.py tests/faults/test_torchtitan_kills.py tests/docs/test_torchtitan_page.py)
	rm -rf runs/examples/torchtitan
	STEPS=20 OMP_NUM_THREADS=1 $(TORCHTITAN)/python -W ignore -m torch.distributed.run --standalone --nproc-per-node 2 examples/torchtitan_debug.py runs/examples/torchtitan
	STEPS=40 OMP_NUM_THREADS=1 $(TORCHTITAN)/python -W ignore -m torch.distributed.run --standalone --nproc-per-node 2 examples/torchtitan_debug.py runs/examples/torchtitan

# An environment on top of .venv: torchtitan asks for an older release of datasets than what is there, which it runs with, and for
# wandb, which it imports only to log there. What its import needs takes 60 MB.
.venv/torchtitan: .venv/ready
	$(BIN)/python -m venv .venv/with-torchtitan
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	  > "$$($(TORCHTITAN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/below.pth"
	$(TORCHTITAN)/pip install --quiet --disable-pip-version-check --no-deps torchtitan==0.3.0 torch_checkpointing==0.1.1 \
	  spmd_types==0.2.3 tyro typeguard einops tensorboard protobuf absl-py pillow
	touch $@

test-ray: RUNNER = $(RAY)/python
test-ray: .venv/ray  ## Ray Train's TorchTrainer on this machine, with workers and drivers that are killed
	export $(RAY_ENV); $(call tests,-n 2 --dist worksteal,tests/adapters/test_ray*.py tests/docs/test_ray_page.py)
	rm -rf runs/examples/ray
	STEPS=20 $(RAY_ENV) $(RAY)/python -W ignore examples/ray_train.py runs/examples/ray
	STEPS=40 $(RAY_ENV) $(RAY)/python -W ignore examples/ray_train.py runs/examples/ray

# An environment on top of .venv: Ray takes 80 MB, and Lightning would import it everywhere.
.venv/ray: .venv/ready
	$(BIN)/python -m venv .venv/with-ray
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	  > "$$($(RAY)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/below.pth"
	$(RAY)/pip install --quiet --disable-pip-version-check 'ray[train]==2.60.0'
	touch $@

# Nothing is fetched: UPSTREAM_TORCH, _LIGHTNING, _ACCELERATE, _TRANSFORMERS, _TORCHTITAN and _DEEPSPEED are checkouts of the installed versions; any of
# them. WITH and WITH_DEEPSPEED: a Python that has what those tests need besides: see tests/upstream/README.md.
WITH ?= $(BIN)/python
WITH_DEEPSPEED ?= $(DEEPSPEED)/python
WITH_TORCHTITAN ?= $(TORCHTITAN)/python
test-upstream: .venv/ready  ## the frameworks' own checkpoint tests, with their parts and with ours, and why they differ
	@[ -n "$(UPSTREAM_TORCH)$(UPSTREAM_LIGHTNING)$(UPSTREAM_ACCELERATE)$(UPSTREAM_TRANSFORMERS)$(UPSTREAM_TORCHTITAN)$(UPSTREAM_DEEPSPEED)" ] || \
	  { echo "say which: make test-upstream UPSTREAM_LIGHTNING=a/checkout; see tests/upstream/README.md"; exit 2; }
	@failed=0; \
	run() { [ -z "$$2" ] || "$$3" tests/upstream/run.py "$$1" "$$2" $(UPSTREAM_OPTIONS) || failed=1; }; \
	run torch "$(UPSTREAM_TORCH)" "$(WITH)"; \
	run lightning "$(UPSTREAM_LIGHTNING)" "$(WITH)"; \
	run accelerate "$(UPSTREAM_ACCELERATE)" "$(WITH)"; \
	run transformers "$(UPSTREAM_TRANSFORMERS)" "$(WITH)"; \
	run torchtitan "$(UPSTREAM_TORCHTITAN)" "$(WITH_TORCHTITAN)"; \
	export $(DEEPSPEED_ENV); run deepspeed "$(UPSTREAM_DEEPSPEED)" "$(WITH_DEEPSPEED)"; \
	exit $$failed

# DeepSpeed compiles what it needs on first use, and keeps it here. OPS_TIMEOUT_S: it may take longer beside tests. Without libaio the NVMe tests are skipped, and say so.
OPS_TIMEOUT_S ?= 600
.venv/deepspeed: .venv/ready
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && [ ! -e /usr/include/libaio.h ]; then \
	  { apt-get update -qq && apt-get install -y -qq libaio-dev g++; } >/dev/null 2>&1 || echo "libaio-dev could not be installed"; fi
	$(BIN)/python -m venv .venv/with-deepspeed
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	  > "$$($(DEEPSPEED)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/below.pth"
	printf '#!/bin/sh\nexec "%s" -m torch.distributed.run "$$@"\n' "$(CURDIR)/$(DEEPSPEED)/python" > $(DEEPSPEED)/torchrun
	printf '#!/bin/sh\nexec g++ "$$@" -O0 -g0\n' > $(DEEPSPEED)/quick-g++
	chmod +x $(DEEPSPEED)/torchrun $(DEEPSPEED)/quick-g++
	$(DEEPSPEED)/pip install --quiet --disable-pip-version-check setuptools wheel ninja py-cpuinfo
	$(DEEPSPEED)/pip install --quiet --disable-pip-version-check --no-build-isolation deepspeed==0.19.8
	@$(DEEPSPEED_ENV) timeout $(OPS_TIMEOUT_S) $(DEEPSPEED)/python tests/adapters/deepspeed_ops.py || echo "an op of DeepSpeed could not be built: its tests are skipped"
	touch $@

mutants: .venv/ready  ## small changes of a room's code, each against the room's tests: ROOM=core/home SEED=1 COUNT=50
	cd tests && ../$(BIN)/python -m mutants $(ROOM) --seed $(or $(SEED),1) --count $(or $(COUNT),50)

lint: .venv/ready  ## ruff, mypy, and the order of the rooms
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/lint-imports .importlinter-run-time

docs: .venv/ready  ## the site of docs/ into site/; a link or an anchor that leads nowhere is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

package: .venv/ready  ## build the sdist and the wheel, and use the wheel where nothing else is installed
	$(BIN)/python tests/package/smoke.py

# What only a release needs, in an environment of its own.
.venv/release: .venv/ready
	$(PYTHON) -m venv .venv/for-release
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	  > "$$(.venv/for-release/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/below.pth"
	.venv/for-release/bin/pip install --quiet --disable-pip-version-check build 'hatchling>=1.28' twine check-wheel-contents griffe \
	  'cyclonedx-python-lib[json-validation]' zizmor tomli
	touch $@

release-check: .venv/release  ## all that must hold before a tag is set; CONTRIBUTING.md says what comes then
	.venv/for-release/bin/python tests/package/release.py $(if $(KEEP),--keep $(KEEP))

docs-reference: .venv/ready  ## docs/reference: the page of all settings and their JSON schema
	$(BIN)/safe-ckpt config reference > docs/reference/configuration.md
	$(BIN)/safe-ckpt config schema > docs/reference/safe_ckpt.schema.json

bench: .venv/ready  ## what a save costs, against every peer that installs; BENCH=--quick to see that it works
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[bench]'
	$(BIN)/python benchmarks/bench.py $(BENCH)

gpu-check: .venv/ready  ## on a machine with a GPU: copies, gate, kills, what a save costs; at most 20 minutes, prints a table
	if $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then \
	  $(BIN)/pip install --quiet --disable-pip-version-check -e '.[bench]'; fi
	$(BIN)/python benchmarks/gpu/check.py $(GPU)

examples: .venv/ready  ## run every example, twice where it resumes
	rm -rf runs/examples
	EPOCHS=2 $(BIN)/python examples/plain_torch.py runs/examples/plain
	EPOCHS=4 $(BIN)/python examples/plain_torch.py runs/examples/plain
	EPOCHS=2 $(BIN)/python -m torch.distributed.run --standalone --nproc-per-node 2 examples/plain_torch.py runs/examples/ranks
	$(BIN)/python examples/evaluate_run.py runs/examples/plain
	STEPS=20 $(BIN)/python -W ignore examples/publish_any_saver.py runs/examples/publish
	STEPS=40 $(BIN)/python -W ignore examples/publish_any_saver.py runs/examples/publish
	STEPS=20 $(BIN)/python -W ignore -m torch.distributed.run --standalone --nproc-per-node 2 examples/publish_any_saver.py runs/examples/publish-ranks
	STEPS=20 $(BIN)/python -W ignore examples/dcp_one_import.py runs/examples/dcp
	STEPS=40 $(BIN)/python -W ignore examples/dcp_one_import.py runs/examples/dcp
	STEPS=20 $(BIN)/python -W ignore -m torch.distributed.run --standalone --nproc-per-node 2 examples/dcp_one_import.py runs/examples/dcp-ranks
	STEPS=40 $(BIN)/python -W ignore -m torch.distributed.run --standalone --nproc-per-node 3 examples/dcp_one_import.py runs/examples/dcp-ranks
	EPOCHS=2 $(BIN)/python -m torch.distributed.run --standalone --nproc-per-node 4 examples/fsdp2_reshard.py runs/examples/fsdp2
	EPOCHS=4 $(BIN)/python -m torch.distributed.run --standalone --nproc-per-node 2 examples/fsdp2_reshard.py runs/examples/fsdp2 --export
	EPOCHS=2 $(BIN)/python examples/lightning_digits.py runs/examples/lightning
	EPOCHS=4 DEVICES=2 $(BIN)/python examples/lightning_digits.py runs/examples/lightning
	STEPS=20 $(BIN)/python -W ignore examples/fabric_loop.py runs/examples/fabric
	STEPS=40 DEVICES=2 $(BIN)/python -W ignore examples/fabric_loop.py runs/examples/fabric-ddp
	STEPS=40 $(BIN)/python -W ignore examples/fabric_loop.py runs/examples/fabric
	EPOCHS=2 $(ACCELERATE) examples/accelerate_digits.py runs/examples/accelerate
	EPOCHS=4 $(ACCELERATE) examples/accelerate_digits.py runs/examples/accelerate
	STEPS=20 $(BIN)/python examples/transformers_tiny.py runs/examples/transformers
	STEPS=40 $(BIN)/python examples/transformers_tiny.py runs/examples/transformers
	STEPS=20 $(BIN)/python -W ignore -m torch.distributed.run --standalone --nproc-per-node 2 examples/transformers_sharded.py runs/examples/sharded tp
	STEPS=40 $(BIN)/python -W ignore -m torch.distributed.run --standalone --nproc-per-node 2 examples/transformers_sharded.py runs/examples/sharded fsdp
	@for way in plain accelerate lightning transformers; do for steps in 10 20; do \
	  echo "lora $$way $$steps"; STEPS=$$steps $(BIN)/python -W ignore examples/lora.py runs/examples/lora-$$way $$way || exit 1; done; done
	$(BIN)/safe-ckpt list runs/examples/lora-plain/checkpoints
	$(BIN)/safe-ckpt list runs/examples/plain
	$(BIN)/safe-ckpt list runs/examples/accelerate/checkpoints
	$(BIN)/safe-ckpt verify runs/examples/plain/step-00000110 runs/examples/lightning/last.ckpt

clean:
	rm -rf .venv runs site .pytest_cache .mypy_cache .ruff_cache
