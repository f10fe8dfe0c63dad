"""Numbers that cannot be right: found while a file's bytes are written, and what follows from them."""
