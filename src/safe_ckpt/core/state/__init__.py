"""What a user's state consists of: names to objects, objects to files, and back in place."""
