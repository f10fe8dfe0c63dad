"""One directory of checkpoints: who owns it, what is in it, what is kept."""
