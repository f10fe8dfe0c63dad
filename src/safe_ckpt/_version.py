"""The version, for the build and for whoever must not import the package."""

__version__ = "0.1.0"
