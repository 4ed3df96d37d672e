"""Numbers of the rows with the largest scores."""
