"""From one format of checkpoints to another, one tensor at a time, without running anything in the source."""
