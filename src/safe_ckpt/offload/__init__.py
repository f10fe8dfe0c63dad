"""Folders of files of all ranks, consolidated and given back."""
