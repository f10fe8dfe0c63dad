"""``safe-ckpt doctor``: whether this directory and this machine are fit for safe checkpoints.

Each check is a small function from an ``Examined`` directory to ``Finding`` records. ``examination.py`` lists them, and
``check.py`` runs them under a deadline. Everything is written into one private folder, which is removed at the end; no lock is
taken and no existing file is touched. Nothing here imports torch.
"""
