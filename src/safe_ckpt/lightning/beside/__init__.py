"""What other callbacks and the module do beside training: what they set for an epoch, and put into the module meanwhile."""
