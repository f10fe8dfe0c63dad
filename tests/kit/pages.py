"""The files that a page of the documentation shows, so that a test runs what a reader would."""

from docs.blocks import blocks_of


def write_files(page, folder, *names):
    """Write files of these names into a folder, with what the page shows as their contents."""
    shown = {block.title: block.code for block in blocks_of(page) if block.title}
    for name in names:
        path = folder / name
        path.write_text(shown[name])
        path.chmod(0o755)


__all__ = ["write_files"]
