"""Each checkpoint goes to a second place as well, and comes back from there."""
