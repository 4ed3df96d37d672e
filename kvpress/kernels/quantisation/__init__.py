"""Rows to packed integers."""
