"""A save from call to commit; a resume from candidate to verified checkpoint."""
