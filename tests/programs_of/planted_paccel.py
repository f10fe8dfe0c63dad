"""Bugs that the programs of Accelerate and of the Trainer find: title -> the module below src/safe_ckpt, old text, new text."""

from __future__ import annotations

_LOADERS, _PLACE = "accelerate/dataloaders.py", "transformers/data_place.py"

PLANTED = {
    "an evaluation that was left is a place": (
        "accelerate/loops.py",
        "        self._left = self._steps == _steps\n",
        "        self._left = False\n",
    ),
    "an evaluation that was left is not over for Accelerate": (
        _LOADERS,
        "            self.loader.end()  # else Accelerate takes it for the one that is trained on\n",
        "            pass\n",
    ),
    "what finding the end of a stream draws is drawn again": (
        _LOADERS,
        "            set_rng_state(drawn)  # what was drawn to find the end was drawn before the save\n",
        "",
    ),
    "each process has a place of its own where the main process dispatches": (
        _LOADERS,
        "    if not isinstance(loader, DataLoaderDispatcher):\n",
        "    if True:\n",
    ),
    "batches of all processes are taken for those of one": (
        _LOADERS,
        "        return place.batches // _ahead(self.loader) if",
        "        return place.batches if",
    ),
    "persistent workers are started anew, and draw": (
        _LOADERS,
        '        with self._drawing_nothing(begun["ready"] or begun.get("warm")):\n',
        '        with self._drawing_nothing(begun["ready"]):\n',
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
