"""Programs that nobody wrote by hand: made from a seed, run whole and interrupted, and compared. See docs/simulator.md."""
