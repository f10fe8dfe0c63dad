"""One file per on-disk format, writing and reading side by side: what lies where, and back."""
