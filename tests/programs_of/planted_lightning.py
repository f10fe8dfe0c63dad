"""Mends of a resume under Lightning, turned back: title -> module file under src/safe_ckpt, old text, new text."""

from __future__ import annotations

PLANTED = {
    "generators are not put back": (
        "lightning/beside/epoch_start.py",
        "        if rng is not None:\n            set_rng_state(rng)\n",
        "",
    ),
    "what an epoch has logged is not put back": (
        "lightning/loop_state.py",
        '    if mine is not None and mine.get("results") is not None:\n',
        "    if mine is not None and not mine:\n",
    ),
    "schedulers that follow a metric do not step at the end of a resumed epoch": (
        "lightning/loop_state.py",
        "    if trainer.fit_loop.restarting and _metrics_are_known(trainer):\n",
        "    if trainer.fit_loop.restarting and not trainer:\n",
    ),
    "schedulers that were due after the save do not step": (
        "lightning/loop_state.py",
        "        if continuation.epoch_due:\n",
        "        if not continuation:\n",
    ),
    "an accumulation that was set is not put back": (
        "lightning/beside/epoch_start.py",
        "trainer.accumulate_grad_batches = accumulates or told",
        "trainer.accumulate_grad_batches = told",
    ),
    "an epoch that a hook has ended counts a batch too many": (
        "lightning/loop_state.py",
        '    total.update({name: total["ready"] - current["ready"] + current[name] for name in _STEPS_OF_A_BATCH})\n',
        "",
    ),
    "a save that waits for a validation is forgotten": (
        "lightning/callback.py",
        "        waits = {_WAITS: True} if getattr(self, _WAITS, False) else {}\n",
        "        waits: dict[str, Any] = {}\n",
    ),
    "a second fit that was killed begins with an optimizer of its own": (
        "lightning/resume.py",
        "        if none_given and (saver.goes_on or not trained):\n",
        "        if none_given and not trained:\n",
    ),
    "what a validation logs is counted on although its loaders are loaded again": (
        "lightning/loop_state.py",
        'mine.get("validated_since", since) == since',
        "True",
    ),
    "an empty validation is never over": (
        "lightning/loop_state.py",
        "            found = run()  # after an exception it is not over\n            self.validation = None  #",
        "            found = run()  #",
    ),
}
