"""The drawings of the documentation show what happens: tests compare the lines that they are made from with a save."""

import pytest

from docs.drawing import FOLDER, drawn


@pytest.mark.parametrize("source", sorted(FOLDER.glob("*.txt")), ids=lambda path: path.stem)
def test_a_drawing_is_that_of_its_lines(source):
    """``python tests/docs/drawing.py`` draws it anew."""
    assert source.with_suffix(".svg").read_text(encoding="utf-8") == drawn(source.read_text(encoding="utf-8"))
