"""Decode attention over rows of any format."""
