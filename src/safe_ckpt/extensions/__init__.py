"""Extensions: they stand beside saves and resumes. The core does not know their names."""
