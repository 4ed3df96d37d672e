"""The work of a run, from the model to the rows on disk."""
