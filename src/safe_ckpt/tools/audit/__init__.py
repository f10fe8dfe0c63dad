"""``safe-ckpt audit``: runs a training script, stops it with SIGKILL, starts it again, and names what the resume forgot."""
