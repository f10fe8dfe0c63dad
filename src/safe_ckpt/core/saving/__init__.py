"""A save, from the call to the commit, and what follows it."""
