"""Mutants of the package: does a test of the room notice a small change? See ``__main__``."""
