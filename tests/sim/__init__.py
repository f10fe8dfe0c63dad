"""A deterministic simulator: the real modules of safe_ckpt on simulated hosts, under one seeded scheduler and a virtual clock.

``world`` has the scheduler, the clock, hosts and processes. ``loader`` executes the real modules once per process, with the
shims of ``shims/`` in place of what would reach the machine. ``disk`` is the shared file system with its crash states.
``job`` is a training job, ``history`` puts jobs and faults into a world, ``oracle`` says what must never happen.
``planted`` has bugs that are patched in at load time: proof that the oracle can find something. See docs/simulator.md.
"""
