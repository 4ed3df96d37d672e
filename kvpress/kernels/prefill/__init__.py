"""Causal attention of a prompt that reads chosen tiles only."""
