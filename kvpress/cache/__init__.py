"""Storage of one layer's pairs: segments, window and their accounting."""
