"""Bugs that the programs of Accelerate and of the Trainer find: title -> the module below src/safe_ckpt, old text, new text."""

from __future__ import annotations

_LOADERS, _PLACE = "accelerate/dataloaders.py", "transformers/data_place.py"

ACCELERATE = {
    "an evaluation that was left is a place": (
        "accelerate/loops.py",
        "        self._left = self._steps == _steps\n",
        "        self._left = False\n",
    ),
    "loaders that are read side by side lose an epoch": (
        _LOADERS,
        "        if beside or loader.iteration != saved_iteration:",
        "        if loader.iteration != saved_iteration:",
    ),
    "each process has a place of its own where the main process dispatches": (
        _LOADERS,
        "    if not isinstance(loader, DataLoaderDispatcher):\n",
        "    if True:\n",
    ),
    "persistent workers are started anew, and draw": (
        _LOADERS,
        '        with self.drawing_nothing(begun["ready"] or begun.get("warm")):\n',
        '        with self.drawing_nothing(begun["ready"]):\n',
    ),
}
TRANSFORMERS = {
    "a training that is over goes on by a step": (
        "transformers/mixin.py",
        "        return (0, *values[1:]) if is_over else values\n",
        "        return values\n",
    ),
    "the buffer of a shuffled stream is left out": (
        _PLACE,
        '        skip: Skip = "read" if type(inner) is DataLoader and loses_its_buffer(inner) else None\n',
        "        skip: Skip = None\n",
    ),
    "the losses that were summed up are lost": (
        _PLACE,
        "        if summed is not None and hasattr(trainer, _TR_LOSS):\n",
        "        if False:\n",
    ),
}
TRAINED = {
    "a save before the next evaluation names a best that was not saved": (
        "transformers/mixin.py",
        "            saver.spare_spoilt(self.state)  # its save is over then; what is saved names it\n",
        "            pass\n",
    ),
}
