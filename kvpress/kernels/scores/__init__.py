"""Scores that tell which stored rows are worth reading."""
