"""The user's state: names to objects, objects to files, and back in place."""
